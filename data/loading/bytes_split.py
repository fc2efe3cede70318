"""The base of splits of images whose files can be read as bytes, wherever they are kept."""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch

from data.errors import BrokenImageError
from data.image.decode import image_size, open_image
from data.image.transforms import Transform, seeded
from data.loading.sample_split import SampleSplit
from data.source import Wanted, WholeImages


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

    @abc.abstractmethod
    def digest(self) -> str:
        """Return a checksum of what the split's images are, in order."""

    def head(self, number: int) -> bytes:
        """Return the beginning of the image ``number``, encoded. Raises BrokenImageError."""
        return self.read(number)

    def size_of(self, number: int) -> tuple[int, int]:
        """Return height and width of the image ``number`` in pixels, mostly from its beginning.

        Raises BrokenImageError.
        """
        try:
            return image_size(self.head(number))
        except BrokenImageError:
            return image_size(self.read(number))

    def made_by(self, transform: Transform, shape: tuple[int, ...]) -> Self:
        """Return the same images, of which another transform makes tensors of this shape."""
        split = copy.copy(self)
        split._transform, split._shape = transform, shape
        return split

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    def make(self, number: int, epoch: int, index: int) -> torch.Tensor:
        image = open_image(self.read(number))
        return seeded(self._transform, image, self.seed, epoch, index)
