"""Evaluation: measure the model on a validation set, and report results by class.

``evaluate`` runs the model; ``write_report`` reports what the images of each class were classified
as (``--eval_report``). ``Evaluations`` (``hooks.py``) decides when a training run
evaluates; the objective (``training/objectives``) decides what is measured.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from torch import nn

from data.files import write_csv
from data.loader import BatchLoader, prefetch
from data.source import DataSource
from training.backend import Backend
from training.errors import UsageError
from training.files import check_folder_writable, folder_at, is_url
from training.initial_weights import InitialWeights, place_trained, printer
from training.logs.bad_images import BadImages
from training.logs.figures import as_label, drawing, pyplot, save_figure
from training.logs.records import Evaluation
from training.objectives.base import Measure
from training.objectives.classify import TOP
from training.processes.exchange import check_alike
from training.resolve import Run
from training.weights import Weights

_AHEAD = 8
"""How many batches the host may be ahead of the devices; enough that they never wait."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    measure: Measure,
    loader: BatchLoader,
    backend: Backend,
    batches: int = 0,
    batch_done: Callable[[], bool | None] = lambda: None,
) -> Evaluation | None:
    """Run the model on ``batches`` batches of ``loader`` (0: all) and return what ``measure``
    finds.

    Stops and returns None if ``batch_done``, called after each batch, returns True.
    """
    source = itertools.islice(loader.epoch(0), batches or None)
    put = functools.partial(backend.put, fields=loader.fields)
    model.eval()
    stopped, pending = False, deque[Future]()
    with contextlib.closing(prefetch(source, put, loader.prefetch_depth)) as ready:
        for batch in ready:
            values = measure.of_batch(model, batch)
            backend.end_step()
            pending.append(backend.read(values))
            if len(pending) > _AHEAD:
                measure.add(pending.popleft().result())
            if batch_done():
                stopped = True
                break
    for future in pending:
        measure.add(future.result())
    model.train()
    return None if stopped else measure.result()


def open_trained(
    weights: Weights,
    initial: InitialWeights | None,
    data: DataSource,
    run: Run,
    backend: Backend,
) -> tuple[nn.Module, BadImages, Callable[[str], None]]:
    """Place trained weights on the devices; return the model, the unreadable images, and a function
    that prints a line. ``initial``: how weights of another model are adapted to this one. Raises
    UsageError in all processes if they differ."""
    say = printer(backend, json=run.config.use.json)
    check_alike(run, data)
    say(f"data: {data}")
    model = place_trained(weights, run, backend, say, initial)
    say(backend.describe())
    if backend.compiles:
        say("compiling takes a while ...")
    return model, BadImages(run.config.data.max_bad_images, data, is_main=backend.is_main), say


# -- The report by class --------------------------------------------------------------------------


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
