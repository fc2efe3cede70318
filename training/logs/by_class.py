"""What an evaluation says of each class: the mean and the lowest recall, and the largest class.

The accuracy alone says little if classes have different sizes: a model that always predicts the
largest class is right as often as that class occurs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from data.files import printable


@dataclass(frozen=True, eq=False)
class ByClass:
    """Counts by class of an evaluation, each (classes,) int64."""

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
    def recalls(self) -> np.ndarray:
        """The recall of each class in percent, (classes,) fp64: the share of its images that were
        predicted as it; NaN for a class without images."""
        with np.errstate(invalid="ignore"):
            return 100 * self.right / self.images

    @property
    def balanced_accuracy(self) -> float:
        """The mean recall in percent of the classes that have images, as scikit-learn's
        ``balanced_accuracy_score``."""
        return float(np.nanmean(self.recalls))

    @property
    def values(self) -> dict[str, float]:
        """The figures in percent, by their names in records; {} without images."""
        if not self.images.any():
            return {}
        return {
            "val_balanced_accuracy": self.balanced_accuracy,
            "val_worst_recall": float(np.nanmin(self.recalls)),
            "val_largest_class": 100 * float(self.images.max() / self.images.sum()),
        }

    def lines(self, weights: str = "") -> Iterator[str]:
        """Yield the figures as text, and a warning if all images were predicted as one class.
        ``weights``: which weights they are of, if there are several."""
        if not self.images.any():
            return
        worst, largest = int(np.nanargmin(self.recalls)), int(self.images.argmax())
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
