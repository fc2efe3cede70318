"""Brings the training batches of an epoch to the devices before they are wanted."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from data.files import DataFolderError
from data.loader import Batch, BatchLoader
from training.backend import Backend
from training.checkpoints.format import Position
from training.step import put_micro_batches

# ------------------------------------------------------------------------------------------------
# Puts the next batches on the device while the current step runs.


_END = object()


def prefetch(
    batches: Iterator[Batch],
    put: Callable[[Batch], Any],
    depth: int,
    failed: Callable[[BaseException], None] = lambda error: None,
) -> Generator[Any, None, None]:
    """Yield ``put(batch)`` for each batch, up to ``depth`` of them ahead in a thread.

    The tensors of the last batch are put once if the source gives them again. An
    error in the source or in ``put`` is raised here, at the batch it belongs to
    (torch_xla's ParallelLoader ends the epoch silently instead). ``failed`` is called with it at
    once, in the thread, while batches before it are still to be used.

    Depth 0 uses no thread. It is for sources that compute in this process: their
    random transforms and the model share PyTorch's global generator.
    """
    if depth == 0:
        yield from _put_each(batches, put)
    else:
        yield from _ahead(_put_each(batches, put), depth, failed)


def _put_each(batches: Iterator[Batch], put: Callable[[Batch], Any]) -> Iterator[Any]:
    last = on_device = None
    for batch in batches:
        if last is None or any(a is not b for a, b in zip(batch, last, strict=True)):
            on_device, last = put(batch), batch
        yield on_device


def _ahead(
    items: Iterator[Any], depth: int, failed: Callable[[BaseException], None]
) -> Generator[Any, None, None]:
    ready: queue.Queue = queue.Queue(maxsize=depth)
    stop = threading.Event()

    def offer(item: Any) -> None:
        while not stop.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                offer(item)
                if stop.is_set():
                    return
            offer(_END)
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, whatever it is
            failed(error)
            offer(error)

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()


# ------------------------------------------------------------------------------------------------


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
