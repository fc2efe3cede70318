"""What sources of one file an image share: another image, or padding, for a broken one."""

from __future__ import annotations

import abc

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from data.errors import BrokenImageError, DataFolderError, printable
from data.folder_index import FolderIndex
from data.loader import BadImage, Sample
from data.sampler import PADDING

ATTEMPTS = 10
"""How many images are drawn in the place of a broken one before the folder is given up."""


def substitute(seed: int, epoch: int, index: int, attempt: int, length: int) -> int:
    """Return another image than ``index``, the ``attempt``-th (from 1 on) to take its place.

    It depends on the arguments alone: so a run trains on the same images, whatever number of
    processes its batches are divided over and wherever it is resumed.
    """
    state = np.random.SeedSequence((seed, epoch, index, attempt)).generate_state(1, np.uint64)
    return (index + 1 + int(state[0]) % max(length - 1, 1)) % length


class FileSplit(Dataset, abc.ABC):
    """One split (train or val) of files of images: a dataset by (epoch, image index).

    In the place of a broken image stands another one (``substitutes``, for training), or padding,
    which counts for nothing.
    """

    def __init__(self, index: FolderIndex, top: str, seed: int, *, substitutes: bool) -> None:
        """Take the files, which are told apart by their names below the folder ``top``."""
        self.index, self.seed = index, seed
        self._top, self._substitutes = top, substitutes

    dtype = torch.uint8
    """What ``make`` returns is made of."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the shape of what ``make`` returns."""

    @abc.abstractmethod
    def make(self, path: str, epoch: int, index: int) -> torch.Tensor:
        """Return the image in the file ``path``, as the model sees it.

        What is drawn at random depends on the seed, the epoch and the image's index alone: not on
        the worker that loads it, nor on where a run was resumed. Raises BrokenImageError.
        """

    @property
    def classes(self) -> list[str]:
        """Return the names of the classes by label."""
        return self.index.classes

    def __len__(self) -> int:
        return len(self.index.paths)

    def digest(self) -> str:
        """Return a checksum of the images' names below the split, in order."""
        names = "\n".join(path.removeprefix(f"{self._top}/") for path in self.index.paths)
        return xxhash.xxh3_64(names.encode(errors="surrogateescape")).hexdigest()

    def _padding(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        bad: list[BadImage] = []
        if index == PADDING:
            return self._padding(), PADDING, bad
        for attempt in range(1 + ATTEMPTS if self._substitutes else 1):
            chosen = index
            if attempt:
                chosen = substitute(self.seed, epoch, index, attempt, len(self))
            path = self.index.paths[chosen]
            try:
                return self.make(path, epoch, index), self.index.labels[chosen], bad
            except BrokenImageError as error:
                bad.append((printable(path), str(error)))
        if not self._substitutes:
            return self._padding(), PADDING, bad
        path, reason = bad[0]
        raise DataFolderError(
            f"{path} is not a readable image ({reason}), nor are {ATTEMPTS} others that were "
            "tried in its place"
        )
