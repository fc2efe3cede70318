"""What an evaluation says of each class: precision and recall, their means, and the largest class.

The accuracy alone says little if classes have different sizes: a model that always predicts the
largest class is right as often as that class occurs. The definitions are scikit-learn's, of
``precision_recall_fscore_support`` and ``balanced_accuracy_score``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from data.files import printable


class Averages(NamedTuple):
    """Averages over classes, from 0 to 1."""

    precision: float
    recall: float
    f1: float


@dataclass(frozen=True, eq=False)
class ByClass:
    """Counts by class of an evaluation, each (classes,) int64, and figures from them. Fractions are
    from 0 to 1, NaN where they are not defined: the precision of a class that was never predicted,
    the recall of a class without images, the F1 of a class that is neither."""

    images: np.ndarray
    """The number of images of each class."""
    right: np.ndarray
    """The number of those that were predicted as their class."""
    predicted: np.ndarray
    """The number of images that were predicted as each class."""
    names: Sequence[str] = ()
    """The names of the classes, as far as they are known."""

    def named(self, names: Sequence[str]) -> ByClass:
        """Return the same counts of classes with these names, by label."""
        return replace(self, names=names)

    @property
    def precision(self) -> np.ndarray:
        return fraction(self.right, self.predicted)

    @property
    def recall(self) -> np.ndarray:
        return fraction(self.right, self.images)

    @property
    def f1(self) -> np.ndarray:
        return fraction(2 * self.right, self.images + self.predicted)

    @property
    def macro(self) -> Averages:
        """The means over the classes that have images or were predicted; what is not defined counts
        as 0."""
        occurs = (self.images > 0) | (self.predicted > 0)
        figures = (self.precision, self.recall, self.f1)
        return Averages(*(float(np.nan_to_num(each[occurs]).mean()) for each in figures))

    @property
    def micro(self) -> Averages:
        """The figures of all classes together."""
        right, images, predicted = self.right.sum(), self.images.sum(), self.predicted.sum()
        figures = (right, predicted), (right, images), (2 * right, images + predicted)
        return Averages(*(float(fraction(*each)) for each in figures))

    @property
    def balanced_accuracy(self) -> float:
        """The mean recall of the classes that have images."""
        return float(np.nanmean(self.recall))

    @property
    def largest_share(self) -> float:
        """The accuracy of always predicting the class with the most images."""
        return float(self.images.max() / self.images.sum())

    @property
    def values(self) -> dict[str, float]:
        """The figures in percent, by their names in records; {} without images."""
        if not self.images.any():
            return {}
        return {
            "val_balanced_accuracy": 100 * self.balanced_accuracy,
            "val_worst_recall": 100 * float(np.nanmin(self.recall)),
            "val_largest_class": 100 * self.largest_share,
        }

    def lines(self, weights: str = "") -> Iterator[str]:
        """Yield the figures as text, and a warning if all images were predicted as one class.
        ``weights``: which weights they are of, if there are several."""
        if not self.images.any():
            return
        worst, largest = int(np.nanargmin(self.recall)), int(self.images.argmax())
        values = self.values
        yield (
            f"{weights}balanced accuracy: {values['val_balanced_accuracy']:.2f} %, worst recall: "
            f"{values['val_worst_recall']:.2f} % (class {self._name(worst)}), always class "
            f"{self._name(largest)}: {values['val_largest_class']:.2f} %"
        )
        if np.count_nonzero(self.images) > 1 and np.count_nonzero(self.predicted) == 1:
            only = int(self.predicted.argmax())
            yield (
                f"warning: {weights}all {self.images.sum():,} images of val are predicted as class "
                f"{self._name(only)}: the model does not tell classes apart (yet); if their sizes "
                "differ, see docs/unbalanced_classes.md"
            )

    def _name(self, label: int) -> str:
        return printable(self.names[label]) if label < len(self.names) else str(label)


def fraction(part: Any, whole: Any) -> Any:
    """Return part / whole of NumPy's numbers or arrays; NaN for 0 / 0."""
    with np.errstate(invalid="ignore"):
        return part / whole
