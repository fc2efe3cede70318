"""What the images of each class were classified as, and how well probabilities are calibrated.

All figures are computed from counts, which processes add up. Bins are those of scikit-learn's
``calibration_curve``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from training.logs.by_class import ByClass, fraction
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
predictions are correct, and the sum of their probabilities. Of a label among several, the
probability is that of having it, and it is correct if the image has it."""


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


def count_bins(probability: np.ndarray, correct: np.ndarray) -> np.ndarray:
    """Return the bins of finite probabilities, (images,), and of whether what they are of is true,
    (images,) bool: (BINS,), of dtype BIN. A bin is open on the left and closed on the right, as in
    scikit-learn; the first includes 0."""
    probability = probability.astype(np.float64)
    edges = np.linspace(0.0, 1.0, BINS + 1)
    which = np.searchsorted(edges[1:-1], probability)
    bins = np.zeros(BINS, BIN)
    bins["images"] = np.bincount(which, minlength=BINS)
    bins["correct"] = np.bincount(which[correct], minlength=BINS)
    bins["probability"] = np.bincount(which, probability, minlength=BINS)
    return bins


def added_bins(bins: np.ndarray) -> np.ndarray:
    """Return the sum along the first dimension of bins of dtype BIN."""
    total = np.zeros(bins.shape[1:], BIN)
    for name in BIN.names or ():
        total[name] = bins[name].sum(axis=0)
    return total


def counts_by_class(pairs: np.ndarray, names: Sequence[str]) -> ByClass:
    """Return the counts of pairs of dtype PAIR, of the classes with these names."""
    finite = pairs[pairs["predicted"] != NOT_A_NUMBER]
    right = pairs[pairs["label"] == pairs["predicted"]]
    classes = len(names)
    return ByClass(
        _totals(pairs, "label", "images", classes),
        _totals(right, "label", "images", classes),
        _totals(finite, "predicted", "images", classes),
        names,
    )


def top5_by_class(pairs: np.ndarray, classes: int) -> np.ndarray:
    """Return, for each class, the fraction of its images with the label among the ``TOP`` most
    probable classes, (classes,), of pairs of dtype PAIR; NaN for a class without images."""
    return fraction(*(_totals(pairs, "label", each, classes) for each in ("in_top5", "images")))


def _totals(pairs: np.ndarray, which: str, counts: str, classes: int) -> np.ndarray:
    """Return the sum of the field ``counts`` for each class in the field ``which``, (classes,)."""
    total = np.zeros(classes, np.int64)
    np.add.at(total, pairs[which], pairs[counts])
    return total


def calibration_error(bins: np.ndarray) -> float:
    """Return the expected calibration error, ECE, from 0 to 1 (Guo et al. 2017, equation 3): the
    mean over images of the distance, in each bin of dtype BIN, between accuracy and mean
    probability. NaN without images."""
    images = bins["images"].sum()
    with np.errstate(invalid="ignore"):
        return float(np.abs(bins["correct"] - bins["probability"]).sum() / images)
