"""The interface by which the training loop reads any data source, and its loader processes."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from data.errors import DataFolderError
from data.sampler import GlobalBatchSampler

Batch = tuple[torch.Tensor, torch.Tensor]
"""A batch on the CPU: images (share, channels, rows, width), labels (share,) int64; of volumes
(share, channels, slices, height, width). Images are uint8, or fp32 that was normalised."""

BadImage = tuple[str, str]
"""The path of an image that cannot be read, and the reason in one line."""

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

    def bad_images(self) -> list[BadImage]:
        """Return what was found broken in this process's share since the last call."""


def _outlive_signals(_worker_id: int) -> None:
    """Let a loader process ignore the signals that stop training.

    Ctrl-C and torchrun send them to all processes of the group, but only the training process
    decides to stop, and until its checkpoint is written it needs its loader.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_told_by, args=(os.getppid(),), daemon=True).start()


def _end_when_told_by(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


class _Batches(Dataset):
    """Gives whole batches of a dataset of ``Sample``, with what was broken in them.

    A folder that cannot be used comes as a DataFolderError in a batch's place: raised in a worker,
    its message would be wrapped in a traceback.
    """

    def __init__(self, samples: Dataset) -> None:
        self._samples = samples

    def __getitem__(
        self, keys: list[tuple[int, int]]
    ) -> tuple[Batch, list[BadImage]] | DataFolderError:
        try:
            samples = [self._samples[key] for key in keys]
        except DataFolderError as error:
            return error
        images, labels = default_collate([(image, label) for image, label, _ in samples])
        return (images, labels), [entry for *_, bad in samples for entry in bad]


def _as_it_is(batch: Any) -> Any:
    return batch


class DatasetLoader:
    """Loads a map-style dataset with worker processes that live for the whole run.

    The dataset gives a ``Sample`` for (epoch, image index), see ``GlobalBatchSampler``.
    """

    def __init__(self, dataset: Dataset, sampler: GlobalBatchSampler, num_workers: int) -> None:
        self._sampler = sampler
        # Without workers, transforms would share this process's random state with the step.
        self.prefetch_depth = 2 if num_workers else 0
        self._told: set[str] = set()
        self._bad: deque[BadImage] = deque()  # filled in the thread that prefetches
        self._loader = DataLoader(
            _Batches(dataset),
            sampler=sampler,
            batch_size=None,  # the sampler's batches
            collate_fn=_as_it_is,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            worker_init_fn=_outlive_signals,
        )

    def __len__(self) -> int:
        return len(self._sampler)

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        self._sampler.set_position(epoch, first_batch)
        for loaded in self._loader:
            if isinstance(loaded, DataFolderError):
                raise loaded
            batch, bad = loaded
            for path, reason in bad:
                if path not in self._told:
                    self._told.add(path)
                    self._bad.append((path, reason))
            yield batch

    def bad_images(self) -> list[BadImage]:
        return [self._bad.popleft() for _ in range(len(self._bad))]


class EmptyLoader:
    """Gives batches without images, all the same: to a process that others hand its images."""

    prefetch_depth = 0

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
