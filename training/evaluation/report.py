"""The report by class, ``--eval_report``: what the images of each class were classified as."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from data.files import write_csv
from training.errors import UsageError
from training.files import check_folder_writable, folder_at, is_url
from training.logs.figures import as_label, drawing, pyplot, save_figure
from training.objectives.classify import TOP
from training.resolve import Run

PER_CLASS, CONFUSION, PICTURE = "per_class.csv", "confusion.csv", "confusion.png"
_LARGEST_MATRIX = 50
"""The largest number of classes for which a confusion matrix is drawn."""
_NAME_LENGTH = 24


def report_folder(run: Run) -> Path:
    """Return the folder of ``--eval_report``. Raises UsageError if it cannot be written to."""
    assert run.config.use.eval_report is not None
    folder = folder_at(run.config.use.eval_report)
    if is_url(folder):
        raise UsageError(f"--eval_report {folder}: use a folder of this machine")
    check_folder_writable(folder, "--eval_report")
    return folder


def write_report(
    predictions: np.ndarray, names: Sequence[str], folder: Path, say: Callable[[str], None]
) -> None:
    """Write per_class.csv, confusion.csv and confusion.png: what the images of each class were
    classified as. Raises OSError, except for the picture, whose failure is logged with ``say``.

    ``predictions``: labels, predicted classes and ``classes_before`` of all images, (3, images).
    ``names``: names of the classes, by label.
    """
    labels, predicted, before = predictions
    count = len(names)
    # By class: the number of images, and of those with the label in the top 1 and in the top 5.
    images, in_top1, in_top5 = (
        np.bincount(labels[before < most], minlength=count) for most in (count + 1, 1, TOP)
    )
    # A row for each pair of label and predicted class that occurs, with its count.
    unique, often = np.unique(np.stack([labels, predicted], axis=1), axis=0, return_counts=True)
    pairs = np.column_stack([unique, often])
    mistakes = pairs[pairs[:, 0] != pairs[:, 1]]
    mistakes = mistakes[np.argsort(-mistakes[:, 2], kind="stable")]  # the most frequent first

    # The tables.
    taken_for = np.bincount(predicted, minlength=count)
    mostly: dict[int, tuple[str, int]] = {}
    for label, other, times in mistakes.tolist():
        mostly.setdefault(label, (names[other], times))
    header = "label class images top1 top5 predicted mostly_mistaken_for times".split()
    per_class: list[list] = [header]
    for label, name in enumerate(names):
        tops = (in_top1[label], in_top5[label])
        percent = [f"{100 * top / images[label]:.2f}" if images[label] else "" for top in tops]
        per_class.append(
            [label, name, images[label], *percent, taken_for[label], *mostly.get(label, ("", 0))]
        )
    confusion = [["class", "predicted", "images"]]
    confusion += [[names[a], names[b], times] for a, b, times in pairs.tolist()]
    folder.mkdir(parents=True, exist_ok=True)
    for file, rows in ((PER_CLASS, per_class), (CONFUSION, confusion)):
        write_csv(folder / file, rows)

    if count > _LARGEST_MATRIX:
        return
    with drawing(folder / PICTURE, say):
        plt = pyplot()
        from matplotlib.colors import PowerNorm

        matrix = np.zeros((count, count), dtype=np.int64)
        matrix[pairs[:, 0], pairs[:, 1]] = pairs[:, 2]
        share = 100 * matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
        side = 3.0 + 0.3 * count
        figure, axis = plt.subplots(figsize=(side + 1.5, side), layout="constrained")
        # A square-root scale, to show the few mistakes of a good model.
        image = axis.imshow(share, cmap="Blues", norm=PowerNorm(0.5, 0, 100))
        figure.colorbar(image, label="% of the class's images", shrink=0.8)
        shown = [as_label(name, _NAME_LENGTH) for name in names]
        axis.set_xticks(range(count), shown, rotation=90)
        axis.set_yticks(range(count), shown)
        axis.set_xlabel("predicted")
        axis.set_ylabel("class")
        axis.set_title(f"{len(labels):,} images, top-1 {100 * in_top1.sum() / len(labels):.2f} %")
        save_figure(figure, folder / PICTURE)
