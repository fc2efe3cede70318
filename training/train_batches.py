"""Brings the training batches of an epoch to the devices before they are wanted."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Generator

from data.errors import DataFolderError
from data.loading.loader import Batch, BatchLoader
from training.backend import Backend
from training.checkpoints.content import Position
from training.prefetch import prefetch
from training.step import put_micro_batches


class TrainBatches:
    """Goes through the training images from any position, each batch as micro-batches."""

    def __init__(
        self, loader: BatchLoader, backend: Backend, batch_size: int, micro_batches: int
    ) -> None:
        self.loader, self._backend = loader, backend
        self._batch_size, self._micro_batches = batch_size, micro_batches
        self.waited_s = 0.0
        """The seconds spent waiting for batches, until someone sets it to 0."""
        self.last_wait_s = 0.0
        """The seconds spent waiting for the newest batch."""
        self.failed: DataFolderError | None = None
        """Why no batch follows those that are ready; known while these are still trained on."""

    def number(self, at: Position) -> int:
        """Return how many batches come before ``at`` since the start of training."""
        return at.epoch * len(self.loader) + at.images_in_epoch // self._batch_size

    def after(self, at: Position) -> Position:
        """Return the position one step, and so one batch, later."""
        batches_done = at.images_in_epoch // self._batch_size + 1
        if batches_done == len(self.loader):
            return Position(at.step + 1, at.epoch + 1, 0)
        return Position(at.step + 1, at.epoch, batches_done * self._batch_size)

    def rest_of_epoch(self, at: Position) -> Generator[list[Batch]]:
        """Yield the micro-batches of each step from ``at`` to the end of its epoch."""
        source = self.loader.epoch(at.epoch, at.images_in_epoch // self._batch_size)
        depth = self.loader.prefetch_depth
        with contextlib.closing(prefetch(source, self._put, depth, self._note_failure)) as ready:
            while True:
                asked = time.perf_counter()
                batch = next(ready, None)
                if batch is None:
                    return
                self.last_wait_s = time.perf_counter() - asked
                self.waited_s += self.last_wait_s
                yield batch

    def _note_failure(self, error: BaseException) -> None:
        if isinstance(error, DataFolderError):
            self.failed = error
            print(f"warning: {error}: training stops with a checkpoint", file=sys.stderr)

    def _put(self, batch: Batch) -> list[Batch]:
        return put_micro_batches(self._backend, batch, self._micro_batches)
