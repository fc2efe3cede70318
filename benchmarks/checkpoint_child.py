"""The measuring process of checkpoint.py: blocking and asynchronous saves.

    python -m benchmarks.checkpoint_child FOLDER REPEATS RATE... -- FLAGS

FLAGS are those of run_vit_training.py. A RATE is in MB/s, 0 is the disk itself. Prints a JSON line.
"""

import functools
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

from run_vit_training import read_flags, run_on_backend
from training.backend import Backend
from training.checkpoints import saver as saver_module
from training.checkpoints.saver import CheckpointSaver
from training.files import folder_at
from training.objectives.registry import open_objective
from training.resolve import Run
from training.schedule import Position, StepRates
from training.step import put_micro_batches, shard_and_optimize, train_step

WARMUP, FEWEST_STEPS = 3, 8


class _SlowFile(LocalFileOpener):
    """A file to which so many bytes a second can be written; waiting for it takes no CPU."""

    def write(self, content: Any) -> int:
        time.sleep(len(memoryview(content).cast("B")) / 1e6 / self.fs.rate)
        return super().write(content)


class SlowStorage(LocalFileSystem):
    """The disk as slow://, at a rate in MB/s that stands in front of the path: slow://50/tmp/run."""

    protocol = "slow"
    rate = 0.0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        if path.startswith("slow://"):
            rate, _, path = path.removeprefix("slow://").partition("/")
            cls.rate = float(rate)
            path = f"/{path}"
        return super()._strip_protocol(path)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        kind = _SlowFile if "w" in mode else LocalFileOpener
        return kind(path, mode, fs=self, **kwargs)


class Measured:
    """Takes steps of a run on its backend, with or without a save before them."""

    def __init__(self, run: Run, backend: Backend) -> None:
        self._run, self._backend, self._number = run, backend, 0
        self._model = shard_and_optimize(run, backend)
        self._model.train()
        self._objective = open_objective(run, backend)
        data, sizes = run.config.data, run.model.sizes
        share = data.batch_size // backend.batch_shards
        labels = torch.randint(sizes.num_classes, (share,))
        batch = {"image": torch.randn(share, *sizes.input_shape), "target": labels}
        self._batches = put_micro_batches(backend, batch, {}, data.grad_accum_steps)
        self._written: list[float] = []
        write = saver_module.write_checkpoint

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return write(*args, **kwargs)
            finally:
                self._written.append(time.perf_counter() - begun)

        saver_module.write_checkpoint = timed

    def step(self) -> float:
        """Take a step; returns its seconds."""
        optimizer, begun = self._run.config.optimizer, time.perf_counter()
        train_step(
            self._model,
            self._objective,
            self._backend,
            self._number,
            self._batches,
            rates=StepRates(optimizer.lr),
            max_norm=optimizer.clip_grad_norm,
        )
        self._number += 1
        self._backend.wait()
        return time.perf_counter() - begun

    def save(self, saver: CheckpointSaver) -> float:
        """Save, and return how many seconds training stood still for it."""
        self._written = []
        self._backend.wait()
        begun = time.perf_counter()
        saver.save(Position(self._number))
        return time.perf_counter() - begun

    def save_beside(self, saver: CheckpointSaver) -> dict[str, float]:
        """Save, take steps until it is written and as many when it is: seconds, and their number.

        ``during``: of the steps while it was written; ``idle``: the median of those afterwards.
        """
        copy, during = self.save(saver), []
        while not self._written:
            during.append(self.step())
            saver.failed_too_often()
        saver.finish()
        idle = [self.step() for _ in range(max(FEWEST_STEPS, len(during)))]
        return {
            "copy": copy,
            "write": self._written[0],
            "steps": len(during),
            "during": sum(during),
            "idle": statistics.median(idle),
        }


def measure(run: Run, backend: Backend, *, folder: Path, repeats: int, rates: list[float]) -> None:
    """Measure all storages, in one process; the forms of a storage take turns. Prints the results.

    Steps are compared with those right after them: over minutes they change by more than a
    checkpoint costs.
    """
    measured, results = Measured(run, backend), []
    for _ in range(WARMUP):
        measured.step()
    for rate in rates:
        where = folder_at(f"slow://{rate:g}{folder}") if rate else folder
        rows = []
        with (
            _saver(where / "waiting", run, backend, beside=False) as waiting,
            _saver(where / "beside", run, backend, beside=True) as beside,
        ):
            for _ in range(repeats):
                waited = measured.save(waiting)
                measured.step()
                rows.append(measured.save_beside(beside) | {"waiting": waited})
        size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        shutil.rmtree(folder)
        # One kept by each of the two savers.
        results.append({"rate": rate, "bytes": size // 2, "rows": rows})
    if backend.is_main:
        print(json.dumps({"backend": backend.describe(), "results": results}), flush=True)


def _saver(folder: Path, run: Run, backend: Backend, *, beside: bool) -> CheckpointSaver:
    return CheckpointSaver(
        folder, backend, lambda text: None, run.values, None, 1, 1, asynchronous=beside
    )


def main(argv: list[str]) -> None:
    """Measure what the command line names."""
    split = argv.index("--")
    folder, repeats, *rates = argv[:split]
    fsspec.register_implementation("slow", SlowStorage)
    flags = read_flags(argv[split + 1 :])
    body = functools.partial(
        measure, folder=Path(folder), repeats=int(repeats), rates=[float(rate) for rate in rates]
    )
    run_on_backend(flags, flags.run, lambda run: (run, body))


if __name__ == "__main__":
    main(sys.argv[1:])
