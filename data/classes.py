"""Classes of different sizes: their sizes, their weights, and an order that draws them evenly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from data import files
from data.batch import SampleIndex
from data.csv_table import open_csv
from data.files import DataFolderError, SizeLimit, printable
from data.loader import GlobalBatchSampler
from data.source import DataSource, Split


def class_sizes(source: DataSource, flag: str) -> np.ndarray:
    """Return the number of training images of each class, (classes,) int64, up to the last class
    that has images, without reading any.

    Raises DataFolderError, naming ``flag``, which needs them, if the source knows no label before
    it reads the image, if an image may have several labels, or if all images are of one class.
    """
    split = source.splits.get("train")
    labels = np.asarray(getattr(split, "labels", ()))
    knows = isinstance(split, Split) and split.request.labels and len(labels) == len(split)
    if not knows or labels.ndim != 1 or not labels.size or labels.min() < 0:
        raise DataFolderError(
            f"{flag} requires a source that knows one label of each training image before reading "
            f"it, and {source.name} does not: drop {flag}"
        )
    sizes = np.bincount(labels)
    if np.count_nonzero(sizes) == 1:
        raise DataFolderError(
            f"{flag} requires training images of at least two classes, and all {len(labels):,} of "
            f"{source.name} are of one"
        )
    return sizes


def classes_without_validation(source: DataSource, sizes: np.ndarray) -> list[int]:
    """Return the classes that have training images, as of ``class_sizes``, but no validation image;
    [] also if the source does not know the labels of these."""
    labels = np.asarray(getattr(source.splits.get("val"), "labels", ()))
    if labels.ndim != 1 or not labels.size:
        return []
    return np.setdiff1d(np.flatnonzero(sizes), labels).tolist()


# -- weights -----------------------------------------------------------------------------


def inverse_frequencies(sizes: np.ndarray) -> np.ndarray:
    """Return N / (K n) for each class with n of the N images, of K classes with images, as
    scikit-learn's "balanced", (classes,) fp64; 1 for a class without images. Their mean over the
    images is 1."""
    classes = np.count_nonzero(sizes)
    return np.where(sizes > 0, sizes.sum() / (classes * np.maximum(sizes, 1)), 1.0)


def log_priors(sizes: np.ndarray, count: int) -> np.ndarray:
    """Return the logarithm of each class's share of the images, (count,) fp64; a class without
    images counts as one with a single image."""
    images = np.ones(count)
    images[: len(sizes)] = np.maximum(sizes, 1)
    return np.log(images / sizes.sum())


_TABLE = SizeLimit("a table of class weights", 2**26)


def read_class_weights(
    file: str, names: Sequence[str] | None, sizes: np.ndarray, count: int
) -> np.ndarray:
    """Return the weights in a CSV file of ``count`` classes, (count,) fp64, scaled so that their
    mean over the training images, of which each class has ``sizes``, is 1.

    The file has the columns class, one of ``names`` or else a number from 0, and weight. Raises
    DataFolderError if it is invalid, names an unknown class, or leaves one out that has a name or
    images; other classes get the weight 1.
    """
    number_of = {str(number): number for number in range(count)}
    number_of |= {name: number for number, name in enumerate(names or ())}
    weights: dict[int, float] = {}
    table = open_csv("--class_weights", file, _TABLE)
    columns = ("class", "weight")
    if lost := next((column for column in columns if column not in table.columns), None):
        raise DataFolderError(
            f"{file} has no column {lost}: --class_weights requires a first line with the columns "
            "class,weight"
        )
    for where, (name, text) in table.read(columns):
        if name not in number_of:
            known = f"a class ({files.first_of(list(names))}), or " if names else ""
            raise DataFolderError(
                f"{where}: there is no class {name[:100]!r}: write {printable(known)}a number from "
                f"0 to {count - 1}"
            )
        if number_of[name] in weights:
            raise DataFolderError(f"{where}: class {printable(name)} was already listed")
        weights[number_of[name]] = _weight(text, where)
    needed = set(range(len(names or ()))) | set(np.flatnonzero(sizes).tolist())
    if missing := sorted(needed - weights.keys()):
        shown = files.first_of([names[n] if names else str(n) for n in missing])
        raise DataFolderError(f"{file} has no weight for class {printable(shown)}: add a line")
    found = np.array([weights.get(number, 1.0) for number in range(count)])
    mean = float(found[: len(sizes)] @ sizes / sizes.sum())
    if not 0 < mean < np.inf:
        raise DataFolderError(
            f"{file}: the weights of all training images add up to {mean * sizes.sum():g}: give at "
            "least one class that has images a weight above 0"
        )
    return found / mean


def _weight(text: str, where: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = np.nan
    if not 0 <= weight <= _LARGEST_WEIGHT:
        raise DataFolderError(
            f"{where}: the weight {text[:40]!r} is not a number from 0 to {_LARGEST_WEIGHT:g}"
        )
    return weight


_LARGEST_WEIGHT = 1e6


# -- sampling ----------------------------------------------------------------------------


def draws_of_classes(sizes: np.ndarray, power: float) -> np.ndarray:
    """Return how many images of each class an epoch has, (classes,) int64: as many in total as
    there are, shared out in proportion to size^(1 - power), by largest remainders.

    With ``power`` from 0 to 1, each class with images has at least one.
    """
    total = int(sizes.sum())
    weights = np.where(sizes > 0, np.maximum(sizes, 1) ** (1.0 - power), 0)
    shares = total * weights / weights.sum()
    # Rounded, so that machines whose powers differ in the last digit agree on the order.
    draws = np.floor(shares.round(6)).astype(np.int64)
    remainders = (shares - draws).round(6)
    draws[np.argsort(-remainders, kind="stable")[: total - int(draws.sum())]] += 1
    return draws


class BalancedSampler(GlobalBatchSampler):
    """Draws images of rare classes more often: an epoch is as long as without it, and has the same
    number of images of a class each time (``draws_of_classes``).

    Within an epoch, the images of a class follow each other in turn: none is drawn again before all
    others were. Each time it is augmented differently. Which images of a large class are left out,
    and the order, depend only on the seed and the epoch.
    """

    def __init__(
        self, labels: Sequence[int] | np.ndarray, batch_size: int, *, power: float, **how: Any
    ) -> None:
        """``labels``: the class of each image. ``power``: see ``draws_of_classes``."""
        super().__init__(len(labels), batch_size, **how)
        self._labels = torch.from_numpy(np.array(labels, np.int64))
        self._sizes = np.bincount(self._labels.numpy())
        self._draws = draws_of_classes(self._sizes, power)
        self._most_draws = int(np.ceil(self._draws / np.maximum(self._sizes, 1)).max())
        """How often at most an image is drawn in an epoch."""

    def shuffled(self, generator: torch.Generator) -> torch.Tensor:
        """Return the epoch's draws in random order: n + k * ``length`` is the k-th draw of image n,
        from 0."""
        order = torch.randperm(self.length, generator=generator)
        by_class = order[self._labels[order].argsort(stable=True)]
        sizes, draws = (torch.from_numpy(each) for each in (self._sizes, self._draws))
        turn = torch.arange(int(draws.sum())) - (draws.cumsum(0) - draws).repeat_interleave(draws)
        size, first = (each.repeat_interleave(draws) for each in (sizes, sizes.cumsum(0) - sizes))
        drawn = by_class[first + turn % size] + turn // size * self.length
        return drawn[torch.randperm(len(drawn), generator=generator)]

    def __iter__(self) -> Iterator[list[SampleIndex]]:
        for samples in super().__iter__():
            yield [self._of_draw(sample) for sample in samples]

    def _of_draw(self, sample: SampleIndex) -> SampleIndex:
        draw, image = divmod(sample.index, self.length)
        return replace(sample, index=image, epoch=sample.epoch * self._most_draws + draw)
