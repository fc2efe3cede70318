"""Pictures of a classifier's mistakes and of its calibration: confusion.png, reliability.png."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from training.evaluation.class_scores import BINS, NOT_A_NUMBER, calibration_error
from training.logs.figures import as_label, pyplot, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CLASSES = 25
"""The largest number of classes in a picture of a confusion matrix; more would be unreadable."""
_NAME_LENGTH = 24


def most_confused(pairs: np.ndarray, classes: int) -> list[int]:
    """Return the labels of at most ``MOST_CLASSES`` classes, sorted: all of them if there are no
    more, else those of the most frequent pairs of a label and another, predicted class. ``pairs``:
    of dtype ``class_scores.PAIR``."""
    if classes <= MOST_CLASSES:
        return list(range(classes))
    wrong = pairs[(pairs["label"] != pairs["predicted"]) & (pairs["predicted"] != NOT_A_NUMBER)]
    chosen: set[int] = set()
    for pair in wrong[np.argsort(-wrong["images"], kind="stable")]:
        chosen |= {int(pair["label"]), int(pair["predicted"])}
        if len(chosen) >= MOST_CLASSES - 1:  # two more might be too many
            break
    return sorted(chosen)


def _cut(name: str) -> str:
    cut = name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 3]}..."
    return as_label(cut)


def draw_confusion(pairs: np.ndarray, names: Sequence[str], path: Path) -> None:
    """Draw the confusion matrix of pairs of dtype ``class_scores.PAIR``: numbers of images, colored
    by the fraction of the label's images. Raises OSError."""
    shown = most_confused(pairs, len(names))
    place = np.full(len(names) + 1, len(shown))  # of other classes, and of NOT_A_NUMBER, the last
    place[shown] = range(len(shown))
    matrix = np.zeros((len(shown) + 1, len(shown) + 1), np.int64)
    np.add.at(matrix, (place[pairs["label"]], place[pairs["predicted"]]), pairs["images"])
    right = pairs[pairs["label"] == pairs["predicted"]]["images"].sum()
    images = pairs["images"].sum()
    title = f"{images:,} images, {100 * right / images:.2f} % correct"
    matrix = matrix[:-1]
    columns = [_cut(names[label]) for label in shown]
    rows = [f"{name} ({n:,})" for name, n in zip(columns, matrix.sum(axis=1), strict=True)]
    if len(shown) < len(names):
        title += f"\nthe {len(shown)} most often confused of {len(names):,} classes"
    if matrix[:, -1].any():
        columns.append("others" if len(shown) < len(names) else "not a number")
    matrix = matrix[:, : len(columns)]
    if not len(shown):  # of many classes, none is confused
        matrix, rows, columns = np.zeros((1, 1), np.int64), [""], [""]

    # Sizes in inches: of a cell with its number, of the names at the sides, and of the rest.
    cell = max(0.36, 0.1 + 0.09 * len(f"{matrix.max():,}"), 2.4 / len(rows))
    left, below = (0.085 * max(map(len, texts)) for texts in (rows, columns))
    figure, axis = pyplot().subplots(
        figsize=(
            max(cell * len(columns) + left + 1.6, 5.0),
            cell * len(rows) + below + 0.6 + 0.15 * title.count("\n"),
        ),
        layout="constrained",
    )
    share = 100 * matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    image = axis.imshow(share, cmap="Blues", vmin=0, vmax=100)
    figure.colorbar(image, label="% of the class's images", shrink=0.8)
    for (row, column), count in np.ndenumerate(matrix):
        if count:
            color = "white" if share[row, column] > 55 else "black"
            axis.text(column, row, f"{count:,}", ha="center", va="center", color=color, fontsize=8)
    axis.set_xticks(range(len(columns)), columns, rotation=90)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xticks(np.arange(len(columns) - 1) + 0.5, minor=True)
    axis.set_yticks(np.arange(len(rows) - 1) + 0.5, minor=True)
    axis.grid(which="minor", color="0.88", linewidth=0.6)
    axis.tick_params(which="minor", length=0)
    axis.set_xlabel("prediction")
    axis.set_ylabel("class (number of images)")
    axis.set_title(title, fontsize=10)
    save_figure(figure, path)


def draw_reliability(bins: np.ndarray, path: Path, *, of_labels: bool = False) -> None:
    """Draw the accuracy of predictions over their probability, and how many there are, by the bins
    of ``class_scores.count_bins``; ``of_labels``: of several labels an image, in place of the
    accuracy the share of images that have the label. Raises OSError."""
    share, counted = ("accuracy", "correct predictions in %"), "images"
    if of_labels:
        share, counted = ("share", "images that have the label in %"), "images x labels"
    figure: Figure
    figure, (above, below) = pyplot().subplots(
        2,
        1,
        figsize=(5, 5.6),
        sharex=True,
        height_ratios=(3, 1),
        layout="constrained",
    )
    edges = np.linspace(0, 100, BINS + 1)
    middles, width = (edges[1:] + edges[:-1]) / 2, 100 / BINS
    used = bins["images"] > 0
    counts = bins["images"][used]
    accuracy = 100 * bins["correct"][used] / counts
    above.bar(middles[used], accuracy, width, color="tab:blue", edgecolor="white", label=share[0])
    means = 100 * bins["probability"][used] / counts
    above.plot(means, accuracy, "o", color="black", markersize=3.5, label="mean of the bin")
    above.plot([0, 100], [0, 100], "--", color="tab:gray", label="calibrated")
    above.set_ylim(0, 103)
    above.set_ylabel(share[1])
    above.set_title(
        f"expected calibration error {100 * calibration_error(bins):.2f} % in {BINS} bins",
        fontsize=10,
    )
    above.legend(loc="upper left")
    below.bar(middles, bins["images"], width, color="tab:gray", edgecolor="white")
    below.set_xlim(0, 100)
    below.set_xlabel(f"probability of the {'label' if of_labels else 'prediction'} in %")
    below.set_ylabel(counted)
    for axis in (above, below):
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    save_figure(figure, path)
