"""The records of a run: metrics.jsonl, TensorBoard, Weights & Biases, events.jsonl, the curves.

All that is written during training goes through ``Guarded``: a log that fails never ends a run.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeGuard

import numpy as np
from PIL import Image
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import image, scalar

from data.files import make_folder, no_link, parse_object, printable, regular, replace_file
from training.logs.figures import pyplot, save_figure

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
TENSORBOARD_DIR = "tensorboard"
_CLASSES_SHOWN = 5


@dataclass(frozen=True)
class Evaluation:
    """How good a model was on a validation set."""

    loss: float
    """The mean cross-entropy, or what else the objective's loss is."""
    top1: float | None = None
    """The percentage of images whose highest logit is their label; None without labels."""
    top5: float | None = None
    """The percentage of images whose label is among the five highest logits; as ``top1``."""
    images: int = 0
    labels: frozenset[int] = frozenset()
    """The labels of the images that this process has loaded."""
    left_out: int = 0
    """How many images could not be read."""
    lost_classes: tuple[str, ...] = ()
    """The classes of which no image could be read."""
    pictures: np.ndarray | None = None
    """What the model makes of some images, as one picture: (height, width, 3), uint8."""

    @property
    def is_finite(self) -> bool:
        """Whether the loss is finite, or is of no image at all."""
        return math.isfinite(self.loss) or not self.images

    @property
    def values(self) -> dict[str, float]:
        """The figures by their names in records."""
        tops = {"val_top1": self.top1, "val_top5": self.top5}
        values = {"val_loss": self.loss, **tops, "val_images": self.images}
        return {name: value for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        images = f"{self.images:,}"
        if self.left_out:
            images += f" of {self.images + self.left_out:,}"
        if self.top1 is None:
            return f"val loss: {self.loss:.4f} of {images} images"
        lost = printable(", ".join(self.lost_classes[:_CLASSES_SHOWN]))
        if len(self.lost_classes) > 1:
            more = ", ..." if len(self.lost_classes) > _CLASSES_SHOWN else ""
            lost = f", {len(self.lost_classes):,} classes have none left ({lost}{more})"
        elif lost:
            lost = f", class {lost} has none left"
        return (
            f"val loss: {self.loss:.4f}, accuracy on val: {self.top1:.2f} % of {images} images"
            f"{lost}, top-5: {self.top5:.2f} %"
        )


KNN, PROBE = "knn", "probe"
"""The evaluations by frozen features, by which the names of their figures start."""


# -- Reading ------------------------------------------------------------------------------------
#
# A crash cuts off lines, and disks and editors damage them. Here it is decided what a line can be:
# one that is anything else is left out and counted, so that whoever computes has numbers that are.

_LONGEST_LINE = 1 << 20
"""In characters: a longer line is none of a run's."""
_LARGEST = 1e100
"""Of any number: larger ones, of a damaged file, would leave no room for others in a plot."""
_MOST_STEPS = 10**12
_LAST_TIME = 4e9
"""In seconds since 1970, and of any number of seconds."""
_DAY_S = 86400.0
_LONGEST_START_S = 7 * _DAY_S


def is_number(value: Any, most: float = _LAST_TIME, *, least: float = 0.0) -> TypeGuard[float]:
    """Return True for a number in a range; by default for one that can be a time, or seconds."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and least <= value <= most


def _is_step(value: Any, *, least: int = 0) -> bool:
    return isinstance(value, int) and is_number(value, _MOST_STEPS, least=least)


def is_metric(record: dict[str, Any]) -> bool:
    """Return True for what can be a record of metrics.jsonl: a step, and numbers or null."""
    return _is_step(record.get("step")) and all(
        value is None or is_number(value, _LARGEST, least=-_LARGEST) for value in record.values()
    )


_SECONDS = {
    "start": ("process_started",),
    "steps": ("waited",),
    **dict.fromkeys(("first_step", "eval", "save", "local_save"), ("seconds",)),
}
"""The times that an event must have, besides its own, by its kind."""


def is_event(event: dict[str, Any]) -> bool:
    """Return True for what can be an event of events.jsonl; other kinds than those of today have a
    name and a time."""
    kind, now = event.get("event"), event.get("time")
    if not isinstance(kind, str) or not is_number(now, time.time() + _DAY_S):
        return False
    if not all(is_number(event.get(name)) for name in _SECONDS.get(kind, ())):
        return False
    if kind == "start":
        took = now - event["process_started"]
        return _is_step(event.get("step")) and -_DAY_S <= took <= _LONGEST_START_S
    if kind == "steps":
        return _is_step(event.get("steps"), least=1) and _is_step(
            event.get("step"), least=event["steps"]
        )
    return kind != "stop" or event.get("how", "stopped") in ("completed", "stopped", "failed")


class Records(list[dict[str, Any]]):
    """The records of a file, in its order."""

    left_out = 0
    """How many of its lines are none."""


def read_metrics(ckpt_dir: Path) -> Records:
    """Return the records of metrics.jsonl; [] if there is none. Raises OSError."""
    path = ckpt_dir / METRICS_FILE
    return _whole(read_lines(path, is_metric)) if path.exists() else Records()


def read_events(ckpt_dir: Path) -> Records:
    """Return the events of events.jsonl. Raises OSError."""
    events = _whole(read_lines(ckpt_dir / EVENTS_FILE, is_event))
    # Time never goes back by more than the correction of a clock: an event that is a day before
    # both its neighbors, or after both, is damaged, and they are not.
    times = [event["time"] for event in events]
    near = zip(times[:1] + times, times, times[1:] + times[-1:], strict=False)
    medians = [sorted(each)[1] for each in near]
    kept = Records(
        event
        for event, median in zip(events, medians, strict=True)
        if abs(event["time"] - median) <= _DAY_S
    )
    kept.left_out = events.left_out + len(events) - len(kept)
    return kept


def _whole(lines: Iterable[dict[str, Any] | None]) -> Records:
    records = Records()
    for record in lines:
        if record is None:
            records.left_out += 1
        else:
            records.append(record)
    return records


def read_lines(
    path: Path, can_be: Callable[[dict[str, Any]], bool]
) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON objects of a file, one a line, for which ``can_be`` is true, and None for each
    other line. Raises OSError."""
    with contextlib.ExitStack() as opened:
        file: TextIO
        if isinstance(path, os.PathLike):
            file = opened.enter_context(
                open(path, encoding="utf-8-sig", errors="replace", opener=regular)
            )
        else:  # on a URL
            file = io.StringIO(path.read_text(errors="replace").removeprefix("\ufeff"))
        while line := file.readline(_LONGEST_LINE):
            record = None
            with contextlib.suppress(ValueError):
                record = parse_object(line)
            while not line.endswith("\n") and (line := file.readline(_LONGEST_LINE)):
                record = None
            yield record if record is not None and can_be(record) else None


def damaged_lines(left_out: int) -> str:
    """Return in words how many lines were left out; "" for none."""
    return f"{left_out:,} damaged line" + ("s" if left_out > 1 else "") if left_out else ""


def evaluations(records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the evaluations among records of ``read_metrics``, by step, whose loss was finite."""
    names = {"val_loss": None, "val_top1": 0.0, "ema_val_loss": 0.0}  # what those without have
    return {
        r["step"]: r
        for r in records
        if None not in [r.get(name, without) for name, without in names.items()]
    }


def frozen_steps(records: list[dict[str, Any]]) -> dict[str, set[int]]:
    """Return the steps of the evaluations by frozen features, by KNN and PROBE."""
    return {
        name: {r["step"] for r in records if any(each.startswith(f"val_{name}") for each in r)}
        for name in (KNN, PROBE)
    }


def decisive(record: dict[str, Any], name: str) -> float:
    """Return an evaluation's "val_top1" or "val_loss": the EMA's if the run had one."""
    of_ema = record.get(f"ema_{name}")
    return record[name] if of_ema is None else of_ema


def score(record: dict[str, Any]) -> float:
    """Return how good an evaluation of ``evaluations`` was, more being better: the top-1 or,
    without labels, the loss with the other sign."""
    if "val_top1" in record:
        return decisive(record, "val_top1")
    return -decisive(record, "val_loss")


def summary(record: dict[str, Any]) -> str:
    """Return the figure of an evaluation by which runs are compared, for a line."""
    if "val_top1" in record:
        return f"val top-1 {record['val_top1']:.2f} %"
    return f"val loss {record['val_loss']:.4f}"


# -- Writing ------------------------------------------------------------------------------------


class Guarded:
    """Wraps a sink so that it cannot fail: an error is logged once, and the next record tried.

    A sink takes the records of a run by ``write``; ``close`` writes what is left. Both may raise
    anything.
    """

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
                self._say(f"note: {self._name} is written again, {self._lost} record(s) are lost")
            self._lost = 0

    def write_picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        """Write a picture, (height, width, 3), uint8, where the sink takes one."""
        if hasattr(self._sink, "write_picture"):
            with self._failing("cannot be written"):
                self._sink.write_picture(name, pixels, step)

    def sync(self) -> None:
        """Sync what was written to the disk, where the sink does not do that by itself."""
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
        except Exception as error:  # noqa: BLE001 - no log may end a run, whatever it is made of
            self._lost += 1
            if self._lost == 1:
                reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
                self._say(f"warning: {self._name} {what} ({reason}); training continues without it")


def as_json(record: dict[str, Any]) -> str:
    """Return one line of JSON; numbers that are not finite, which JSON has not, become null."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(clean, allow_nan=False)


class JsonLines:
    """Appends records to a file in whole lines, whatever happens to the disk."""

    def __init__(self, path: Path, last_step: int | None = None) -> None:
        """With ``last_step`` what the file has of later steps is dropped, which will be written
        again. Raises OSError."""
        if last_step is not None:
            kept = [r for r in read_metrics(path.parent) if r["step"] <= last_step]
            text = "".join(as_json(record) + "\n" for record in kept)
            if not path.exists() or path.read_text(errors="replace") != text:
                replace_file(path, text.encode())  # a full disk leaves the old file as it is
        self._file = no_link(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._size = os.fstat(self._file).st_size
        self._cut_off = self._size > 0 and os.pread(self._file, 1, self._size - 1) != b"\n"

    def write(self, record: dict[str, Any]) -> None:
        """Append a record, on a line of its own if a crash cut off the last one.

        Raises OSError, and then has not left a part of it.
        """
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

    tensorboardX's SummaryWriter has a thread for it, which dies of a full disk; whoever writes next
    then waits for ever (tensorboardX 2.6.5, event_file_writer.py: a queue of 10).
    """

    def __init__(self, folder: Path, *, first_step: int) -> None:
        make_folder(folder)
        self._events = EventsWriter(str(folder / "events"))
        # TensorBoard hides what an earlier start wrote of later steps.
        self._write(Event(session_log=SessionLog(status=SessionLog.START)), first_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        for name, value in _grouped(record).items():
            self._write(Event(summary=scalar(name, value)), record["step"])
        self._events.flush()

    def write_picture(self, name: str, pixels: np.ndarray, step: int) -> None:
        """Write a picture, (height, width, 3), uint8."""
        self._write(Event(summary=image(name, pixels, dataformats="HWC")), step)
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
        values[f"{group}/{name.replace('val_', '')}"] = value
    return values


# -- events.jsonl: where wall time goes -----------------------------------------------------------
#
# A line is written at log steps, evaluations, checkpoints, and where a start begins and ends. Each
# records where the time since the line before it went; ``tools/goodput.py`` adds them up. Resuming
# does not cut the file.


def process_start() -> float:
    """Return when this process started, in seconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


@dataclass
class StartParts:
    """How long the parts of a start have taken, one after the other, from its process's start on.

    It moves to other processes of the host with what else they start with.
    """

    began: float = field(default_factory=process_start)
    """In seconds since 1970."""
    seconds: dict[str, float] = field(default_factory=dict)

    def done(self, part: str) -> None:
        """Note that a part has ended now, which followed the part before it; of several students
        each has some."""
        self.seconds[part] = self.seconds.get(part, 0.0) + self.since_last()

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
        """Record a start that continues after ``step``; ``parts`` are complete at its first step"""
        self._step, self._parts = step, parts
        failure = {}
        with contextlib.suppress(KeyError, ValueError):
            # When the launcher, by its clock, noticed that the start before this one failed.
            failure["failed_at"] = float(os.environ["RUN_FAILED_AT"])
        self._write("start", process_started=parts.began, devices=devices, **failure)

    def stepped(self, step: int, waited_s: float) -> None:
        """Count a step, and the seconds that it waited for its batch; nothing is written."""
        self._step = step
        self._steps += 1
        self._waited += waited_s

    def first_step(self, seconds: float, waited: float, compiled: float) -> None:
        """Record a first step: ``seconds`` from the request for its batch on, of these ``waited``
        for the batch and ``compiled``. The first one of all has the parts of the start, too."""
        self._steps, self._waited = 0, 0.0
        parts: dict[str, float] = {}
        if self._parts:
            before = max(0.0, self._parts.since_last() - seconds)
            step = max(0.0, seconds - waited - compiled)
            inside = {"batch": waited, "compiled": compiled, "step": step}
            parts, self._parts = {**self._parts.seconds, "other": before, **inside}, None
        self._write("first_step", seconds=seconds, **({"parts": parts} if parts else {}))

    def steps(self) -> None:
        """Record the steps counted since the last such line."""
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
        """Sync what was recorded to the disk."""
        if self._sink:
            self._sink.sync()

    def close(self) -> None:
        """Record that a start has written all its files."""
        self._write("end")
        if self._sink:
            self._sink.close()


# -- The curves as one picture ---------------------------------------------------------------------

_LOSS = (("loss", "train"), ("val_loss", "val"), ("ema_val_loss", "EMA"))
_ACCURACY = (
    "Validation accuracy",
    (
        ("val_top1", "top-1"),
        ("val_top5", "top-5"),
        ("ema_val_top1", "EMA, top-1"),
        ("val_knn_10", "k-NN, k 10"),
        ("val_knn_200", "k-NN, k 200"),
        ("val_probe", "linear probe"),
    ),
    "%",
)
_GRADIENTS = ("Gradients", (("grad_norm", "norm before clipping"),), "norm")
_LOSSES = {"classify": "cross-entropy", "mae": "squared error", "dino": "dino, ibot and koleo"}
"""What the loss is, by objective."""


def plot_curves(records: list[dict[str, Any]], path: Path, objective: str = "classify") -> Path:
    """Draw loss, learning rate, accuracy (where there is none, gradients) and throughput of a run's
    records over steps."""
    plt = pyplot()
    measured = {name for record in records for name in record}
    has_accuracy = objective == "classify" or measured & {"val_knn_10", "val_probe"}
    panels = (
        ("Loss", _LOSS, _LOSSES[objective]),
        ("Learning rate", (("lr", "lr"),), "lr"),
        _ACCURACY if has_accuracy else _GRADIENTS,
        ("Throughput", (("images_per_s", "images/s"),), "images/s"),
    )
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True)
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.08, top=0.95, wspace=0.2, hspace=0.28)
    for axis, (title, series, unit) in zip(axes.flat, panels, strict=True):
        for key, label in series:
            points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
            if points:
                steps, values = zip(*points, strict=True)
                marker = "o" if key.startswith(("val_", "ema_val_")) or len(points) < 3 else None
                axis.plot(steps, values, label=label, marker=marker, markersize=4)
                if unit == "%":
                    axis.set_ylim(0, 102)
                if key == "val_top1":
                    axis.annotate(
                        f"{values[-1]:.1f} %",
                        (steps[-1], values[-1]),
                        (-30, -15),
                        textcoords="offset points",
                    )
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.tick_params(labelbottom=True)
        axis.set_ylabel(unit)
        axis.grid(alpha=0.3)
        if len(series) > 1 and axis.lines:
            axis.legend()
        if title in ("Loss", "Throughput") and axis.lines:
            axis.set_ylim(bottom=0)
    save_figure(figure, path)
    return path


_GAP = 2
"""Pixels between pictures."""
_LEAST_SIDE = 96
"""Pixels of a picture: of a smaller image each pixel is drawn as several."""


def spread(most: int, images: int) -> list[int]:
    """Return the numbers of at most ``most`` of so many images, at equal distances: images of
    a class may be next to each other."""
    most = min(most, images)
    return [place * images // most for place in range(most)]


def side_by_side(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return one picture, (height, width, 3), uint8: a row for each image, with one of each column.

    ``columns``: (images, 3, height, width), from 0 to 1.
    """
    times = -(-_LEAST_SIDE // max(columns[0].shape[2:]))
    after = ((0, 0), (0, 0), (0, _GAP), (0, _GAP))
    cells = [
        np.pad(each.repeat(times, 2).repeat(times, 3), after, constant_values=1.0)
        for each in columns
    ]
    rows = np.concatenate(cells, axis=3)
    picture = np.concatenate(rows, axis=1)[:, :-_GAP, :-_GAP]
    return (picture * 255).round().astype(np.uint8).transpose(1, 2, 0)


def save_picture(pixels: np.ndarray, path: Path) -> None:
    """Write pixels, (height, width, 3), uint8, as a PNG. Raises OSError."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, format="png")
    replace_file(path, content.getvalue())
