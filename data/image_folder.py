"""The source of images that lie in ``<root>/train/<class>/*`` and ``<root>/val/<class>/*``."""

from __future__ import annotations

import os
from collections import Counter

import torch

from data.decode import open_image
from data.errors import BrokenImageError, reason_of
from data.file_split import FileSplit
from data.folder_index import check_folder, index_split
from data.source import SplitSource, Wanted, WholeImages
from data.transforms import Transform, seeded, transforms_of


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
    return SplitSource(wanted, root, train, val, val.classes, left_out)


class FolderSplit(FileSplit, WholeImages):
    """One split (train or val) of an image folder: a dataset by (epoch, image index)."""

    def __init__(self, wanted: Wanted, split: str, transform: Transform) -> None:
        """Index the split's images. Raises DataFolderError, see ``index_split``."""
        root = wanted.config.data_dir
        found, top = index_split(root, split), os.path.join(root, split)
        super().__init__(found, top, wanted.seed, substitutes=split == "train")
        self._transform, self._shape = transform, wanted.shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def make(self, path: str, epoch: int, index: int) -> torch.Tensor:
        try:
            with open(path, "rb") as file:
                image = open_image(file.read())
        except OSError as error:
            raise BrokenImageError(reason_of(error)) from error
        return seeded(self._transform, image, self.seed, epoch, index)
