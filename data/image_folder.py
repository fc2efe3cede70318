"""The source of images in ``<root>/train/<class>/*`` and ``<root>/val/<class>/*``.

Without labels they are anywhere below ``<root>/train`` and, if it is there, ``<root>/val``, or
below a ``<root>`` that has neither.

The root is a folder, or a URL such as gs://bucket/folder (``data/files.py``).
"""

from data.buckets import source_of
from data.files import HEAD, read_bytes
from data.index import cached_split, check_folder
from data.source import DatasetRequest, DataSource
from data.transforms import ImageSplit, Transform, transforms_of


def open_folder(request: DatasetRequest) -> DataSource:
    """Index the splits that are requested; otherwise what is in train/ does not matter.

    Raises DataFolderError, see ``index_split``.
    """
    transforms, root = transforms_of(request), request.config.data_dir
    if request.labels:
        check_folder(root, request.num_classes, request.splits, class_map=request.config.class_map)
    splits = request.of_splits(lambda name: FolderSplit(request, name, transforms[name]))
    return source_of(request, root, splits)


class FolderSplit(ImageSplit):
    """One split (train or val) of an image folder."""

    def __init__(self, request: DatasetRequest, name: str, transform: Transform) -> None:
        """Index the split's images. Raises DataFolderError, see ``cached_split``."""
        self.index = found = cached_split(request.config, name, labels=request.labels)
        super().__init__(request, name, transform, found.labels, found.classes, found.left_out)

    def name_of(self, number: int) -> str:
        return self.index.paths[number]

    def read(self, number: int) -> bytes:
        return read_bytes(self.index.paths[number])

    def head(self, number: int) -> bytes:
        return read_bytes(self.index.paths[number], 0, HEAD, or_less=True)

    def digest(self) -> str:
        return self.index.digest()
