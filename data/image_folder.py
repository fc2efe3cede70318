"""Image folders: ``<root>/train/<class>/*`` and ``<root>/val/<class>/*``; without labels, images
anywhere below ``<root>/train`` and ``<root>/val``, or below a ``<root>`` with neither. A table may
list images anywhere below ``<root>`` instead (``--labels``)."""

from typing import Any

from data.files import DataFolderError, read_bytes
from data.image_table import index_table
from data.images import ImageSplit, SampleTransform, source_of_images, view_of_images
from data.index import FolderIndex, index_folders
from data.source import DatasetRequest, DataSource


def open_folder(request: DatasetRequest) -> DataSource:
    """Index the requested splits. Raises DataFolderError."""
    config, transforms = request.config, view_of_images(request).transforms(request)
    find = index_folders if config.labels is None else index_table
    splits = {
        name: FolderSplit(request, name, transforms[name], index)
        for name, index in find(request).items()
    }
    return source_of_images(request, config.labels or config.data_dir, splits)


class FolderSplit(ImageSplit):
    """One split (train or val) of an image folder."""

    def __init__(
        self, request: DatasetRequest, name: str, transform: SampleTransform, index: FolderIndex
    ) -> None:
        super().__init__(request, name, transform, index.labels, index.classes, index.left_out)
        self.index = index

    def name_of(self, number: int) -> str:
        return self.index.paths[number]

    def read(self, number: int, most: int | None = None) -> bytes:
        return read_bytes(self.index.paths[number], 0, most, or_less=True)

    def value(self, number: int, name: str) -> Any:
        if name not in self.index.values:
            raise DataFolderError(
                f"the images in {self.request.config.data_dir} have no {name}: use --labels FILE, "
                "a table of paths with a column for it"
            )
        return self.index.values[name][number]

    def digest(self) -> str:
        return self.index.digest()
