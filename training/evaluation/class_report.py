"""The report of ``--eval_report`` on one label an image: what the images of each class were
classified as.

Each process counts what the images on its devices were classified as. The first one adds the counts
up, and gets the mistakes of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.source import Split
from training.backend import Backend
from training.evaluation.class_figures import draw_confusion, draw_reliability
from training.evaluation.class_scores import (
    BINS,
    NOT_A_NUMBER,
    added_bins,
    calibration_error,
    count_bins,
    count_pairs,
    counts_by_class,
    top5_by_class,
)
from training.evaluation.report import (
    ERRORS,
    RELIABILITY_PICTURE,
    PageTable,
    Report,
    Rows,
    calibration,
    has_own_images,
    number,
    percent,
    shown,
)
from training.logs.by_class import ByClass
from training.logs.records import Evaluation
from training.objectives.classify import TOP
from training.processes import exchange

PER_CLASS, CONFUSION, CONFUSION_PICTURE = "per_class.csv", "confusion.csv", "confusion.png"
_MOST_CLASSES = 100
"""The largest number of classes in the table of the page."""


@dataclass(frozen=True)
class ClassReport(Report):
    """What the images of a validation split were classified as. ``errors`` are the images that were
    classified wrongly, of dtype PREDICTION."""

    pairs: np.ndarray
    """The pairs of label and prediction that occur, of dtype PAIR, sorted."""
    bins: np.ndarray
    """The probabilities of predictions, (BINS,), of dtype BIN."""

    pictured = "Confusions and calibration"
    hint = "The label is first, then the prediction with its probability."

    @functools.cached_property
    def scores(self) -> ByClass:
        return counts_by_class(self.pairs, self.names)

    @functools.cached_property
    def top5(self) -> np.ndarray:
        """``top5_by_class``."""
        return top5_by_class(self.pairs, len(self.names))

    @property
    def mistakes(self) -> np.ndarray:
        """The pairs of a label and another prediction, the most frequent first."""
        wrong = self.pairs[self.pairs["label"] != self.pairs["predicted"]]
        return wrong[np.argsort(-wrong["images"], kind="stable")]

    def name_of(self, predicted: int) -> str:
        """Return the name of a class that was predicted."""
        return "not a number" if predicted == NOT_A_NUMBER else self.names[predicted]

    @property
    def values(self) -> dict[str, Any]:
        """Percentages."""
        scores = self.scores
        columns = zip(
            self.names,
            scores.images.tolist(),
            *(map(percent, each) for each in (scores.precision, scores.recall, scores.f1)),
            map(percent, self.top5),
            scores.predicted.tolist(),
            strict=True,
        )
        keys = "label class support precision recall f1 top5 predicted".split()
        return {
            "balanced_accuracy": percent(scores.balanced_accuracy),
            "macro": {name: percent(value) for name, value in scores.macro._asdict().items()},
            "largest_class": percent(scores.largest_share),
            "calibration": calibration(self.bins),
            "classes": [
                dict(zip(keys, (label, *row), strict=True)) for label, row in enumerate(columns)
            ],
            "confusion": [
                {"class": self.names[label], "predicted": self.name_of(predicted), "images": count}
                for label, predicted, count, _ in self.pairs.tolist()
            ],
            "errors": [
                {
                    "path": self.path_of(error),
                    "label": self.names[error["label"]],
                    "prediction": self.name_of(error["predicted"]),
                    "probability": number(error["probability"]),
                    "label_probability": number(error["label_probability"]),
                }
                for error in self.errors
            ],
        }

    def tables(self) -> Mapping[str, Rows]:
        return {PER_CLASS: _per_class(self), CONFUSION: _confusion(self), ERRORS: _errors(self)}

    def pictures(self) -> Mapping[str, Callable[[Path], None]]:
        return {
            CONFUSION_PICTURE: functools.partial(draw_confusion, self.pairs, self.names),
            RELIABILITY_PICTURE: functools.partial(draw_reliability, self.bins),
        }

    def summary(self, result: Evaluation) -> Mapping[str, str]:
        scores, macro = self.scores, self.scores.macro
        return {
            "accuracy (top-1)": f"{result.top1:.2f} %",
            "top-5": f"{result.top5:.2f} %" if len(self.names) > TOP else "",
            "balanced accuracy": f"{shown(scores.balanced_accuracy)} %",
            "precision, macro average": f"{shown(macro.precision)} %",
            "recall, macro average": f"{shown(macro.recall)} %",
            "F1, macro average": f"{shown(macro.f1)} %",
            "calibration error (ECE)": f"{shown(calibration_error(self.bins))} % in {BINS} bins",
            "cross-entropy": f"{result.loss:.4f}",
            "for comparison: accuracy of always the largest class": (
                f"{shown(scores.largest_share)} %"
            ),
        }

    def page_table(self) -> PageTable:
        _, *rows = _per_class(self)
        note = ""
        if len(rows) > _MOST_CLASSES:
            f1 = np.nan_to_num(self.scores.f1, nan=np.inf)
            rows = [rows[label] for label in f1.argsort(kind="stable")[:_MOST_CLASSES]]
            note = (
                f"The {_MOST_CLASSES} classes with the lowest F1 of {len(self.names):,}: "
                f"{PER_CLASS} has all."
            )
        header = "label|class|support|precision %|recall %|F1 %|top-5 %|predicted"
        header += "|mostly mistaken for|times"
        return PageTable("Classes", header.split("|"), rows, (2, 9), note)

    def caption(self, error: np.void) -> tuple[str, str, str, str]:
        probability = shown(error["probability"]) or "?"
        label, predicted = self.names[error["label"]], self.name_of(error["predicted"])
        return label, "taken for", predicted, f", {probability} %"


def gather_class_report(
    predictions: np.ndarray, backend: Backend, split: Split, names: Sequence[str]
) -> ClassReport | None:
    """Return the report in the first process, None in the others; all must call it.

    ``predictions``: of this process's images (``Accuracy.predictions``); ``names``: by label.
    """
    if not has_own_images(backend):
        predictions = predictions[:0]
    # The sum of an image's probabilities is NaN if a logit is not finite.
    invalid = ~np.isfinite(predictions["probability"])
    predictions["predicted"][invalid] = NOT_A_NUMBER
    errors = predictions[predictions["label"] != predictions["predicted"]]

    pairs = exchange.gather_rows(count_pairs(predictions))
    finite = predictions[~invalid]
    is_right = finite["label"] == finite["predicted"]
    bins = exchange.gather_rows(count_bins(finite["probability"], is_right)[None])
    errors = exchange.gather_rows(errors)
    if not backend.is_main:
        return None
    return ClassReport(names, split, worst_first(errors), count_pairs(pairs), added_bins(bins))


def worst_first(errors: np.ndarray) -> np.ndarray:
    """Return wrong predictions, of dtype PREDICTION, the most probable first: NaN, then by the
    probabilities of prediction and label, then in the order of the images."""
    probability = np.nan_to_num(errors["probability"], nan=np.inf)
    order = np.lexsort((errors["index"], errors["label_probability"], -probability))
    return errors[order]


def _per_class(report: ClassReport) -> Rows:
    scores, mostly = report.scores, dict[int, tuple[str, int]]()
    for label, predicted, images, _ in report.mistakes.tolist():
        mostly.setdefault(label, (report.name_of(predicted), images))
    header = "label class support precision recall f1 top5 predicted mostly_mistaken_for times"
    rows: Rows = [header.split()]
    for label, name in enumerate(report.names):
        figures = (scores.precision, scores.recall, scores.f1, report.top5)
        texts = (shown(each[label]) for each in figures)
        others = (scores.predicted[label], *mostly.get(label, ("", 0)))
        rows.append([label, name, scores.images[label], *texts, *others])
    return rows


def _confusion(report: ClassReport) -> Rows:
    rows: Rows = [["class", "predicted", "images"]]
    for label, predicted, images, _ in report.pairs.tolist():
        rows.append([report.names[label], report.name_of(predicted), images])
    return rows


def _errors(report: ClassReport) -> Rows:
    rows: Rows = [["path", "label", "prediction", "probability", "label_probability"]]
    for error in report.errors:
        probabilities = (f"{error[name]:.6f}" for name in ("probability", "label_probability"))
        names = (report.names[error["label"]], report.name_of(error["predicted"]))
        rows.append([report.path_of(error), *names, *probabilities])
    return rows
