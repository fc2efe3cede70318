"""Writes what an evaluation found out about each class: as tables, and as a picture.

The picture is a matrix of which classes are taken for which, or of many classes the worst of it.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import PowerNorm

from data.errors import printable
from data.own_files import replace_file
from training.inference.eval_report import EvalReport
from training.logs.plots import save_figure

PER_CLASS, CONFUSION, PICTURE = "per_class.csv", "confusion.csv", "confusion.png"
_IN_MATRIX = 50
"""The most classes of which names can be read along a matrix."""
_WITH_NUMBERS = 25
_PAIRS = 25
_NAME_LENGTH = 24


def write_report(report: EvalReport, folder: Path) -> None:
    """Write the tables and the picture. Raises OSError.

    The picture is the confusion matrix; of more than 50 classes the most frequent mistakes, and how
    many classes have which accuracy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_table(folder / PER_CLASS, report.per_class())
    _write_table(folder / CONFUSION, report.confusion())
    draw = _matrix if len(report.names) <= _IN_MATRIX else _worst
    figure = draw(report)
    save_figure(figure, folder / PICTURE)


def _write_table(path: Path, rows: list[list]) -> None:
    content = io.StringIO(newline="")
    csv.writer(content).writerows(rows)
    # Names of folders may hold bytes that are no text.
    replace_file(path, content.getvalue().encode(errors="surrogateescape"))


def _matrix(report: EvalReport) -> plt.Figure:
    count = len(report.names)
    found = np.zeros((count, count), dtype=np.int64)
    found[report.pairs[:, 0], report.pairs[:, 1]] = report.pairs[:, 2]
    share = 100 * found / np.maximum(found.sum(axis=1, keepdims=True), 1)
    side = 3.0 + 0.3 * count
    figure, axis = plt.subplots(figsize=(side + 1.5, side), layout="constrained")
    # By the square root: of a good model the few mistakes are what matters.
    image = axis.imshow(share, cmap="Blues", norm=PowerNorm(0.5, 0, 100))
    figure.colorbar(image, label="% of the class's images", shrink=0.8)
    names = [_short(name) for name in report.names]
    axis.set_xticks(range(count), names, rotation=90)
    axis.set_yticks(range(count), names)
    axis.set_xlabel("predicted")
    axis.set_ylabel("class")
    axis.set_title(_title(report))
    if count <= _WITH_NUMBERS:
        for label, other, times in report.pairs.tolist():
            colour = "white" if share[label, other] > 35 else "black"
            axis.text(other, label, times, ha="center", va="center", color=colour, fontsize=8)
    return figure


def _worst(report: EvalReport) -> plt.Figure:
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 7.5), layout="constrained", width_ratios=(3, 2)
    )
    mistakes = report.mistakes[:_PAIRS]
    texts = [f"{_short(report.names[a])} → {_short(report.names[b])}" for a, b, _ in mistakes]
    shares = 100 * mistakes[:, 2] / np.maximum(report.images[mistakes[:, 0]], 1)
    bars = left.barh(range(len(mistakes)), mistakes[:, 2])
    left.bar_label(bars, [f" {share:.0f} %" for share in shares], fontsize=8)
    left.set_yticks(range(len(mistakes)), texts, fontsize=8)
    left.invert_yaxis()
    left.margins(x=0.1)
    left.set_xlabel("images (% of the class's)")
    left.set_title("Most frequent mistakes: class → predicted")

    there = report.images > 0
    accuracy = 100 * report.in_top1[there] / report.images[there]
    right.hist(accuracy, bins=np.linspace(0, 100, 21))
    if accuracy.size:
        right.axvline(accuracy.mean(), color="black", linestyle="--")
        right.set_xlabel(f"top-1 of a class, % (mean {accuracy.mean():.1f})")
    right.set_ylabel("classes")
    right.set_title(_title(report))
    return figure


def _title(report: EvalReport) -> str:
    images = int(report.images.sum())
    right = 100 * report.in_top1.sum() / max(images, 1)
    return f"{images:,} images, top-1 {right:.2f} %"


def _short(name: str) -> str:
    """Return a class's name as it can be drawn, "$" being mathematics to matplotlib."""
    text = printable(name).replace("$", r"\$")
    return text if len(text) <= _NAME_LENGTH else f"{text[: _NAME_LENGTH - 1]}…"
