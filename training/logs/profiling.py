"""Looks into chosen steps: torch profiler trace, table of operators, CUDA memory snapshot."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import profile

from data.own_files import make_folder

PROFILE_DIR = "profile"
_MEMORY_EVENTS = 100_000


class StepProfiler:
    """Records the steps ``first`` to ``last`` (counted from 1) of one process.

    Leaves in ``folder``, by rank: ``trace_<rank>.json.gz`` for chrome://tracing or
    Perfetto, ``operators_<rank>.txt``, and on CUDA ``memory_<rank>.pickle`` for
    pytorch.org/memory_viz.
    """

    def __init__(self, steps: tuple[int, int] | None, folder: Path, rank: int) -> None:
        self._first, self._last = steps or (0, 0)
        self._folder, self._rank = folder, rank
        self._profile: profile | None = None
        self.finished = False

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Wrap one step; start and end the recording where it should."""
        if self._first <= step <= self._last and self._profile is None and not self.finished:
            self._start()
        yield
        if step == self._last:
            self.close()

    def _start(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._profile = profile(record_shapes=True, profile_memory=True)
        self._profile.start()

    def close(self) -> None:
        """End the recording and write it, also if training ended before ``last``."""
        if self._profile is None:
            return
        self._profile.stop()
        make_folder(self._folder)
        self._profile.export_chrome_trace(str(self._folder / f"trace_{self._rank}.json.gz"))
        by = "self_cpu_time_total"
        if torch.cuda.is_initialized():
            by = "self_device_time_total"
            torch.cuda.memory._dump_snapshot(str(self._folder / f"memory_{self._rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        table = self._profile.key_averages().table(sort_by=by, row_limit=40)
        (self._folder / f"operators_{self._rank}.txt").write_text(table)
        self._profile, self.finished = None, True
