"""Sinks for the records of a run: JSON lines, TensorBoard, Weights & Biases.

Everything written during training goes through ``Guarded``: a failing log never ends a run.
"""

import contextlib
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import image, scalar

from data.files import make_folder, no_link, replace_file, without_secrets
from training.logs.records import read_metrics


class Guarded:
    """Wraps a sink (with ``write`` and ``close``) so that it cannot fail: an error is logged once,
    and the next record is tried."""

    def __init__(self, name: str, open_sink: Callable[[], Any], say: Callable[[str], None]) -> None:
        self._name, self._say = name, say
        self._sink: Any = None
        self._lost = 0
        with self._failing("cannot be written"):
            self._sink = open_sink()

    def write(self, record: dict[str, Any]) -> None:
        if self._sink is None:
            return
        with self._failing("cannot be written"):
            self._sink.write(record)
            if self._lost:
                self._say(f"note: {self._name} is written again; {self._lost} record(s) were lost")
            self._lost = 0

    def write_picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        """Write a picture, (height, width, 3), uint8, if the sink supports it."""
        if hasattr(self._sink, "write_picture"):
            with self._failing("cannot be written"):
                self._sink.write_picture(name, pixels, step)

    def sync(self) -> None:
        """Sync what was written to disk, if the sink does not do that itself."""
        if hasattr(self._sink, "sync"):
            with self._failing("cannot be written"):
                self._sink.sync()

    def close(self) -> None:
        if self._sink is not None:
            with self._failing("cannot be completed"):
                self._sink.close()

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no log may end a run, whatever the error
            self._lost += 1
            if self._lost == 1:
                text = without_secrets(str(error))
                reason = text.splitlines()[0][:200] if text else type(error).__name__
                self._say(f"warning: {self._name} {what} ({reason}); training continues without it")


def as_json(record: dict[str, Any]) -> str:
    """Return a line of JSON; non-finite numbers, which JSON lacks, become null."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(clean, allow_nan=False)


class JsonLines:
    """Appends records to a file as whole lines, even if the disk fills up."""

    def __init__(self, path: Path, last_step: int | None = None) -> None:
        """With ``last_step``, drop the records of later steps, which will be written again. Raises
        OSError."""
        if last_step is not None:
            records = [r for r in read_metrics(path.parent) if r["step"] <= last_step]
            text = "".join(as_json(record) + "\n" for record in records)
            if not path.exists() or path.read_text(encoding="utf-8", errors="replace") != text:
                replace_file(path, text.encode())  # a full disk leaves the old file as it is
        self._file = no_link(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._size = os.fstat(self._file).st_size
        self._cut_off = self._size > 0 and os.pread(self._file, 1, self._size - 1) != b"\n"

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, on a new line if a crash truncated the last one. Raises OSError without
        leaving a partial record."""
        line = b"\n" * self._cut_off + as_json(record).encode() + b"\n"
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)
        self._cut_off = False

    def sync(self) -> None:
        os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)


class TensorBoard:
    """Writes TensorBoard's event file, synchronously in this thread.

    tensorboardX's SummaryWriter uses a thread that dies if the disk is full; later writes then
    block forever (tensorboardX 2.6.5, event_file_writer.py: a queue of 10).
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        make_folder(folder)
        self._events = EventsWriter(str(folder / "events"))
        # Makes TensorBoard hide the later steps of an earlier start.
        self._write(Event(session_log=SessionLog(status=SessionLog.START)), first_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in _grouped(record).items():
            self._write(Event(summary=scalar(name, value)), record["step"])
        self._events.flush()

    def write_picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        self._write(Event(summary=image(name, pixels, dataformats="HWC")), step)

    def _write(self, event: Event, step: int) -> None:
        event.wall_time, event.step = time.time(), step
        self._events.write_event(event)

    def close(self) -> None:
        self._events.close()


class WeightsAndBiases:
    """Logs to a Weights & Biases run; a resumed training continues the same one."""

    def __init__(self, project: str, ckpt_dir: Path, arguments: dict[str, Any]) -> None:
        import wandb  # optional, and slow to import

        folder = ckpt_dir.resolve()
        make_folder(ckpt_dir / "wandb")
        self._run = wandb.init(
            project=project,
            name=folder.name,
            dir=str(ckpt_dir),
            config=arguments,
            resume="allow",
            id=hashlib.sha256(str(folder).encode()).hexdigest()[:16],
            settings=wandb.Settings(console="off"),
        )

    def write(self, record: dict[str, Any]) -> None:
        self._run.log(_grouped(record) | {"epoch": record["epoch"]}, step=record["step"])

    def close(self) -> None:
        self._run.finish()


def _grouped(record: dict[str, Any]) -> dict[str, float]:
    """Return a record's finite numbers under the names of panels: train/loss, val/loss, ..."""
    values = {}
    for name, value in record.items():
        if name in ("step", "epoch") or value is None or not math.isfinite(value):
            continue
        group = "val" if name.startswith(("val_", "ema_val_")) else "train"
        values[f"{group}/{name.removeprefix('train_').replace('val_', '')}"] = value
    return values
