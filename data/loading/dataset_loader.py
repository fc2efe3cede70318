"""Loads datasets with processes of its own, which read parts of batches and are replaced if lost.

A part is what one process reads at a time: so the first batch is not one process's work, and no
more is in memory than the parts on the way.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate
from tqdm import tqdm

from data.errors import DataFolderError
from data.loading.loader import BadImage, Batch
from data.loading.sampler import GlobalBatchSampler, Key

_MOST_IMAGES = 64  # of a part
_MOST_WORKERS = 32
"""That are chosen: at 1,000 images a second each, more than any host's chips take so far."""
_REPLACED = 3
"""How often in a row lost processes are replaced without a batch in between."""


def workers_of_host(processes: int) -> int:
    """Return how many loader processes each of so many training processes of a host should have.

    One a core that this process may use, but for one of each training process.
    """
    cores = len(os.sched_getaffinity(0))
    return min(max(1, cores // processes - 1), _MOST_WORKERS)


class DatasetLoader:
    """Loads a map-style dataset with worker processes that live for the whole run.

    The dataset gives a ``Sample`` for (epoch, image index), see ``GlobalBatchSampler``.
    """

    def __init__(self, dataset: Dataset, sampler: GlobalBatchSampler, workers: int) -> None:
        self._dataset, self._sampler, self.workers = dataset, sampler, workers
        # Without workers, transforms would share this process's random state with the step.
        self.prefetch_depth = 2 if workers else 0
        a_worker = min(-(-sampler.share // max(workers, 1)), _MOST_IMAGES)
        size = max(a_worker, sampler.read_together) if workers else sampler.share
        self._parts = _Parts(sampler, min(size, sampler.share))
        self._told: set[str] = set()
        self._bad: deque[BadImage] = deque()  # filled in the thread that prefetches
        self._loader = self._start()

    def __len__(self) -> int:
        return len(self._sampler)

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        done, lost = first_batch, 0
        while done < len(self):
            try:
                for batch in self._batches(epoch, done):
                    done, lost = done + 1, 0
                    yield batch
            except (RuntimeError, OSError, EOFError) as error:  # as the DataLoader tells it
                lost += 1
                if not self.workers or lost > _REPLACED:
                    raise
                tqdm.write(
                    f"a loader process was lost, all {self.workers} are started anew: "
                    f"{str(error).splitlines()[0]}",
                    file=sys.stderr,
                )
                self._loader = self._start()

    def bad_images(self) -> list[BadImage]:
        return [self._bad.popleft() for _ in range(len(self._bad))]

    def _start(self) -> DataLoader:
        return DataLoader(
            _Loaded(self._dataset),
            sampler=self._parts,
            batch_size=None,  # the sampler's parts
            collate_fn=_as_it_is,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            worker_init_fn=_begin,
        )

    def _batches(self, epoch: int, first_batch: int) -> Iterator[Batch]:
        self._sampler.set_position(epoch, first_batch)
        parts: list[Batch] = []
        for loaded in self._loader:
            if isinstance(loaded, DataFolderError):
                raise loaded
            part, bad = loaded
            for image in bad:
                if image[0] not in self._told:
                    self._told.add(image[0])
                    self._bad.append(image)
            parts.append(part)
            if len(parts) == self._parts.a_batch:
                yield _joined(parts)
                parts = []


class _Parts(Sampler[list[Key]]):
    """Divides each batch of a sampler into parts of up to ``size`` images, one after the other."""

    def __init__(self, sampler: GlobalBatchSampler, size: int) -> None:
        self._sampler, self._size = sampler, size
        self.a_batch = -(-sampler.share // size)

    def __iter__(self) -> Iterator[list[Key]]:
        for batch in self._sampler:
            for first in range(0, len(batch), self._size):
                yield batch[first : first + self._size]


class _Loaded(Dataset):
    """Gives parts of batches of a dataset of ``Sample``, with what was broken in them.

    A folder that cannot be used comes as a DataFolderError in a part's place: raised in a worker,
    its message would be wrapped in a traceback.
    """

    def __init__(self, samples: Dataset) -> None:
        self._samples = samples

    def __getitem__(self, keys: list[Key]) -> tuple[Batch, list[BadImage]] | DataFolderError:
        try:
            samples = [self._samples[key] for key in keys]
        except DataFolderError as error:
            return error
        images, labels = default_collate([(image, label) for image, label, _ in samples])
        return (images, labels), [entry for *_, bad in samples for entry in bad]


def _as_it_is(part: Any) -> Any:
    return part


def _joined(parts: list[Batch]) -> Batch:
    if len(parts) == 1:
        return parts[0]
    images, labels = (torch.cat(each) for each in zip(*parts, strict=True))
    return images, labels


def _begin(_worker_id: int) -> None:
    """Let a loader process ignore the signals that stop training, and share its parent's memory.

    Ctrl-C and torchrun send them to all processes of the group, but only the training process
    decides to stop, and until its checkpoint is written it needs its loader.
    """
    gc.freeze()  # or a garbage collection would write to every object, and so copy it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_told_by, args=(os.getppid(),), daemon=True).start()


def _end_when_told_by(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
