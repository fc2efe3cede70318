"""Image folders: ``<root>/train/<class>/*`` and ``<root>/val/<class>/*``; without labels, images
anywhere below ``<root>/train`` and ``<root>/val``, or below a ``<root>`` with neither."""

from data.files import read_bytes
from data.index import FolderIndex, index_folders
from data.source import DatasetRequest, DataSource, ImageSplit, SampleTransform


def open_folder(request: DatasetRequest) -> DataSource:
    """Index the requested splits. Raises DataFolderError."""
    transforms = request.view.transforms(request)
    splits = {
        name: FolderSplit(request, name, transforms[name], index)
        for name, index in index_folders(request).items()
    }
    return request.view.arrange(request, request.config.data_dir, splits)


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

    def digest(self) -> str:
        return self.index.digest()
