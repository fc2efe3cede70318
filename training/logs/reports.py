"""Report a run: progress bar, log lines, TensorBoard, metrics.jsonl, curves."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from data.files import without_secrets
from training.errors import UsageError
from training.files import LogUploads, read_object, replace_file
from training.logs.collapse import CollapseWatch
from training.logs.events import Events
from training.logs.figures import plot_curves, save_picture
from training.logs.records import (
    METRICS_FILE,
    RUN_FILE,
    TENSORBOARD_DIR,
    is_number,
    read_metrics,
    summary,
)
from training.logs.sinks import Guarded, JsonLines, TensorBoard, WeightsAndBiases
from training.optimizers import COUNTS
from training.processes import exchange
from training.units import units_of

if TYPE_CHECKING:
    import numpy as np

    from training.backend import Backend
    from training.logs.records import Evaluation
    from training.resolve import Run
    from training.step import StepTimer

CURVES_FILE = "curves.png"
PICTURES = "reconstructions"
"""The name of pictures in TensorBoard and, with .png, of the latest one in the run's folder."""
_COMPARED = 3
"""The number of log lines that show the expected seconds per step next to the measured ones."""
SMOOTHING_WINDOW = 5
"""The number of log steps over which log lines average loss and time per step, as in PyTorch/XLA's
ViT-10B example."""


_STATE = {"optimizer": "optimizer state", "ema": "EMA"}
"""What the log calls parts of a state."""
_OF_IMAGES = ("ema_val_images", "ema_val_largest_class")
"""Metrics of an evaluation of the EMA that the one of the weights has, too."""


_Values = dict[str, list[float]]
_Write = Callable[[dict[str, Any], _Values], None]
"""Writes a record, completed by the values that were read from the device."""


