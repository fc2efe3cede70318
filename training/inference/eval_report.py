"""What an evaluation found out about each class: how many are right, what others are taken for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from training.inference.predictions import TOP


@dataclass(frozen=True)
class EvalReport:
    """Says, by class, what the images of a validation set were taken for."""

    names: Sequence[str]
    """Of the classes, by label."""
    images: np.ndarray
    """How many images each class has: (classes,)."""
    in_top1: np.ndarray
    in_top5: np.ndarray
    """How many of them have their label first, or among the first five: (classes,)."""
    pairs: np.ndarray
    """A row for each label and predicted class that occur together, and how often: (pairs, 3)."""

    @classmethod
    def of(cls, found: np.ndarray, names: Sequence[str]) -> EvalReport:
        """Return the report on what ``Predictions.all`` returns."""
        labels, predicted, before = found
        images, in_top1, in_top5 = (
            np.bincount(labels[before < most], minlength=len(names))
            for most in (len(names) + 1, 1, TOP)
        )
        pairs, times = np.unique(np.stack([labels, predicted], axis=1), axis=0, return_counts=True)
        return cls(names, images, in_top1, in_top5, np.column_stack([pairs, times]))

    @property
    def mistakes(self) -> np.ndarray:
        """Return the pairs whose two classes differ, the most frequent in front: (pairs, 3)."""
        wrong = self.pairs[self.pairs[:, 0] != self.pairs[:, 1]]
        return wrong[np.argsort(-wrong[:, 2], kind="stable")]

    def per_class(self) -> list[list]:
        """Return a row for each class; accuracies are in percent, empty without images."""
        header = "label class images top1 top5 predicted mostly_mistaken_for times".split()
        predicted = np.zeros(len(self.names), dtype=np.int64)
        np.add.at(predicted, self.pairs[:, 1], self.pairs[:, 2])
        mostly: dict[int, tuple[str, int]] = {}
        for label, other, times in self.mistakes.tolist():
            mostly.setdefault(label, (self.names[other], times))
        return [
            header,
            *(
                [
                    label,
                    name,
                    self.images[label],
                    _percent(self.in_top1[label], self.images[label]),
                    _percent(self.in_top5[label], self.images[label]),
                    predicted[label],
                    *mostly.get(label, ("", 0)),
                ]
                for label, name in enumerate(self.names)
            ),
        ]

    def confusion(self) -> list[list]:
        """Return a row for each class and prediction that occur together."""
        rows = [[self.names[a], self.names[b], times] for a, b, times in self.pairs.tolist()]
        return [["class", "predicted", "images"], *rows]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}" if whole else ""
