"""The source of images in ``<root>/train/<class>/*`` and ``<root>/val/<class>/*``.

The root is a folder, or a URL such as gs://bucket/folder (``data/files.py``).
"""

from __future__ import annotations

from collections import Counter

from data.buckets import make_source
from data.files import HEAD, read_bytes
from data.index import cached_split, check_folder
from data.source import DatasetRequest, DataSource
from data.transforms import BytesSplit, Transform, transforms_of


def open_folder(request: DatasetRequest) -> DataSource:
    """Index the splits that are requested; otherwise what is in train/ does not matter.

    Raises DataFolderError, see ``index_split``.
    """
    augment, plain = transforms_of(request)
    root = request.config.data_dir
    check_folder(root, request.num_classes, ("train", "val") if request.with_train else ("val",))
    train = FolderSplit(request, "train", augment) if request.with_train else None
    val = FolderSplit(request, "val", plain)
    left_out = (train.index.left_out if train else Counter[str]()) + val.index.left_out
    return make_source(request, root, train, val, val.index.classes, left_out)


class FolderSplit(BytesSplit):
    """One split (train or val) of an image folder: a dataset by (epoch, image index)."""

    def __init__(self, request: DatasetRequest, split: str, transform: Transform) -> None:
        """Index the split's images. Raises DataFolderError, see ``cached_split``."""
        self.index = cached_split(request.config, split)
        super().__init__(request, self.index.labels, transform, substitutes=split == "train")

    def name_of(self, number: int) -> str:
        return self.index.paths[number]

    def read(self, number: int) -> bytes:
        return read_bytes(self.index.paths[number])

    def head(self, number: int) -> bytes:
        return read_bytes(self.index.paths[number], 0, HEAD, or_less=True)

    def digest(self) -> str:
        return self.index.digest()