def read_expectation(run: Run) -> float | None:
    """Return the seconds per step in the file of ``--expect``; None without the flag. Raises
    UsageError if the file is invalid or for another run."""
    name = run.config.log.expect
    if name is None:
        return None
    try:
        expected = read_object(Path(name))
        seconds = expected["expected_step_s"]
        if seconds is not None and not is_number(seconds, least=1e-9):
            raise ValueError
    except OSError as error:
        raise UsageError(f"--expect {name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError):
        raise UsageError(f"--expect {name} is not the output of --compile_only --json") from None
    if seconds is None:
        raise UsageError(f"--expect {name} is for a step that does not fit in device memory")
    here = {
        "batch_size": run.config.data.batch_size,
        "precision": run.config.sharding.precision,
        "mesh": asdict(run.mesh),
        "parameters": run.model.parameter_count,
        "input_shape": list(run.model.sizes.input_shape),
    }
    for what, value in here.items():
        if value != expected.get(what):
            raise UsageError(
                f"--expect {name} is for another run: {what} is {expected.get(what)} there, "
                f"{value} here"
            )
    return float(seconds)


class Reports:
    """Writes the reports in the first process of a run, and does nothing in all others. Values of
    log steps are futures, written in order as they arrive."""

    def __init__(
        self,
        run: Run,
        backend: Backend,
        *,
        first_step: int,
        last_step: int,
        expected_s: float | None = None,
        keep_records: bool = True,
        last_evaluation: str | None = None,
    ) -> None:
        """Open the reports of a run. ``expected_s``: the seconds per step from ``--expect``.
        ``keep_records``: keep the folder's records up to ``first_step``, which are of the same run.
        ``last_evaluation``: the summary of an earlier evaluation of the last step."""
        active, folder = backend.is_main, run.log_dir
        self._dir, self._backend, self._active = folder, backend, active
        self._first_step = first_step
        self._batch_size = run.config.data.batch_size
        device_peak = backend.peak_flops()
        self._flops_per_image = run.train_flops_per_image if device_peak else 0.0
        self._flops_by_size = run.train_flops_by_size if device_peak else {}
        self._peak_flops = device_peak * backend.device_count if device_peak else None
        self._pending: deque[tuple[_Write, dict[str, Any], Future[_Values]]] = deque()
        """The records whose values are still on the device, in order, and what writes each."""
        self._losses: deque[float] = deque(maxlen=SMOOTHING_WINDOW)
        self._times: deque[float] = deque(maxlen=SMOOTHING_WINDOW)
        self._expected_s, self._compared = expected_s, 0
        self._compilations = -1
        self._skipped = 0.0
        self.plot: Path | None = None
        """The plot of the curves, once it is written."""
        self.longest_row_skipped = 0
        """The longest run of consecutive non-finite steps, as of the log steps read so far."""
        self.first_skipped = 0
        """The number of this start's first non-finite step, from 1; 0: none."""
        self.skipped_steps = 0
        """The number of non-finite steps in this start."""
        self.newest: dict[str, Any] = {}
        """The record of the latest log step that was read."""
        self.not_finite: str | None = None
        """What is not finite in the latest step that was read, or in the last evaluation."""
        self.last_evaluation = last_evaluation
        self._objective = run.config.objective.objective
        self._classes = run.model.sizes.num_classes
        self._collapse = CollapseWatch(run.model.sizes.embed_dim)
        self._description: dict[str, Any] = {}
        """The content of run.json."""
        self.events = Events(folder, self.say, active=active)
        self._sinks: list[Guarded] = []
        has_copies = active and folder != run.ckpt_dir
        self._uploads = LogUploads(folder, run.ckpt_dir, self.say) if has_copies else None
        if not active:
            return
        kept_up_to = first_step if keep_records and first_step else -1
        tensorboard = functools.partial(
            TensorBoard, folder / TENSORBOARD_DIR, first_step=first_step
        )
        self._sinks.append(Guarded("TensorBoard's file", tensorboard, self.say))
        if (project := run.config.log.wandb) is not None:
            wandb = functools.partial(WeightsAndBiases, project, folder, run.values)
            self._sinks.append(Guarded("Weights & Biases", wandb, self.say))
        # Last: evaluations recorded here are not repeated, so the other sinks must have them.
        metrics = functools.partial(JsonLines, folder / METRICS_FILE, kept_up_to)
        self._sinks.append(Guarded(METRICS_FILE, metrics, self.say))
        self._bar = tqdm(  # None: shown on a terminal
            total=last_step, initial=first_step, unit="step", dynamic_ncols=True, disable=None
        )

    def say(self, text: str) -> None:
        """Print a line on stdout, above the bar."""
        if self._active:
            tqdm.write(without_secrets(text))
            sys.stdout.flush()

    def describe(self, run: Run) -> None:
        """Describe what this start runs, and on which devices, in the log and in run.json."""
        devices, state_bytes = self._backend.describe(), self._backend.state_bytes()
        self.say(devices)
        sizes = [f"{n / 2**20:,.2f} MiB of {_STATE.get(k, k)}" for k, n in state_bytes.items()]
        self.say(f"state per device: {', '.join(sizes)}")
        units = units_of(run, self._backend)
        for alike in units:
            self.say(f"sharded unit: {alike}" if alike.count == 1 else f"sharded units: {alike}")
        self._describe(
            job=os.environ.get("RUN_JOB_ID"),
            arguments=run.values,
            model=run.model.settings,
            backend=devices,
            devices=self._backend.device_count,
            mesh=asdict(run.mesh),
            state_bytes_per_device=state_bytes,
            units=[asdict(alike) for alike in units],
            python=platform.python_version(),
            versions=exchange.versions(),
        )
        self.upload()

    def _describe(self, **entries: Any) -> None:
        if not self._active:
            return
        self._description |= entries
        try:
            text = json.dumps(self._description, indent=2) + "\n"
            replace_file(self._dir / RUN_FILE, text)
        except OSError as error:
            self.say(f"warning: {RUN_FILE} cannot be written ({error.strerror})")

    @contextlib.contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        """Log that ``what`` is compiled inside, and how long that takes."""
        devices = self._backend.device_count
        self.say(f"compiling the {what} for {devices} device(s); this takes a while ...")
        start = time.perf_counter()
        yield
        if self._active:
            self._bar.unpause()  # exclude compilation from the estimate of the remaining time
        self.say(f"compiled and ran the first {what} in {time.perf_counter() - start:.1f} s")

    @contextlib.contextmanager
    def evaluating(self, batches: int) -> Iterator[Callable[[], None]]:
        """Show a progress bar for an evaluation of this many batches; yields a function to advance
        it."""
        hide = None if self._active else True  # None: shown on a terminal
        with (
            self.events.span("eval"),
            tqdm(total=batches, unit="batch", desc="evaluating", leave=False, disable=hide) as bar,
        ):
            yield bar.update
        if self._active:
            self._bar.unpause()

    def step_done(self) -> None:
        """Advance the bar by one step, and write the values that have arrived."""
        if self._active:
            self._bar.update(1)
        self.flush(wait=False)

    def step_flops(self, shapes: Mapping[str, Sequence[int]]) -> float:
        """Return the FLOPs of a step on all devices, as counted for MFU; 0 if the devices' peak is
        unknown: there is no MFU then. ``shapes``: of the fields of a micro-batch."""
        per_image = self._flops_per_image
        if self._flops_by_size:
            height, width = shapes["image"][-2:]
            per_image = self._flops_by_size.get((height, width), per_image)
        return per_image * self._batch_size

    def log(
        self,
        step: int,
        epoch: int,
        lr: float,
        timer: StepTimer | None,
        values: Future[dict[str, list[float]]],
        slowest: dict[str, float],
    ) -> None:
        """Record a log step, without throughput if there is no ``timer``. ``values``: ``loss``,
        ``grad_norm``, ``skipped`` and the parts of the loss; ``slowest``: values of the slowest
        process."""
        record: dict[str, Any] = {"step": step, "epoch": epoch, "lr": lr}
        if timer:
            seconds = timer.seconds()
            record["sec_per_iter"] = seconds / timer.steps
            record["images_per_s"] = timer.steps * self._batch_size / seconds
            record["data_wait"] = timer.waited / seconds
            if self._peak_flops:
                record["mfu"] = timer.flops / seconds / self._peak_flops
        record |= slowest | self._backend.counters()
        record |= {f"memory_{name}": size for name, size in self._backend.memory().items()}
        self._pending.append((self._write_step, record, values))

    def log_epoch(self, step: int, epoch: int, epoch_steps: int, values: Future[_Values]) -> None:
        """Record the mean training loss of an epoch. ``epoch_steps``: all steps of the epoch;
        ``values``: ``Backend.epoch_loss``, over those that this start has trained."""
        record = {"step": step, "epoch": epoch, "epoch_steps": epoch_steps}
        self._pending.append((self._write_epoch, record, values))

    def flush(self, *, wait: bool = True) -> None:
        """Write the log steps and epochs recorded so far; without ``wait``, only those whose values
        have arrived."""
        while self._pending and (wait or self._pending[0][2].done()):
            write, record, read = self._pending.popleft()
            write(record, read.result())

    def _write_epoch(self, record: dict[str, Any], values: _Values) -> None:
        """Write the mean loss of an epoch, and log it."""
        total, steps = values["epoch_loss"]
        if not steps:  # none was finite
            return
        epoch, step, epoch_steps = record["epoch"], record["step"], record.pop("epoch_steps")
        mean = total / steps
        self._write({**record, "epoch_loss": mean, "epoch_loss_steps": int(steps)})
        of_steps = "" if steps == epoch_steps else f" over {steps:.0f} of {epoch_steps} steps"
        self.say(
            f"epoch {epoch} step {step}, mean training loss of the epoch: {mean:.4f}{of_steps}"
        )

    def _write_step(self, record: dict[str, Any], values: _Values) -> None:
        """Write a log step, and log it."""
        skipped = dict(zip(COUNTS, values.pop("skipped"), strict=True))
        self.longest_row_skipped = int(skipped["longest_row"])
        self.not_finite = "loss or gradient norm" if skipped["in_a_row"] else None
        self.skipped_steps = int(skipped["total"])
        if self.skipped_steps:
            self.first_skipped = self._first_step + int(skipped["before_first"]) + 1
        record = {name: value[0] for name, value in values.items()} | record
        record["skipped_steps"] = self.skipped_steps
        if "tokens" in record and "sec_per_iter" in record:  # the batch size counts sequences
            for what in ("images", "tokens"):
                record[f"{what}_per_s"] = record[what] / record["sec_per_iter"]
        self.newest = record
        self._losses.append(record["loss"])
        if "sec_per_iter" in record:
            self._times.append(record["sec_per_iter"])
        if not self._active:
            return
        comparison = ""
        if self._expected_s and "sec_per_iter" in record and self._compared < _COMPARED:
            self._compared += 1
            expected, measured = self._expected_s, record["sec_per_iter"]
            record["expected_sec_per_iter"] = expected
            comparison = f", expected: {expected:.4f} ({measured / expected:.2f}x)"
            self._describe(step_s={"expected": expected, "measured": measured})
        self._write(record)
        mean_loss, mean_time = (
            f" (mean of {len(newest)}: {sum(newest) / len(newest):.4f})" if len(newest) > 1 else ""
            for newest in (self._losses, self._times)
        )
        parts = [
            f"epoch {record['epoch']} step {record['step']}",
            f"lr: {record['lr']:.6g}",
            f"loss: {record['loss']:.4f}{mean_loss}",
            f"grad norm: {record['grad_norm']:.4f}",
        ]
        if "images_per_s" in record:
            parts.append(f"sec/iter: {record['sec_per_iter']:.4f}{mean_time}{comparison}")
            parts.append(f"images/s: {record['images_per_s']:.1f}")
            if "tokens_per_s" in record:
                parts.append(f"tokens/s: {record['tokens_per_s']:,.0f}")
            parts.append(f"data wait: {record['data_wait']:.1%}")
        if "mfu" in record:
            parts.append(f"MFU: {record['mfu']:.1%}")
        if "memory_used" in record:
            kind = "peak" if "memory_peak" in record else "used"
            gib = record[f"memory_{kind}"] / 2**30
            of = f" of {record['memory_limit'] / 2**30:.2f}" if "memory_limit" in record else ""
            parts.append(f"device memory: {gib:.2f}{of} GiB ({kind})")
        if record["skipped_steps"]:
            parts.append(f"steps skipped: {record['skipped_steps']}")
        self.say(", ".join(parts))
        if skipped["total"] > self._skipped:
            self.say(
                f"warning: {skipped['total'] - self._skipped:.0f} step(s) since the last log "
                "were skipped: their loss or gradient norm was not finite"
            )
        self._skipped = skipped["total"]
        self._warn_of_collapse(record)
        shown = {"loss": f"{record['loss']:.4f}", "lr": f"{record['lr']:.2e}"}
        if "images_per_s" in record:
            shown["images/s"] = f"{record['images_per_s']:.0f}"
        self._bar.set_postfix(shown)
        compilations = record.get("compilations", 0)
        if 0 <= self._compilations < compilations:
            new = compilations - self._compilations
            self.say(f"note: {new} new compilation(s) since the last log step")
        self._compilations = compilations

    def evaluation(
        self, step: int, epoch: int, result: Evaluation, ema: Evaluation | None = None
    ) -> None:
        """Record an evaluation of the weights and, if there is one, of their EMA."""
        values, text = result.values, str(result)
        by_class = {"": result.by_class}
        if ema:
            by_class = {"weights: ": result.by_class, "EMA: ": ema.by_class}
            ema_values = {f"ema_{name}": value for name, value in ema.values.items()}
            # These are the same for any weights.
            values |= {name: ema_values[name] for name in ema_values if name not in _OF_IMAGES}
            text = f"weights: {text}; EMA: val loss {ema.loss:.4f}"
            if ema.quality:
                text += f", {ema.quality}"
        pictures = (ema or result).pictures
        if pictures is not None:
            self.picture(PICTURES, pictures, step)
        self.last_evaluation = summary(values)
        self.record_evaluation(step, epoch, values, text)
        for weights, each in by_class.items():
            for line in each.lines(weights) if each else ():
                self.say(f"epoch {epoch} step {step}, {line}")

    def picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        """Record a picture, (height, width, 3), uint8, in TensorBoard and, with .png, in the run's
        folder."""
        for sink in self._sinks:
            sink.write_picture(name, pixels, step)
        if not self._active:
            return
        try:
            save_picture(pixels, self._dir / f"{name}.png")
        except OSError as error:
            self.say(f"warning: {name}.png cannot be written ({error.strerror})")

    def record_evaluation(self, step: int, epoch: int, values: dict[str, float], text: str) -> None:
        """Record the results of an evaluation, and log ``text``."""
        self.flush()
        self._compilations = -1  # it compiled its own step
        record = {"step": step, "epoch": epoch, **values}
        self._write(record)
        if text:
            self.say(f"epoch {epoch} step {step}, {text}")
        self._warn_of_collapse(record)

    def _warn_of_collapse(self, record: dict[str, Any]) -> None:
        for warning in self._collapse.warnings(record):
            self.say(warning)

    def _write(self, record: dict[str, Any]) -> None:
        for sink in self._sinks:
            sink.write(record)
        if self._uploads:
            self._uploads.begin(soon=False)

    def upload(self) -> None:
        """Start copying everything written to ``--ckpt_dir``, if that is a URL."""
        if self._uploads:
            self._uploads.begin()

    def sync(self) -> None:
        """Sync everything written to disk; on a shared disk, it then survives this machine."""
        for sink in self._sinks:
            sink.sync()
        self.events.sync()

    def store(self) -> None:
        """Sync everything written, and wait until it is in ``--ckpt_dir``, if that is a URL. Any
        thread may call this."""
        self.sync()
        if self._uploads:
            self._uploads.copy()

    def close(self) -> None:
        """Write what is left, and the plot."""
        with contextlib.suppress(Exception):  # after a device error there are no values
            self.flush()
        if not self._active:
            return
        self._bar.close()
        for sink in self._sinks:
            sink.close()
        try:
            if metrics := read_metrics(self._dir):
                path = self._dir / CURVES_FILE
                self.plot = plot_curves(metrics, path, self._objective, self._classes)
        except Exception as error:  # noqa: BLE001 - a plot must not end a run
            self.say(f"warning: {CURVES_FILE} cannot be written ({error})")
        self.events.close()
        if self._uploads:
            self._uploads.copy()
