"""The interface by which the training loop reads any data source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch

Batch = tuple[torch.Tensor, torch.Tensor]
"""A batch on the CPU: images (share, channels, rows, width), labels (share,) int64; of volumes
(share, channels, slices, height, width). Images are uint8, or fp32 that was normalised."""

BadImage = tuple[str, str, int]
"""The path of an image that cannot be read, the reason in one line, and its label."""

Sample = tuple[torch.Tensor, int, list[BadImage]]
"""An image, its label, and what was found to be broken on the way to it."""


class BatchLoader(Protocol):
    """Gives batches of one process's share, epoch by epoch, from any position.

    A source that gives the same tensor objects again tells the device side that
    nothing has to be copied.
    """

    prefetch_depth: int
    """How many batches to have ahead of the step; 0 for a source that must not run beside it."""

    def __len__(self) -> int:
        """Return how many global batches an epoch has."""

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        """Yield the batches of the epoch numbered ``epoch`` from ``first_batch`` on."""

    @property
    def workers(self) -> int:
        """Return how many loader processes read for this process."""

    def bad_images(self) -> list[BadImage]:
        """Return what was found broken in this process's share since the last call."""


class EmptyLoader:
    """Gives batches without images, all the same: to a process that others hand its images."""

    prefetch_depth = workers = 0

    def __init__(self, batches: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Take how many ``batches`` an epoch has, and what a batch is: of 0 images."""
        self._batches = batches
        self._batch = torch.zeros(shape, dtype=dtype), torch.zeros(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._batches

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        for _ in range(first_batch, len(self)):
            yield self._batch

    def bad_images(self) -> list[BadImage]:
        return []
