"""Looks into chosen steps: torch profiler trace, table of operators, CUDA memory snapshot."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile
from tqdm import tqdm

from data.files import make_folder
from training.backend import Backend
from training.batches import TrainBatches
from training.checkpoints.choose import RUN_FILE
from training.config import LogConfig
from training.errors import UsageError
from training.files import replace_file
from training.logs.bad_images import TRAIN, BadImages
from training.logs.log_folder import LogUploads
from training.logs.records import Evaluation, Events, Guarded, open_sinks, plot_curves, read_metrics
from training.optimizers import COUNTS
from training.processes.stopping import StopRequest, Watchdog
from training.resolve import Run
from training.step import Outcome

# ------------------------------------------------------------------------------------------------
# What ``--compile_only --json`` expects of a run's steps, to be put beside what they take.


def read_expectation(run: Run) -> float | None:
    """Return the seconds that ``--expect``'s file expects of a step; None without the flag.

    Raises UsageError if it is no such file, or of another run.
    """
    name = run.config.log.expect
    if name is None:
        return None
    try:
        told = json.loads(Path(name).read_text())
        seconds = told["expected_step_s"]
    except OSError as error:
        raise UsageError(f"--expect {name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"--expect {name} is not what --compile_only --json prints") from None
    if seconds is None:
        raise UsageError(f"--expect {name} is of a step that does not fit")
    for what, (here, there) in _compared(run, told).items():
        if here != there:
            raise UsageError(f"--expect {name} is of another run: {what} {there}, here {here}")
    return float(seconds)


def _compared(run: Run, told: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what has to be the same, here and there."""
    here = {
        "batch_size": run.config.data.batch_size,
        "precision": run.config.sharding.precision,
        "mesh": asdict(run.mesh),
        "parameters": run.model.parameter_count,
        "input_shape": list(run.model.sizes.input_shape),
    }
    return {name: (value, told.get(name)) for name, value in here.items()}


def keep_measured(run_file: Path, expected: float, measured: float) -> None:
    """Put both into the file of the run, which is there already. Raises OSError, ValueError."""
    content = json.loads(run_file.read_text())
    content["step_s"] = {"expected": expected, "measured": measured}
    replace_file(run_file, json.dumps(content, indent=2) + "\n")


# ------------------------------------------------------------------------------------------------
# Shows a person a run: the bar, log lines, and through the sinks TensorBoard and metrics.jsonl.


CURVES_FILE = "curves.png"
_COMPARED = 3
"""How many log lines put the expected seconds a step beside the measured ones."""
SMOOTHING_WINDOW = 5
"""How many logs the means of loss and time per step are over, which log lines give beside the
newest values, as PyTorch/XLA's ViT-10B example does."""


@dataclass
class Interval:
    """Measures the pace of training between two log steps, by the host's clock."""

    started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    waited: float = 0.0

    def seconds(self) -> float:
        return time.perf_counter() - self.started


@dataclass
class _Pending:
    """Holds a log step whose loss and norm are still on the device."""

    record: dict[str, Any]
    values: Future[dict[str, list[float]]]


