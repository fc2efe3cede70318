"""Evaluation: measure the model on a validation set, and report results by class.

``evaluate`` runs the model; ``write_report`` reports what the images of each class were classified
as (``--eval_report``). ``Evaluations`` (``training/loop.py``) decides when a training run
evaluates; the objective (``training/objectives``) decides what is measured.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from data.files import write_csv
from data.loader import Batch, BatchLoader, numbered, prefetch
from data.source import DataSource
from training.backend import Backend
from training.errors import UsageError
from training.evaluation.trained import place_trained, printer
from training.files import check_folder_writable, folder_at, is_url
from training.logs.bad_images import BadImages
from training.logs.figures import as_label, drawing, pyplot, save_figure
from training.logs.records import Evaluation
from training.processes.exchange import check_alike
from training.resolve import Run
from training.weights.adapt import Adapter

TOP = 5
"""The k of top-k accuracy, in addition to 1."""
_AHEAD = 8
"""How many batches the host may be ahead of the devices; enough that they never wait."""


class Measure(abc.ABC):
    """What is measured in one evaluation. Padding (label -1) is ignored."""

    numbered: ClassVar[bool] = False
    """Whether images come with their index in the validation set instead of a label."""

    @abc.abstractmethod
    def of_batch(
        self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Run the model on a batch; return values over all replicas, on the devices."""

    @abc.abstractmethod
    def add(self, values: Mapping[str, list[float]]) -> None:
        """Add the values of a batch, after they were read from the devices."""

    @abc.abstractmethod
    def result(self) -> Evaluation:
        """Return what was measured over all batches."""


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

    def source() -> Iterator[Batch]:
        for index, batch in enumerate(itertools.islice(loader.epoch(0), batches or None)):
            first = (index * backend.batch_shards + backend.batch_shard) * len(batch[1])
            yield numbered(batch, first) if measure.numbered else batch

    model.eval()
    stopped, pending = False, deque[Future]()
    with contextlib.closing(prefetch(source(), backend.put, loader.prefetch_depth)) as ready:
        for images, labels in ready:
            values = measure.of_batch(model, images, labels)
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
    adapter: Adapter,
    data: DataSource,
    run: Run,
    backend: Backend,
) -> tuple[nn.Module, BadImages, Callable[[str], None]]:
    """Place trained weights on the devices; return the model, the unreadable images, and a function
    that prints a line. Raises UsageError in all processes if they differ."""
    say = printer(backend, json=run.config.use.json)
    check_alike(run, data)
    say(f"data: {data}")
    model = place_trained(adapter, run, backend, say)
    say(backend.describe())
    if backend.compiles:
        say("compiling takes a while ...")
    return model, BadImages(run.config.data.max_bad_images, data, is_main=backend.is_main), say


def classes_before(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return, for each image, how many classes the logits (images, classes) rank above its label.

    The first of equal logits ranks highest. NaN ranks above all, so a model that has diverged is
    never right. Needs no sorting or gathering: each device compares the logits of its own images.
    """
    classes = torch.arange(logits.shape[-1], device=logits.device)
    label = labels.clamp(min=0)[:, None]  # padding gets an arbitrary rank, which is ignored
    label_logit = torch.where(classes == label, logits, 0.0).sum(dim=-1, keepdim=True)
    first_of_equals = (logits == label_logit) & (classes < label)
    return (~(logits <= label_logit) | first_of_equals).sum(dim=-1)


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
