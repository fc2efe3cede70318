"""The base of splits of images whose files can be read as bytes, wherever they are kept."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import torch

from data.decode import open_image
from data.sample_split import SampleSplit
from data.source import Wanted, WholeImages
from data.transforms import Transform, seeded


class BytesSplit(SampleSplit, WholeImages):
    """One split of images, each read as the bytes of a JPEG, PNG or the like, and then decoded."""

    def __init__(
        self,
        wanted: Wanted,
        labels: Sequence[int] | np.ndarray,
        transform: Transform,
        *,
        substitutes: bool,
    ) -> None:
        """Take the labels, in order, and what makes of an image what the model sees."""
        super().__init__(labels, wanted.seed, substitutes=substitutes)
        self._transform, self._shape = transform, wanted.shape

    @abc.abstractmethod
    def read(self, number: int) -> bytes:
        """Return the image ``number`` as it is kept, encoded. Raises BrokenImageError."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def make(self, number: int, epoch: int, index: int) -> torch.Tensor:
        image = open_image(self.read(number))
        return seeded(self._transform, image, self.seed, epoch, index)
