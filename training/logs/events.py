"""events.jsonl: how a run spends its wall time.

A line is written at log steps, evaluations and checkpoints, and when a start begins and ends. Each
line accounts for the time since the previous one; ``tools/wall_time.py`` adds them up. Resuming
does not truncate the file.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.logs.records import EVENTS_FILE
from training.logs.sinks import Guarded, JsonLines


def process_start() -> float:
    """Return when this process started, in seconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


@dataclass
class StartParts:
    """The durations of the successive parts of a start, from the start of the process."""

    began: float = field(default_factory=process_start)
    """In seconds since 1970."""
    seconds: dict[str, float] = field(default_factory=dict)

    def done(self, part: str) -> None:
        """Note that a part, which began when the previous one ended, ends now."""
        self.seconds[part] = self.since_last()

    def since_last(self) -> float:
        """Return the seconds since the last part ended."""
        return max(0.0, time.time() - self.began - sum(self.seconds.values()))


class Events:
    """Records the events of one start, in the first process; in others it does nothing."""

    def __init__(self, ckpt_dir: Path, say: Callable[[str], None], *, active: bool) -> None:
        self._sink = None
        if active:
            self._sink = Guarded(EVENTS_FILE, lambda: JsonLines(ckpt_dir / EVENTS_FILE), say)
        self._step = self._steps = 0
        self._waited = 0.0
        self._parts: StartParts | None = None

    def _write(self, event: str, **values: Any) -> None:
        if self._sink:
            self._sink.write({"event": event, "time": time.time(), "step": self._step, **values})

    def start(self, parts: StartParts, step: int, devices: int) -> None:
        """Record a start that continues after ``step``; ``parts`` end at its first step."""
        self._step, self._parts = step, parts
        failure = {}
        with contextlib.suppress(KeyError, ValueError):
            # When the launcher noticed, by its clock, that the previous start had failed.
            failure["failed_at"] = float(os.environ["RUN_FAILED_AT"])
        self._write("start", process_started=parts.began, devices=devices, **failure)

    def stepped(self, step: int, waited_s: float) -> None:
        """Count a step and the seconds that it waited for its batch; write nothing."""
        self._step = step
        self._steps += 1
        self._waited += waited_s

    def first_step(self, seconds: float, waited: float, compiled: float) -> None:
        """Record a first step: ``seconds`` since the request for its batch, including those
        ``waited`` for the batch and ``compiled``. The very first one also records the parts of the
        start."""
        self._steps, self._waited = 0, 0.0
        parts: dict[str, float] = {}
        if self._parts:
            before = max(0.0, self._parts.since_last() - seconds)
            step = max(0.0, seconds - waited - compiled)
            inside = {"batch": waited, "compiled": compiled, "step": step}
            parts, self._parts = {**self._parts.seconds, "other": before, **inside}, None
        self._write("first_step", seconds=seconds, **({"parts": parts} if parts else {}))

    def steps(self) -> None:
        """Record the steps counted since the last line of this kind."""
        if self._steps:
            self._write("steps", steps=self._steps, waited=self._waited)
            self._steps, self._waited = 0, 0.0

    @contextlib.contextmanager
    def span(self, event: str) -> Iterator[dict[str, Any]]:
        """Record how long the body takes, with the values put into the yielded dict."""
        self.steps()
        began = time.perf_counter()
        values: dict[str, Any] = {}
        yield values
        self._write(event, seconds=time.perf_counter() - began, **values)

    @contextlib.contextmanager
    def training(self, last_step: int) -> Iterator[None]:
        """Record how the training in the body ended: completed, stopped or failed."""
        how = "failed"
        try:
            yield
            how = "completed" if self._step >= last_step else "stopped"
        finally:
            self.steps()
            self._write("stop", how=how)

    def sync(self) -> None:
        """Sync the recorded events to disk."""
        if self._sink:
            self._sink.sync()

    def close(self) -> None:
        """Record that a start has written all its files."""
        self._write("end")
        if self._sink:
            self._sink.close()
