"""What sources of labelled images share: another image, or padding, for a broken one."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from data.errors import BrokenImageError, DataFolderError, printable
from data.loading.loader import BadImage, Sample
from data.loading.sampler import PADDING

ATTEMPTS = 10
"""How many images are drawn in the place of a broken one before the folder is given up."""


def substitute(seed: int, epoch: int, index: int, attempt: int, length: int) -> int:
    """Return another image than ``index``, the ``attempt``-th (from 1 on) to take its place.

    It depends on the arguments alone: so a run trains on the same images, whatever number of
    processes its batches are divided over and wherever it is resumed.
    """
    state = np.random.SeedSequence((seed, epoch, index, attempt)).generate_state(1, np.uint64)
    return (index + 1 + int(state[0]) % max(length - 1, 1)) % length


class SampleSplit(Dataset, abc.ABC):
    """One split (train or val) of labelled images: a dataset by (epoch, image index).

    In the place of a broken image stands another one (``substitutes``, for training), or padding,
    which counts for nothing.
    """

    dtype = torch.uint8
    """What ``make`` returns is made of."""

    def __init__(self, labels: Sequence[int] | np.ndarray, seed: int, *, substitutes: bool) -> None:
        """Take the labels of the images, in order: an array where there may be millions."""
        self.labels, self.seed = labels, seed
        self._substitutes = substitutes

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the shape of what ``make`` returns."""

    @abc.abstractmethod
    def name_of(self, number: int) -> str:
        """Return what a person finds the image ``number`` by: its path, as a rule."""

    @abc.abstractmethod
    def make(self, number: int, epoch: int, index: int) -> torch.Tensor:
        """Return the image ``number``, as the model sees it; it stands in the place of ``index``.

        What is drawn at random depends on the seed, the epoch and ``index`` alone: not on
        the worker that loads it, nor on where a run was resumed. Raises BrokenImageError.
        """

    def __len__(self) -> int:
        return len(self.labels)

    def _padding(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        bad: list[BadImage] = []
        if index == PADDING:
            return self._padding(), PADDING, bad
        for attempt in range(1 + ATTEMPTS if self._substitutes else 1):
            number = index
            if attempt:
                number = substitute(self.seed, epoch, index, attempt, len(self))
            try:
                return self.make(number, epoch, index), int(self.labels[number]), bad
            except BrokenImageError as error:
                name = printable(self.name_of(number))
                bad.append((name, str(error), int(self.labels[number])))
        if not self._substitutes:
            return self._padding(), PADDING, bad
        name, reason, _ = bad[0]
        raise DataFolderError(
            f"{name} is not a readable image ({reason}), nor are {ATTEMPTS} others that were "
            "tried in its place"
        )