class Reports:
    """Writes the reports in the first process of a run, and nothing in all others.

    Log steps hand over device values as futures and return at once: they are
    written, in order, when they have arrived.
    """

    def __init__(
        self,
        ckpt_dir: Path,
        backend: Backend,
        *,
        first_step: int,
        total_steps: int,
        batch_size: int,
        flops_per_image: float,
        keep_records: bool = True,
        wandb_project: str | None = None,
        arguments: dict[str, Any] | None = None,
        url: Path | None = None,
    ) -> None:
        """Open the reports in ``ckpt_dir``. ``keep_records``: those of the folder up to
        ``first_step`` are of the same run. ``url``: where all in the folder is copied to."""
        active = backend.is_main
        self._dir, self._backend, self._active = ckpt_dir, backend, active
        self._batch_size, self._flops_per_image = batch_size, flops_per_image
        device_peak = backend.peak_flops()
        self._peak_flops = device_peak * backend.device_count if device_peak else None
        self._pending: deque[_Pending] = deque()
        self._losses: deque[float] = deque(maxlen=SMOOTHING_WINDOW)
        self._times: deque[float] = deque(maxlen=SMOOTHING_WINDOW)
        self._compilations = -1
        self._skipped = 0.0
        self.expected_s: float | None = None
        """What a step is expected to take; it is told in the first log lines with a pace."""
        self._compared = 0
        self.longest_row_skipped = 0
        """How many steps in a row were not finite, as far as log steps have told."""
        self.last_top1: float | None = None
        self.events = Events(ckpt_dir, self.say, active=active)
        self._sinks: list[Guarded] = []
        self._uploads = LogUploads(ckpt_dir, url, self.say) if url and active else None
        if not active:
            return
        self._sinks = open_sinks(
            ckpt_dir,
            self.say,
            first_step=first_step,
            kept_up_to=first_step if keep_records and first_step else -1,
            wandb_project=wandb_project,
            arguments=arguments or {},
        )
        self._bar = tqdm(
            total=total_steps, initial=first_step, unit="step", dynamic_ncols=True, disable=None
        )

    def say(self, text: str) -> None:
        """Print a line on stdout, above the bar."""
        if self._active:
            with contextlib.suppress(OSError):  # a closed terminal or a full disk ends no training
                tqdm.write(text)
                sys.stdout.flush()

    @contextlib.contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Tell that ``what`` compiles now, tick while it does, tell how long it took."""
        devices = self._backend.device_count
        self.say(f"compiling the {what} for {devices} device(s); the first one takes a while ...")
        start, done = time.perf_counter(), threading.Event()

        def tick() -> None:
            while not done.wait(1.0):
                self._bar.set_description(f"compiling, {time.perf_counter() - start:.0f} s")

        if self._active:
            threading.Thread(target=tick, daemon=True).start()
        try:
            yield
        finally:
            done.set()
            if self._active:
                self._bar.set_description()
                self._bar.unpause()  # the time to go is not the compiler's
        self.say(f"compiled and ran the first {what} in {time.perf_counter() - start:.1f} s")

    @contextlib.contextmanager
    def evaluating(self, batches: int) -> Iterator[Callable[[], None]]:
        """Show a bar for an evaluation of so many batches; yields what moves it on by one."""
        hide = None if self._active else True  # None: shown on a terminal
        with (
            self.events.span("eval"),
            tqdm(
                total=batches,
                unit="batch",
                desc="evaluating",
                leave=False,
                dynamic_ncols=True,
                disable=hide,
            ) as bar,
        ):
            yield bar.update
        if self._active:
            self._bar.unpause()

    def step_done(self) -> None:
        """Move the bar by one step and write what has arrived."""
        if self._active:
            self._bar.update(1)
        while self._pending and self._pending[0].values.done():
            self._write_log(self._pending.popleft())

    def log(
        self,
        step: int,
        epoch: int,
        lr: float,
        pace: Interval | None,
        values: Future[dict[str, list[float]]],
    ) -> None:
        """Record a log step; ``values`` brings ``loss``, ``grad_norm`` and ``skipped``."""
        record: dict[str, Any] = {"step": step, "epoch": epoch, "lr": lr}
        if pace:
            seconds = pace.seconds()
            record["sec_per_iter"] = seconds / pace.steps
            record["images_per_s"] = pace.steps * self._batch_size / seconds
            record["data_wait"] = pace.waited / seconds
            if self._peak_flops:
                flops = record["images_per_s"] * self._flops_per_image
                record["mfu"] = flops / self._peak_flops
            if self.expected_s and self._compared < _COMPARED:
                record["expected_sec_per_iter"] = self.expected_s
                self._compared += 1
        record.update(self._backend.counters())
        sizes = self._backend.memory()
        record.update({f"memory_{name}": size for name, size in sizes.items()})
        self._pending.append(_Pending(record, values))

    def _write_log(self, pending: _Pending) -> None:
        values = pending.values.result()
        skipped = dict(zip(COUNTS, values.pop("skipped"), strict=True))
        self.longest_row_skipped = int(skipped["longest_row"])
        record = {name: value[0] for name, value in values.items()} | pending.record
        record["skipped_steps"] = int(skipped["total"])
        self._losses.append(record["loss"])
        if "sec_per_iter" in record:
            self._times.append(record["sec_per_iter"])
        if not self._active:
            return
        self._write(record)
        self.say(self._log_line(record))
        self._keep_measured(record)
        if skipped["total"] > self._skipped:
            self.say(
                f"note: {skipped['total'] - self._skipped:.0f} step(s) since the last log were "
                "skipped: loss or gradient norm was not finite"
            )
        self._skipped = skipped["total"]
        shown = {"loss": f"{record['loss']:.4f}", "lr": f"{record['lr']:.2e}"}
        if "images_per_s" in record:
            shown["images/s"] = f"{record['images_per_s']:.0f}"
        self._bar.set_postfix(shown)
        compilations = record.get("compilations", 0)
        if 0 <= self._compilations < compilations:
            self.say(f"note: {compilations - self._compilations} new compilation(s) since last log")
        self._compilations = compilations

    def _keep_measured(self, record: dict[str, Any]) -> None:
        expected = record.get("expected_sec_per_iter")
        if expected:
            try:
                keep_measured(self._dir / RUN_FILE, expected, record["sec_per_iter"])
            except (OSError, ValueError) as error:
                self.say(f"note: {RUN_FILE} cannot be written ({error})")

    def _log_line(self, record: dict[str, Any]) -> str:
        parts = [
            f"epoch {record['epoch']} step {record['step']}",
            f"lr: {record['lr']:.6g}",
            f"loss: {record['loss']:.4f}{_mean_of(self._losses)}",
            f"grad norm: {record['grad_norm']:.4f}",
        ]
        if "images_per_s" in record:
            parts.append(f"sec/iter: {record['sec_per_iter']:.4f}{_mean_of(self._times)}")
            if "expected_sec_per_iter" in record:
                expected = record["expected_sec_per_iter"]
                parts.append(f"expected: {expected:.4f} ({record['sec_per_iter'] / expected:.2f}x)")
            parts.append(f"images/s: {record['images_per_s']:.1f}")
            parts.append(f"data wait: {record['data_wait']:.1%}")
        if "mfu" in record:
            parts.append(f"MFU: {record['mfu']:.1%}")
        if "memory_used" in record:
            parts.append(f"device memory: {record['memory_used'] / 2**30:.2f} GiB")
        if record["skipped_steps"]:
            parts.append(f"steps skipped: {record['skipped_steps']}")
        return ", ".join(parts)

    def evaluation(
        self, step: int, epoch: int, result: Evaluation, of_ema: Evaluation | None = None
    ) -> None:
        """Record an evaluation of the weights and, if there is one, of their EMA."""
        self.flush()
        self.last_top1 = result.top1
        self._compilations = -1  # the evaluation compiled its own step
        record = {
            "step": step,
            "epoch": epoch,
            "val_loss": result.loss,
            "val_top1": result.top1,
            "val_top5": result.top5,
            "val_images": result.images,
        }
        line = f"epoch {epoch} step {step}, {result}"
        if of_ema:
            record["ema_val_loss"], record["ema_val_top1"] = of_ema.loss, of_ema.top1
            record["ema_val_top5"] = of_ema.top5
            line += (
                f"; of the EMA: val loss {of_ema.loss:.4f}, accuracy {of_ema.top1:.2f} %, "
                f"top-5 {of_ema.top5:.2f} %"
            )
        self._write(record)
        self.say(line)

    def _write(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(record)
        if self._uploads:
            self._uploads.record_written()

    def upload(self) -> None:
        """Begin to copy all that was written to where it is kept, if that is a URL."""
        if self._uploads:
            self._uploads.begin()

    def flush(self) -> None:
        """Write every log step recorded so far, waiting for its values."""
        while self._pending:
            self._write_log(self._pending.popleft())

    def close(self) -> Path | None:
        """Write what is left and the plot; return the plot's path, None if there is none."""
        with contextlib.suppress(Exception):  # after an error on the devices they give no values
            self.flush()
        if not self._active:
            return None
        self._bar.close()
        for sink in self._sinks:
            sink.close()
        curves = self._plot()
        self.events.close()
        if self._uploads:
            self._uploads.close()
        return curves

    def _plot(self) -> Path | None:
        try:
            records = read_metrics(self._dir)
            return plot_curves(records, self._dir / CURVES_FILE) if records else None
        except Exception as error:  # noqa: BLE001 - a picture may not end a run
            self.say(f"note: {CURVES_FILE} cannot be written ({error})")
            return None


