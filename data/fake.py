"""A source of all-zero images with label 0, as many as ImageNet has: for smoke runs and timing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from data.loader import BadImage, Batch, Share
from data.source import Wanted, describe

TRAIN_LENGTH, VAL_LENGTH = 1_281_167, 50_000


class FakeSource:
    """A ``DataSource`` that reads nothing and gives zeros."""

    name = "fake data (zeros)"
    classes: list[str] | None = None
    decodes = False
    reads_rows = True
    val_length = VAL_LENGTH

    def __init__(self, wanted: Wanted) -> None:
        self._shape = wanted.shape
        self._dtype = getattr(torch, wanted.config.image_dtype(len(wanted.size)))
        self.train_length = TRAIN_LENGTH if wanted.with_train else 0

    def train_loader(self, batch_size: int, share: Share) -> FakeLoader:
        return self._loader(self.train_length, batch_size, share, keep_short=False)

    def val_loader(self, batch_size: int, share: Share) -> FakeLoader:
        return self._loader(self.val_length, batch_size, share, keep_short=True)

    def _loader(
        self, length: int, batch_size: int, share: Share, *, keep_short: bool
    ) -> FakeLoader:
        return FakeLoader(
            length, batch_size, self._shape, share, self._dtype, keep_short=keep_short
        )

    def order(self) -> dict[str, Any]:
        return {}  # all images are the same

    def fingerprint(self) -> dict[str, Any]:
        return {
            "the number of training images": self.train_length,
            "the number of validation images": self.val_length,
        }

    def __str__(self) -> str:
        return describe(self)


class FakeLoader:
    """Gives one and the same batch of zeros again and again: no host work after the first.

    The zeros take no memory on the host, whatever the size of the images.

    With ``keep_short`` the last batch of an epoch, if short, is filled up with the
    label -1, as the folder loader does for evaluation; without, it is dropped.
    """

    prefetch_depth = workers = 0

    def __init__(
        self,
        length: int,
        batch_size: int,
        image_shape: tuple[int, ...],
        share: Share,
        dtype: torch.dtype,
        *,
        keep_short: bool,
    ) -> None:
        self._length, self._batch_size, self._keep_short = length, batch_size, keep_short
        shape = share.shape_of(batch_size, image_shape)
        # The operating system gives no memory to zeros of NumPy's until they are written to.
        # Zeros of torch.Tensor.expand take none either, but cannot be pinned for a GPU.
        zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        images = torch.from_numpy(zeros).view(dtype).view(shape)
        count = len(images)
        self._full = images, torch.zeros(count, dtype=torch.int64)
        present = torch.arange(count) + share.rank * count < length % batch_size
        self._short = images, torch.where(present, 0, -1)

    def __len__(self) -> int:
        full, rest = divmod(self._length, self._batch_size)
        return full + bool(rest) if self._keep_short else full

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        full = self._length // self._batch_size
        for batch in range(first_batch, len(self)):
            yield self._full if batch < full else self._short

    def bad_images(self) -> list[BadImage]:
        return []
