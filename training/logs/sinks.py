"""Writes a run's records to metrics.jsonl, TensorBoard, Weights & Biases: none may end a run."""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from data.own_files import make_folder
from training.logs.metrics import MetricsFile

TENSORBOARD_DIR = "tensorboard"


class Sink(Protocol):
    """Takes the records of a run, one after the other."""

    def write(self, record: dict[str, Any]) -> None:
        """Record the values of one step. May raise anything."""

    def close(self) -> None:
        """Write what is left."""


class TensorBoard:
    """Writes TensorBoard's event file, at once and in this thread.

    tensorboardX's SummaryWriter has a thread for it, which dies of a full disk; whoever writes next
    then waits for ever (tensorboardX 2.6.5, event_file_writer.py: a queue of 10).
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        make_folder(folder)
        self._events = EventsWriter(str(folder / "events"))
        # From here on the steps of an earlier start are shown no more.
        self._write(Event(session_log=SessionLog(status=SessionLog.START)), first_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in grouped(record).items():
            self._write(Event(summary=scalar(name, value)), record["step"])
        self._events.flush()

    def _write(self, event: Event, step: int) -> None:
        event.wall_time, event.step = time.time(), step
        self._events.write_event(event)

    def close(self) -> None:
        self._events.close()


class WeightsAndBiases:
    """Logs to a run of Weights & Biases, the same one when the training is resumed."""

    def __init__(self, project: str, ckpt_dir: Path, arguments: dict[str, Any]) -> None:
        import wandb  # optional, and slow to import

        name = ckpt_dir.resolve()
        make_folder(ckpt_dir / "wandb")
        self._run = wandb.init(
            project=project,
            name=name.name,
            dir=str(ckpt_dir),
            config=arguments,
            resume="allow",
            id=hashlib.sha256(str(name).encode()).hexdigest()[:16],
            settings=wandb.Settings(console="off"),
        )

    def write(self, record: dict[str, Any]) -> None:
        self._run.log(grouped(record) | {"epoch": record["epoch"]}, step=record["step"])

    def close(self) -> None:
        self._run.finish()


def grouped(record: dict[str, Any]) -> dict[str, float]:
    """Return a record's finite numbers under pictures' names: train/loss, val/loss, ..."""
    values = {}
    for name, value in record.items():
        if name in ("step", "epoch") or value is None or not math.isfinite(value):
            continue
        group = "val" if name.startswith(("val_", "ema_val_")) else "train"
        values[f"{group}/{name.replace('val_', '')}"] = value
    return values


class Guarded:
    """Wraps a sink so that it cannot fail: what goes wrong is said once, then tried again."""

    def __init__(
        self, name: str, open_sink: Callable[[], Sink], say: Callable[[str], None]
    ) -> None:
        self._name, self._say = name, say
        self._sink: Sink | None = None
        self._lost = 0
        with self._failing("cannot be written"):
            self._sink = open_sink()

    def write(self, record: dict[str, Any]) -> None:
        if self._sink is None:
            return
        with self._failing("cannot be written"):
            self._sink.write(record)
            if self._lost:
                self._say(f"note: {self._name} is written again, {self._lost} record(s) are lost")
            self._lost = 0

    def close(self) -> None:
        if self._sink is not None:
            with self._failing("cannot be written to its end"):
                self._sink.close()

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no log may end a run, whatever it is made of
            self._lost += 1
            if self._lost == 1:
                reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
                self._say(f"note: {self._name} {what} ({reason}); training goes on without it")


def open_sinks(
    ckpt_dir: Path,
    say: Callable[[str], None],
    *,
    first_step: int,
    kept_up_to: int,
    wandb_project: str | None,
    arguments: dict[str, Any],
) -> list[Guarded]:
    """Open all sinks of a run that goes on after ``first_step``, in a folder that exists.

    Of earlier records those up to ``kept_up_to`` stay.
    """
    sinks = [
        Guarded("metrics.jsonl", lambda: MetricsFile(ckpt_dir, up_to_step=kept_up_to), say),
        Guarded(
            "TensorBoard's file",
            lambda: TensorBoard(ckpt_dir / TENSORBOARD_DIR, first_step=first_step),
            say,
        ),
    ]
    if wandb_project:
        project = wandb_project
        sinks.append(
            Guarded("Weights & Biases", lambda: WeightsAndBiases(project, ckpt_dir, arguments), say)
        )
    return sinks
