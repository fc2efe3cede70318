"""The records of a run: evaluations, metrics.jsonl and events.jsonl, and how to read them."""

from __future__ import annotations

import contextlib
import io
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeGuard

from data.files import parse_object, printable, regular

if TYPE_CHECKING:
    import numpy as np

    from training.logs.by_class import ByClass

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"
RUN_FILE = "run.json"
TENSORBOARD_DIR = "tensorboard"
_CLASSES_SHOWN = 5


@dataclass(frozen=True)
class Evaluation:
    """The results of a model on a validation set."""

    loss: float
    """The mean cross-entropy, or the loss of another objective."""
    top1: float | None = None
    """The top-1 accuracy in percent; None without labels."""
    top5: float | None = None
    """The top-5 accuracy in percent; None without labels."""
    images: int = 0
    left_out: int = 0
    """The number of unreadable images."""
    lost_classes: tuple[str, ...] = ()
    """The classes without a readable image."""
    pictures: np.ndarray | None = None
    """A picture of the model's output for some images: (height, width, 3), uint8."""
    by_class: ByClass | None = None
    """The images of each class, and what they were classified as; None without labels."""
    means: Mapping[str, float] = field(default_factory=dict)
    """Other means over the images, by name."""

    @property
    def is_finite(self) -> bool:
        """Whether the loss is finite, or there were no images."""
        return math.isfinite(self.loss) or not self.images

    @property
    def values(self) -> dict[str, float]:
        """The figures by their names in records."""
        tops = {"val_top1": self.top1, "val_top5": self.top5}
        values = {"val_loss": self.loss, **tops, "val_images": self.images}
        values |= self.by_class.values if self.by_class else {}
        values |= {f"val_{name}": value for name, value in self.means.items()}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def quality(self) -> str:
        """The figures besides the loss, in words; "" if there are none."""
        if self.top1 is None:
            return ""
        return f"accuracy {self.top1:.2f} %, top-5 {self.top5:.2f} %"

    def figures_by_label(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the figures of each label where images have several. ``names``: by label."""
        return []

    def __str__(self) -> str:
        images = f"{self.images:,}"
        if self.left_out:
            images += f" of {self.images + self.left_out:,}"
        if self.top1 is None:
            means = "".join(f", {name}: {value:.4f}" for name, value in self.means.items())
            return f"val loss: {self.loss:.4f}{means} of {images} images"
        lost = printable(", ".join(self.lost_classes[:_CLASSES_SHOWN]))
        if len(self.lost_classes) > 1:
            more = ", ..." if len(self.lost_classes) > _CLASSES_SHOWN else ""
            lost = f", none readable of {len(self.lost_classes):,} classes ({lost}{more})"
        elif lost:
            lost = f", none readable of class {lost}"
        return (
            f"val loss: {self.loss:.4f}, accuracy on val: {self.top1:.2f} % of {images} images"
            f"{lost}, top-5: {self.top5:.2f} %"
        )


KNN, PROBE, RANK, SEGMENT = "knn", "probe", "rank", "segment"
FROZEN = {
    RANK: f"train_{RANK}",
    KNN: f"val_{KNN}",
    PROBE: f"val_{PROBE}",
    SEGMENT: f"val_{SEGMENT}",
}
"""The evaluations by frozen features, and the prefixes of their metrics' names."""


# -- Reading ------------------------------------------------------------------------------------
#
# Crashes truncate lines, and disks and editors damage them. These functions decide what a valid
# line is. All other lines are skipped and counted, so that readers get valid numbers.

_LONGEST_LINE = 1 << 20
"""In characters; longer lines are invalid."""
_LARGEST = 1e100
"""The largest valid number; larger ones, in a damaged file, would squeeze all others in a plot."""
_MOST_STEPS = 10**12
_LAST_TIME = 4e9
"""The largest valid time in seconds since 1970, and number of seconds."""
_DAY_S = 86400.0
_LONGEST_START_S = 7 * _DAY_S


def is_number(value: Any, most: float = _LAST_TIME, *, least: float = 0.0) -> TypeGuard[float]:
    """Return True for a number in a range; by default the range of times and seconds."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and least <= value <= most


def _is_step(value: Any, *, least: int = 0) -> bool:
    return isinstance(value, int) and is_number(value, _MOST_STEPS, least=least)


def is_metric(record: dict[str, Any]) -> bool:
    """Return True for a valid record of metrics.jsonl: a step, and numbers or null."""
    return _is_step(record.get("step")) and all(
        value is None or is_number(value, _LARGEST, least=-_LARGEST) for value in record.values()
    )


_SECONDS = {
    "start": ("process_started",),
    "steps": ("waited",),
    **dict.fromkeys(("first_step", "eval", "save", "local_save"), ("seconds",)),
}
"""The fields with times that an event must have besides its own time, by kind."""


def is_event(event: dict[str, Any]) -> bool:
    """Return True for a valid event of events.jsonl. Kinds that are not known need only a name and
    a time."""
    kind, now, step = event.get("event"), event.get("time"), event.get("step")
    if not isinstance(kind, str) or not is_number(now, time.time() + _DAY_S):
        return False
    if not all(is_number(event.get(name)) for name in _SECONDS.get(kind, ())):
        return False
    if kind == "start":
        return _is_step(step) and -_DAY_S <= now - event["process_started"] <= _LONGEST_START_S
    if kind == "steps":
        return _is_step(event.get("steps"), least=1) and _is_step(step, least=event["steps"])
    return kind != "stop" or event.get("how", "stopped") in ("completed", "stopped", "failed")


class Records(list[dict[str, Any]]):
    """The records of a file, in order."""

    def __init__(self, lines: Iterable[dict[str, Any] | None] = ()) -> None:
        """Take lines of ``read_lines``."""
        lines = list(lines)
        super().__init__(record for record in lines if record is not None)
        self.left_out = len(lines) - len(self)
        """The number of lines that are not records."""


def read_metrics(ckpt_dir: Path) -> Records:
    """Return the records of metrics.jsonl; [] if there is none. Raises OSError."""
    path = ckpt_dir / METRICS_FILE
    return Records(read_lines(path, is_metric) if path.exists() else ())


def read_events(ckpt_dir: Path) -> Records:
    """Return the events of events.jsonl. Raises OSError."""
    events = Records(read_lines(ckpt_dir / EVENTS_FILE, is_event))
    # Time never goes back by more than a clock correction: an event that is more than a day before
    # or after both of its neighbors is damaged.
    times = [event["time"] for event in events]
    neighbors = zip(times[:1] + times, times, times[1:] + times[-1:], strict=False)
    medians = [sorted(three)[1] for three in neighbors]
    undamaged = Records(
        event if abs(event["time"] - median) <= _DAY_S else None
        for event, median in zip(events, medians, strict=True)
    )
    undamaged.left_out += events.left_out
    return undamaged


def read_lines(
    path: Path, can_be: Callable[[dict[str, Any]], bool]
) -> Iterator[dict[str, Any] | None]:
    """Yield the JSON objects of a file, one a line, for which ``can_be`` is true, and None for each
    other line. Raises OSError."""
    with contextlib.ExitStack() as stack:
        file: TextIO
        if isinstance(path, os.PathLike):
            file = stack.enter_context(
                open(path, encoding="utf-8-sig", errors="replace", opener=regular)
            )
        else:  # on a URL
            file = io.StringIO(
                path.read_text(encoding="utf-8", errors="replace").removeprefix("\ufeff")
            )
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


_SCORES = {
    "val_top1": ("val top-1", "{:.2f} %"),
    "val_map": ("val mAP", "{:.4f}"),
    "val_recall_at_1": ("val recall@1", "{:.2f} %"),
}
"""The figures that evaluations are compared by, of which an evaluation has one at most: by metric
name, what log lines call it, and its format."""


def evaluations(records: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the evaluations among records of ``read_metrics``, by step, whose loss was finite."""
    defaults = {"val_loss": None, **dict.fromkeys(_SCORES, 0.0), "ema_val_loss": 0.0}
    return {
        record["step"]: record
        for record in records
        if None not in [record.get(name, default) for name, default in defaults.items()]
    }


def frozen_steps(records: list[dict[str, Any]]) -> dict[str, set[int]]:
    """Return the steps of the evaluations by frozen features, by each of ``FROZEN``."""
    return {
        kind: {
            record["step"] for record in records if any(name.startswith(start) for name in record)
        }
        for kind, start in FROZEN.items()
    }


def decisive(record: dict[str, Any], name: str) -> float:
    """Return a figure of an evaluation, such as "val_loss"; that of the EMA if there is one."""
    ema = record.get(f"ema_{name}")
    return record[name] if ema is None else ema


def score(record: dict[str, Any]) -> float:
    """Return the score of an evaluation of ``evaluations``, higher is better: the top-1, for
    several labels an image the mean average precision, for pairs the recall or, if none of them is
    measured, the negated loss."""
    for name in _SCORES:
        if name in record:
            return decisive(record, name)
    return -decisive(record, "val_loss")


def _if_recorded(record: dict[str, Any], name: str) -> float:
    """Return the decisive value of a metric that older evaluations do not have."""
    return decisive(record, name) if name in record else -math.inf


BEST: dict[str, Callable[[dict[str, Any]], float]] = {
    "best": score,
    "lowest_loss": lambda record: -decisive(record, "val_loss"),
    "balanced_accuracy": lambda record: _if_recorded(record, "val_balanced_accuracy"),
    "worst_recall": lambda record: _if_recorded(record, "val_worst_recall"),
}
"""The criteria by which ``--resume`` and ``--ckpt_best`` choose evaluations; higher is better."""


def summary(record: dict[str, Any]) -> str:
    """Return the main result of an evaluation, for a log line; with an EMA, of both."""
    known = {**_SCORES, "val_loss": ("val loss", "{:.4f}")}
    name, (what, form) = next((n, words) for n, words in known.items() if n in record)
    ema = record.get(f"ema_{name}")
    text = f"{what} {form.format(record[name])}"
    return text if ema is None else f"{text} (weights), {form.format(ema)} (EMA)"
