"""What the hosts of a slice know of each other's devices, through a store on this machine."""

import io
import itertools
import os
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .machine import Here

WAIT = timedelta(seconds=120)


class Exchange:
    """Values of all hosts. Threads that hosts start in the same order meet each other."""

    def __init__(self, here: Here) -> None:
        self._here = here
        names = ("REHEARSAL_START", "RUN_ATTEMPT")
        self._start = "/".join(os.environ.get(name, "") for name in names)
        self._mine = threading.local()
        self._threads: dict[str, itertools.count] = {}
        real_start = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            target = getattr(thread, "_target", None)
            kind = getattr(target, "__qualname__", "")
            count = self._threads.setdefault(kind, itertools.count())
            thread.rehearsal = f"{kind}/{next(count)}"  # type: ignore[attr-defined]
            real_start(thread)

        threading.Thread.start = start  # type: ignore[method-assign]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Of all processes, in the order of their numbers; each must call it."""
        if self._here.slice.hosts == 1:
            return [value]
        mine = self._mine
        if not hasattr(mine, "store"):
            client = dist.TCPStore(
                "127.0.0.1",
                self._here.store_port,
                is_master=False,
                wait_for_workers=False,
                timeout=WAIT,
            )
            thread = getattr(threading.current_thread(), "rehearsal", "main")
            mine.store = dist.PrefixStore(f"{self._start}/{thread}", client)
            mine.number = 0
        process, buffer = self._here.slice.process_of(self._here.worker), io.BytesIO()
        torch.save(value, buffer)
        mine.number += 1
        mine.store.set(f"{mine.number}/{process}", buffer.getvalue())
        if mine.number > 2:  # all have read it: they are at the one before this, at least
            mine.store.delete_key(f"{mine.number - 2}/{process}")
        texts = [mine.store.get(f"{mine.number}/{p}") for p in range(self._here.slice.hosts)]
        return [torch.load(io.BytesIO(text), weights_only=False) for text in texts]
