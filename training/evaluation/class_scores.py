"""How well a classifier does on each class, and how well its probabilities are calibrated.

All figures are computed from counts, which processes add up. The definitions are scikit-learn's,
of ``precision_recall_fscore_support``, ``balanced_accuracy_score`` and ``calibration_curve``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from training.objectives.classify import TOP

BINS = 15
"""The number of bins of probabilities, as in Guo et al. 2017 (arXiv 1706.04599)."""
NOT_A_NUMBER = -1
"""The predicted class of an image with a logit that is not finite."""

PAIR = np.dtype([(name, np.int64) for name in ("label", "predicted", "images", "in_top5")])
"""How many images of a label were predicted as a class, and how many of those have their label
among the ``TOP`` most probable classes."""
BIN = np.dtype([("images", np.int64), ("correct", np.int64), ("probability", np.float64)])
"""The images whose prediction has a probability in one bin: how many there are, how many of the
predictions are correct, and the sum of their probabilities."""


def count_pairs(predictions: np.ndarray) -> np.ndarray:
    """Return the pairs of label and prediction that occur, of dtype PAIR, sorted. ``predictions``:
    of images, of dtype ``PREDICTION``, or pairs of dtype PAIR to add up."""
    keys = np.stack([predictions["label"], predictions["predicted"]], axis=1).astype(np.int64)
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    pairs = np.zeros(len(unique), PAIR)
    pairs["label"], pairs["predicted"] = unique.T
    if predictions.dtype == PAIR:
        images, in_top5 = predictions["images"], predictions["in_top5"]
    else:
        images, in_top5 = np.ones(len(keys), np.int64), predictions["before"] < TOP
    np.add.at(pairs["images"], inverse.ravel(), images)
    np.add.at(pairs["in_top5"], inverse.ravel(), in_top5)
    return pairs


def count_bins(predictions: np.ndarray) -> np.ndarray:
    """Return the bins of the probabilities of predictions, (BINS,), of dtype BIN. A bin is open on
    the left and closed on the right, as in scikit-learn; the first includes 0."""
    finite = predictions[predictions["predicted"] != NOT_A_NUMBER]
    probability = finite["probability"].astype(np.float64)
    edges = np.linspace(0.0, 1.0, BINS + 1)
    which = np.searchsorted(edges[1:-1], probability)
    correct = finite["label"] == finite["predicted"]
    bins = np.zeros(BINS, BIN)
    bins["images"] = np.bincount(which, minlength=BINS)
    bins["correct"] = np.bincount(which[correct], minlength=BINS)
    bins["probability"] = np.bincount(which, probability, minlength=BINS)
    return bins


class Averages(NamedTuple):
    """Means over classes, from 0 to 1."""

    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class ClassScores:
    """The figures of each class, by label: arrays of shape (classes,). Fractions are from 0 to 1,
    NaN where they are not defined: the precision of a class that was never predicted, the recall of
    a class without images, the F1 of a class that is neither."""

    support: np.ndarray
    """The number of images."""
    predicted: np.ndarray
    """How many images were predicted as the class."""
    precision: np.ndarray
    recall: np.ndarray
    f1: np.ndarray
    top5: np.ndarray
    """The fraction of images with their label among the ``TOP`` most probable classes."""

    @classmethod
    def of(cls, pairs: np.ndarray, classes: int) -> ClassScores:
        """Return the figures of pairs of dtype PAIR."""

        def by_class(which: str, counts: str, pairs: np.ndarray) -> np.ndarray:
            total = np.zeros(classes, np.int64)
            np.add.at(total, pairs[which], pairs[counts])
            return total

        support = by_class("label", "images", pairs)
        in_top5 = by_class("label", "in_top5", pairs)
        predicted = by_class("predicted", "images", pairs[pairs["predicted"] != NOT_A_NUMBER])
        correct = by_class("label", "images", pairs[pairs["label"] == pairs["predicted"]])
        with np.errstate(invalid="ignore"):  # 0 / 0 is NaN
            return cls(
                support,
                predicted,
                correct / predicted,
                correct / support,
                2 * correct / (support + predicted),
                in_top5 / support,
            )

    @property
    def macro(self) -> Averages:
        """The means over the classes that have images or were predicted; what is not defined counts
        as 0."""
        occurs = (self.support > 0) | (self.predicted > 0)
        figures = (self.precision, self.recall, self.f1)
        return Averages(*(float(np.nan_to_num(each[occurs]).mean()) for each in figures))

    @property
    def balanced_accuracy(self) -> float:
        """The mean recall of the classes that have images."""
        return float(np.nanmean(self.recall))

    @property
    def largest_share(self) -> float:
        """The accuracy of always predicting the class with the most images."""
        return float(self.support.max() / self.support.sum())


def calibration_error(bins: np.ndarray) -> float:
    """Return the expected calibration error, ECE, from 0 to 1 (Guo et al. 2017, equation 3): the
    mean over images of the distance, in each bin of dtype BIN, between accuracy and mean
    probability. NaN without images."""
    images = bins["images"].sum()
    with np.errstate(invalid="ignore"):
        return float(np.abs(bins["correct"] - bins["probability"]).sum() / images)
