"""Puts the next batches on the device while the current step runs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

from data.loading.loader import Batch

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
