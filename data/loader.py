"""What the training loop sees of any data source."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from data.sampler import GlobalBatchSampler

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images (share, channels, height, width) float32 and labels (share,) int64, on CPU."""


class BatchLoader(Protocol):
    """Batches of one process's share, epoch by epoch, from any position.

    A source that gives the same tensor objects again tells the device side that
    nothing has to be copied.
    """

    prefetch_depth: int
    """Batches worth having ahead of the step; 0 for a source that must not run beside it."""

    def __len__(self) -> int:
        """Global batches in an epoch."""

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        """The batches of ``epoch`` from ``first_batch`` on."""


def _outlive_signals(_worker_id: int) -> None:
    """Of a stop, only the training process decides: until its checkpoint is written, it needs
    its loader, but Ctrl-C and torchrun send their signals to all processes of the group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_told_by, args=(os.getppid(),), daemon=True).start()


def _end_when_told_by(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


class DatasetLoader:
    """Loads a map-style dataset with worker processes that live for the whole run.

    The dataset is indexed by (epoch, image index), see ``GlobalBatchSampler``.
    """

    def __init__(self, dataset: Dataset, sampler: GlobalBatchSampler, num_workers: int) -> None:
        self._sampler = sampler
        # Without workers, transforms would share this process's random state with the step.
        self.prefetch_depth = 2 if num_workers else 0
        self._loader = DataLoader(
            dataset,
            batch_sampler=sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=_outlive_signals,
        )

    def __len__(self) -> int:
        return len(self._sampler)

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        self._sampler.set_position(epoch, first_batch)
        yield from self._loader