def _mean_of(values: deque[float]) -> str:
    return f" (mean of {len(values)}: {sum(values) / len(values):.4f})" if len(values) > 1 else ""


# ------------------------------------------------------------------------------------------------
# Holds what one start of a run has from its first step to its last, for all who do its work.


@dataclass(frozen=True)
class Session:
    """Holds the backend of a run, and who is told what happens on it."""

    backend: Backend
    reports: Reports
    stop: StopRequest
    watchdog: Watchdog
    bad_images: BadImages
    last_step: int
    """The number of the step that the run ends with."""
    _shapes: set[torch.Size] = field(default_factory=set, init=False)

    def is_first(self, images: torch.Tensor) -> bool:
        """Tell whether a step is the first of this start; where steps are compiled, whether it is
        the first with images of this shape. To be asked once a step."""
        first = not self._shapes or (self.backend.compiles and images.shape not in self._shapes)
        self._shapes.add(images.shape)
        return first

    @contextlib.contextmanager
    def first_run(self, what: str, is_first: bool) -> Iterator[None]:
        """Run ``what`` inside; if the first of its kind compiles, say so and wait for it."""
        if not (is_first and self.backend.compiles):
            yield
            return
        self.watchdog.rest()  # a compilation may take minutes
        with self.reports.compiling(what):
            yield
            self.backend.wait()


