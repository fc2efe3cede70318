"""Notes what a run's wall time goes to in ``events.jsonl``, which no resume cuts.

A line is written at log steps, evaluations, checkpoints, and where a start begins and ends. Each
tells what the time since the line before it went to; ``training/goodput`` adds them up.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from data.own_files import no_link
from training.logs.metrics import as_json
from training.logs.sinks import Guarded

EVENTS_FILE = "events.jsonl"


def process_start() -> float:
    """Return when this process began, in seconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def read_events(ckpt_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's file; one that a crash broke off is left out. Raises OSError."""
    events = []
    for line in (ckpt_dir / EVENTS_FILE).read_text(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            event = json.loads(line)
            if isinstance(event, dict) and "event" in event and "time" in event:
                events.append(event)
    return events


class EventsFile:
    """Appends lines to a file; a ``Sink``."""

    def __init__(self, ckpt_dir: Path) -> None:
        """Raises OSError."""
        opened = no_link(ckpt_dir / EVENTS_FILE, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._file = os.fdopen(opened, "ab+", buffering=0)
        size = self._file.tell()
        self._broken = size > 0 and os.pread(self._file.fileno(), 1, size - 1) != b"\n"

    def write(self, record: dict[str, Any]) -> None:
        """Append a line, after the end of one that a crash or a full disk broke off."""
        line = b"\n" * self._broken + as_json(record).encode() + b"\n"
        self._broken = True
        self._broken = self._file.write(line) < len(line)

    def close(self) -> None:
        self._file.close()


class Events:
    """Notes the events of one start, in the first process; in others it does nothing."""

    def __init__(self, ckpt_dir: Path, say: Callable[[str], None], *, active: bool) -> None:
        self._sink = Guarded(EVENTS_FILE, lambda: EventsFile(ckpt_dir), say) if active else None
        self._step = self._steps = 0
        self._waited = 0.0

    def _write(self, event: str, **values: Any) -> None:
        if self._sink:
            self._sink.write({"event": event, "time": time.time(), "step": self._step, **values})

    def start(self, process_started: float, step: int) -> None:
        """Note a start that goes on after ``step``, and when its process began."""
        self._step = step
        self._write("start", process_started=process_started)

    def stepped(self, step: int, waited_s: float) -> None:
        """Count a step, and the seconds that it waited for its batch; nothing is written."""
        self._step = step
        self._steps += 1
        self._waited += waited_s

    def first_step(self, seconds: float) -> None:
        """Note the first step, which compiles: ``seconds`` from the asking for its batch on."""
        self._steps, self._waited = 0, 0.0
        self._write("first_step", seconds=seconds)

    def steps(self) -> None:
        """Note the steps counted since the last note of them."""
        if self._steps:
            self._write("steps", steps=self._steps, waited=self._waited)
            self._steps, self._waited = 0, 0.0

    @contextlib.contextmanager
    def span(self, event: str) -> Iterator[dict[str, Any]]:
        """Note how long what is done inside takes; the yielded values are noted with it."""
        self.steps()
        began = time.perf_counter()
        values: dict[str, Any] = {}
        yield values
        self._write(event, seconds=time.perf_counter() - began, **values)

    @contextlib.contextmanager
    def training(self, last_step: int) -> Iterator[None]:
        """Note how the training inside ended: completed, stopped or failed."""
        how = "failed"
        try:
            yield
            how = "completed" if self._step >= last_step else "stopped"
        finally:
            self.steps()
            self._write("stop", how=how)

    def close(self) -> None:
        """Note that all is written that a start writes."""
        self._write("end")
        if self._sink:
            self._sink.close()
