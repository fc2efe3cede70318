"""The source of images that lie in ``<root>/train/<class>/*`` and ``<root>/val/<class>/*``."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
import xxhash
from PIL import Image

from data.decode import read_image
from data.errors import BrokenImageError, DataFolderError, printable
from data.folder_index import check_folder, index_split
from data.loader import BadImage, Sample
from data.sampler import PADDING
from data.source import SplitSource, Wanted, WholeImages
from data.transforms import seeded, transforms_of

ATTEMPTS = 10
"""How many images are drawn in the place of a broken one before the folder is given up."""


def open_folder(wanted: Wanted) -> SplitSource:
    """Index the splits that are wanted; what is in train/ does not matter if it is not wanted.

    Raises DataFolderError, see ``index_split``.
    """
    augment, plain = transforms_of(wanted)
    root, seed = wanted.config.data_dir, wanted.seed
    check_folder(root, wanted.num_classes, ("train", "val") if wanted.with_train else ("val",))
    train = None
    if wanted.with_train:
        train = FolderSplit(root, "train", augment, seed, substitutes=True)
    val = FolderSplit(root, "val", plain, seed, substitutes=False)
    left_out = (train.index.left_out if train else Counter[str]()) + val.index.left_out
    return SplitSource(wanted, root, train, val, val.classes, left_out)


def substitute(seed: int, epoch: int, index: int, attempt: int, length: int) -> int:
    """Return another image than ``index``, the ``attempt``-th (from 1 on) to take its place.

    It depends on the arguments alone: so a run trains on the same images, whatever number of
    processes its batches are divided over and wherever it is resumed.
    """
    state = np.random.SeedSequence((seed, epoch, index, attempt)).generate_state(1, np.uint64)
    return (index + 1 + int(state[0]) % max(length - 1, 1)) % length


class FolderSplit(WholeImages):
    """One split (train or val) of an image folder: a dataset by (epoch, image index).

    What a transform draws at random depends on the seed, the epoch and the image
    alone: not on the worker that loads it, nor on where a run was resumed.

    In the place of a broken image stands another one (``substitutes``, for training), or padding,
    which counts for nothing.
    """

    def __init__(
        self, root: str, split: str, transform: Callable, seed: int, *, substitutes: bool
    ) -> None:
        """Index the split's images. Raises DataFolderError, see ``index_split``."""
        self.index = index_split(root, split)
        self._top = os.path.join(root, split)
        self._transform, self._seed, self._substitutes = transform, seed, substitutes

    @property
    def classes(self) -> list[str]:
        """Return the names of the classes by label."""
        return self.index.classes

    def __len__(self) -> int:
        return len(self.index.paths)

    def digest(self) -> str:
        """Return a checksum of the images' names below the split, in order."""
        start = len(self._top) + 1
        names = "\n".join(path[start:] for path in self.index.paths)
        return xxhash.xxh3_64(names.encode(errors="surrogateescape")).hexdigest()

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        if index == PADDING:
            return self._blank, PADDING, []
        bad: list[BadImage] = []
        image = self._read(index, bad)
        chosen = index
        if image is None and not self._substitutes:
            return self._blank, PADDING, bad
        for attempt in range(1, ATTEMPTS + 1):
            if image is not None:
                break
            chosen = substitute(self._seed, epoch, index, attempt, len(self))
            image = self._read(chosen, bad)
        if image is None:
            path, reason = bad[0]
            raise DataFolderError(
                f"{path} is not a readable image ({reason}), nor are {ATTEMPTS} others that were "
                "tried in its place"
            )
        tensor = seeded(self._transform, image, self._seed, epoch, index)
        return tensor, self.index.labels[chosen], bad

    def _read(self, index: int, bad: list[BadImage]) -> Image.Image | None:
        """Return the image, or None after adding its path and the reason to ``bad``."""
        path = self.index.paths[index]
        try:
            return read_image(path)
        except BrokenImageError as error:
            bad.append((printable(path), str(error)))
            return None

    @functools.cached_property
    def _blank(self) -> torch.Tensor:
        """Return zeros of an image's shape, which only the transform knows."""
        return torch.zeros_like(self._transform(Image.new("RGB", (8, 8))))