# ------------------------------------------------------------------------------------------------
# Decides when a step is logged, and measures the pace that is logged with it.


class StepLog:
    """Hands every so many steps' figures to the reports, without waiting for the device."""

    def __init__(self, config: LogConfig, session: Session, batches: TrainBatches) -> None:
        self._config, self._session, self._batches = config, session, batches
        self._interval = Interval()

    def begin(self) -> None:
        """Measure the pace anew, since what came before was no training."""
        self._interval = Interval()
        self._batches.waited_s = 0.0

    def compiles_now(self) -> None:
        """Tell the steps before apart from the one whose batch has just come: it compiles."""
        self._session.reports.events.steps()
        self.begin()
        self._interval.started -= self._batches.last_wait_s

    def step_done(
        self, step: int, epoch: int, lr: float, outcome: Outcome, *, is_first: bool
    ) -> None:
        """Log the step if it is one to be logged; ``epoch`` counts from 0."""
        session, every = self._session, self._config.log_step_interval
        events = session.reports.events
        self._interval.steps += 1
        events.stepped(step, self._batches.last_wait_s)
        if is_first or step % every == 0 or step == session.last_step:
            self._interval.waited = self._batches.waited_s
            # The first step's time is the compiler's: it says nothing of the pace.
            pace = None if is_first else self._interval
            values = session.backend.read(outcome._asdict())
            session.reports.log(step, epoch + 1, lr, pace, values)
            session.bad_images.collect(TRAIN, self._batches.loader, session.reports.say)
            if is_first:
                events.first_step(self._interval.seconds())
            else:
                events.steps()
            self.begin()
        session.reports.step_done()

    def diverges(self) -> bool:
        """Tell whether too many steps in a row were not finite, as far as log steps have told."""
        limit = self._config.max_bad_steps
        return bool(limit) and self._session.reports.longest_row_skipped >= limit


# ------------------------------------------------------------------------------------------------


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
