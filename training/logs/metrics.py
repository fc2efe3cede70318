"""Reads and writes the records of a run in ``metrics.jsonl``, its evaluations among them."""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import printable
from data.own_files import no_link, replace_file

METRICS_FILE = "metrics.jsonl"
_NAMED = 5  # classes, in a line


@dataclass(frozen=True)
class Evaluation:
    """Says how good a model was on a validation set."""

    loss: float
    """The mean cross-entropy."""
    top1: float
    """The percentage of images whose highest logit is their label."""
    top5: float
    """The percentage of images whose label is among the five highest logits."""
    images: int
    labels: frozenset[int] = frozenset()
    """The labels of the images that this process has loaded."""
    left_out: int = 0
    """How many images could not be read."""
    lost_classes: tuple[str, ...] = ()
    """The classes of which no image could be read."""

    def __str__(self) -> str:
        images = f"{self.images:,}"
        if self.left_out:
            images += f" of {self.images + self.left_out:,}"
        lost = printable(", ".join(self.lost_classes[:_NAMED]))
        if len(self.lost_classes) > 1:
            more = ", ..." if len(self.lost_classes) > _NAMED else ""
            lost = f", {len(self.lost_classes):,} classes have none left ({lost}{more})"
        elif lost:
            lost = f", class {lost} has none left"
        return (
            f"val loss: {self.loss:.4f}, accuracy on val: {self.top1:.2f} % of {images} images"
            f"{lost}, top-5: {self.top5:.2f} %"
        )


def read_metrics(ckpt_dir: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl; a line that a crash broke off is left out."""
    path = ckpt_dir / METRICS_FILE
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            if isinstance(record, dict) and "step" in record:
                records.append(record)
    return records


def evaluations(ckpt_dir: Path, last_step: float = float("inf")) -> dict[int, dict[str, Any]]:
    """Return the evaluations up to ``last_step``, by step, whose loss was finite."""
    return {
        r["step"]: r
        for r in read_metrics(ckpt_dir)
        if r.get("val_top1") is not None
        and r.get("val_loss") is not None
        and r["step"] <= last_step
    }


def decisive(record: dict[str, Any], name: str) -> float:
    """Return an evaluation's "val_top1" or "val_loss", by which it is good or bad: the EMA's, where
    the run had one, else the weights'."""
    of_ema = record.get(f"ema_{name}")
    return record[name] if of_ema is None else of_ema


def as_json(record: dict[str, Any]) -> str:
    """Return one line of JSON, which has no name for what is not finite: null."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(clean, allow_nan=False)


class MetricsFile:
    """Writes metrics.jsonl in whole lines, whatever happens to the disk."""

    def __init__(self, ckpt_dir: Path, *, up_to_step: int) -> None:
        """Keep the records up to a step; what follows is about to be written again.

        Raises OSError.
        """
        path = ckpt_dir / METRICS_FILE
        found = read_metrics(ckpt_dir)
        kept = "".join(as_json(r) + "\n" for r in found if r["step"] <= up_to_step)
        if not path.exists() or path.read_text(errors="replace") != kept:
            replace_file(path, kept.encode())  # a full disk leaves the old file as it is
        self._file = no_link(path, os.O_WRONLY | os.O_APPEND)
        self._size = len(kept.encode())

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. Raises OSError, and then has not left a part of it."""
        line = (as_json(record) + "\n").encode()
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.write(self._file, line[written:])
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        os.close(self._file)
