"""``--profile`` with PyTorch's profiler."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, record_function

from data.files import make_folder
from training.backend import Profiler

_MEMORY_EVENTS = 100_000


class TorchProfiler(Profiler):
    """Writes, by rank: ``trace_<rank>.json.gz`` for chrome://tracing or Perfetto,
    ``operators_<rank>.txt``, and on CUDA ``memory_<rank>.pickle`` for pytorch.org/memory_viz."""

    def __init__(self, folder: Path, rank: int, **options: Any) -> None:
        """``options``: further arguments of PyTorch's profiler."""
        self.folder, self._rank, self._options = folder, rank, options

    def start(self) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._profile = profile(record_shapes=True, profile_memory=True, **self._options)
        self._profile.start()

    def step(self, number: int) -> AbstractContextManager:
        return record_function(f"ProfilerStep#{number}")  # as tools that read traces expect

    def span(self, name: str) -> AbstractContextManager:
        return record_function(name)

    def stop(self) -> None:
        self._profile.stop()
        make_folder(self.folder)
        self._profile.export_chrome_trace(str(self.folder / f"trace_{self._rank}.json.gz"))
        by = "self_cpu_time_total"
        if torch.cuda.is_initialized():
            by = "self_device_time_total"
            torch.cuda.memory._dump_snapshot(str(self.folder / f"memory_{self._rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        table = self._profile.key_averages().table(sort_by=by, row_limit=40)
        (self.folder / f"operators_{self._rank}.txt").write_text(table, encoding="utf-8")
        del self._profile
