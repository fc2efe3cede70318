"""The source of images that lie in ``<root>/train/<class>/*`` and ``<root>/val/<class>/*``.

The root is a folder, or a URL such as gs://bucket/folder (``data/files.py``).
"""

from __future__ import annotations

from collections import Counter

from data.buckets import source_of
from data.files import read_bytes, read_head
from data.index import check_folder, kept_split
from data.source import SplitSource, Wanted
from data.transforms import BytesSplit, Transform, transforms_of


def open_folder(wanted: Wanted) -> SplitSource:
    """Index the splits that are wanted; what is in train/ does not matter if it is not wanted.

    Raises DataFolderError, see ``index_split``.
    """
    augment, plain = transforms_of(wanted)
    root = wanted.config.data_dir
    check_folder(root, wanted.num_classes, ("train", "val") if wanted.with_train else ("val",))
    train = FolderSplit(wanted, "train", augment) if wanted.with_train else None
    val = FolderSplit(wanted, "val", plain)
    left_out = (train.index.left_out if train else Counter[str]()) + val.index.left_out
    return source_of(wanted, root, train, val, val.index.classes, left_out)


class FolderSplit(BytesSplit):
    """One split (train or val) of an image folder: a dataset by (epoch, image index)."""

    def __init__(self, wanted: Wanted, split: str, transform: Transform) -> None:
        """Index the split's images. Raises DataFolderError, see ``kept_split``."""
        self.index = kept_split(wanted.config, split)
        super().__init__(wanted, self.index.labels, transform, substitutes=split == "train")

    def name_of(self, number: int) -> str:
        return self.index.paths[number]

    def read(self, number: int) -> bytes:
        return read_bytes(self.index.paths[number])

    def head(self, number: int) -> bytes:
        return read_head(self.index.paths[number])

    def digest(self) -> str:
        return self.index.digest()
