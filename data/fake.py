"""A source of all-zero images with label 0, as many as ImageNet has: for smoke runs and timing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from data.loader import PADDING, BatchLoader, ConstantLoader, Key, Sample, Share
from data.source import DatasetRequest, DataSource, Split

TRAIN_LENGTH, VAL_LENGTH = 1_281_167, 50_000


class FakeSource(DataSource):
    """A source that reads nothing and gives the same batch of zeros again and again."""

    decodes = False

    def __init__(self, request: DatasetRequest) -> None:
        train = FakeSplit(TRAIN_LENGTH) if request.with_train else None
        super().__init__(request, "fake data (zeros)", train, FakeSplit(VAL_LENGTH), None)

    def _loader(self, split: Split, batch_size: int, share: Share, *, shuffle: bool) -> BatchLoader:
        """Training drops a short last batch; validation fills it up with padding, by its labels."""
        config, (full, rest) = self._request.config, divmod(len(split), batch_size)
        dtype = getattr(torch, config.image_dtype(len(self._request.size)))
        shape = share.shape_of(batch_size, self._request.shape)
        # The operating system gives no memory to zeros of NumPy's until they are written to.
        # Zeros of torch.Tensor.expand take none either, but cannot be pinned for a GPU.
        zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        images = torch.from_numpy(zeros).view(dtype).view(shape)
        labels = torch.zeros(len(images), dtype=torch.int64)
        if shuffle or not rest:
            return ConstantLoader(full, (images, labels))
        present = torch.arange(len(images)) + share.rank * len(images) < rest
        last = images, torch.where(present, labels, PADDING)
        return ConstantLoader(full + 1, (images, labels), last)

    def order(self) -> dict[str, Any]:
        return {}  # all images are the same

    def fingerprint(self) -> dict[str, Any]:
        return {
            "the number of training images": self.train_length,
            "the number of validation images": self.val_length,
        }


class FakeSplit(Split):
    """Images that are never read: only their number matters."""

    reads_rows = True

    def __init__(self, length: int) -> None:
        self.labels = np.broadcast_to(np.int64(0), length)

    def __getitem__(self, key: Key) -> Sample:
        raise NotImplementedError

    def digest(self) -> str:
        raise NotImplementedError
