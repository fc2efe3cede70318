"""The source of images in ``<root>/train/<class>/*`` and ``<root>/val/<class>/*``.

Without labels they are anywhere below ``<root>/train`` and, if it exists, ``<root>/val``, or below
a ``<root>`` that has neither.

The root is a folder, or a URL such as gs://bucket/folder (``data/files.py``).
"""

from data.buckets import source_of
from data.files import HEAD, read_bytes
from data.index import FolderIndex, index_folders
from data.source import DatasetRequest, DataSource
from data.transforms import ImageSplit, Transform, transforms_of


def open_folder(request: DatasetRequest) -> DataSource:
    """Index the splits that are requested; otherwise what is in train/ does not matter.

    Raises DataFolderError, see ``index_folders``.
    """
    transforms = transforms_of(request)
    splits = {
        name: FolderSplit(request, name, transforms[name], index)
        for name, index in index_folders(request).items()
    }
    return source_of(request, request.config.data_dir, splits)


class FolderSplit(ImageSplit):
    """One split (train or val) of an image folder."""

    def __init__(
        self, request: DatasetRequest, name: str, transform: Transform, index: FolderIndex
    ) -> None:
        super().__init__(request, name, transform, index.labels, index.classes, index.left_out)
        self.index = index

    def name_of(self, number: int) -> str:
        return self.index.paths[number]

    def read(self, number: int) -> bytes:
        return read_bytes(self.index.paths[number])

    def head(self, number: int) -> bytes:
        return read_bytes(self.index.paths[number], 0, HEAD, or_less=True)

    def digest(self) -> str:
        return self.index.digest()
