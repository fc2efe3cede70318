"""The report of ``--eval_report`` on several labels an image (``--multi_label``).

A label counts as predicted if its probability is at least ``THRESHOLD``. Each process counts the
labels of the images on its devices; the first one adds the counts up, and gets the mistakes of all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.source import Split
from training.backend import Backend
from training.evaluation.class_figures import draw_reliability
from training.evaluation.class_scores import added_bins, calibration_error, count_bins
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
from training.objectives.multi_label import (
    LabelEvaluation,
    LabelRanking,
    MultiLabelClassification,
    defined_mean,
)
from training.processes import exchange

PER_LABEL = "per_label.csv"
THRESHOLD = 0.5

LABEL_ERROR = np.dtype(
    [("index", np.int32), ("label", np.int32), ("has", np.uint8), ("probability", np.float32)]
)
"""A label of an image that was predicted wrongly: the number of the image in its split, the label,
whether the image has it, and its probability, NaN if the logit is not finite."""


@dataclass(frozen=True)
class LabelReport(Report):
    """Which labels the images of a validation split were predicted to have. ``errors`` are of dtype
    LABEL_ERROR."""

    scores: ByClass
    """The images that have each label, those of them that were predicted to have it, and all that
    were."""
    bins: np.ndarray
    """The probabilities of each label, (labels, BINS), of dtype BIN."""
    ranking: LabelEvaluation
    """Average precision and ROC AUC."""

    mistake = ("label", "predicted wrongly")
    hint = "Each is a label of an image, with its probability."

    @property
    def title(self) -> str:
        return f"report on {len(self.names):,} labels"

    @functools.cached_property
    def calibration_errors(self) -> list[float]:
        """The calibration error of each label's probability."""
        return [calibration_error(bins) for bins in self.bins]

    @property
    def values(self) -> dict[str, Any]:
        """Percentages; average precision and ROC AUC are from 0 to 1."""
        scores = self.scores
        figures = {
            "precision": map(percent, scores.precision),
            "recall": map(percent, scores.recall),
            "f1": map(percent, scores.f1),
            "predicted": scores.predicted.tolist(),
            "ece": map(percent, self.calibration_errors),
        }
        rows = [dict(zip(figures, row, strict=True)) for row in zip(*figures.values(), strict=True)]
        ranked = self.ranking.figures_by_label(self.names)
        return {
            "micro": {name: percent(value) for name, value in scores.micro._asdict().items()},
            "macro": {name: percent(value) for name, value in scores.macro._asdict().items()},
            "calibration": calibration(added_bins(self.bins)),
            "by_class": [one | other for one, other in zip(ranked, rows, strict=True)],
            "errors": [
                {
                    "path": self.path_of(error),
                    "label": self.names[error["label"]],
                    "truth": int(error["has"]),
                    "probability": number(error["probability"]),
                }
                for error in self.errors
            ],
        }

    def tables(self) -> Mapping[str, Rows]:
        return {PER_LABEL: self._per_label(), ERRORS: self._errors()}

    def _per_label(self) -> Rows:
        scores, ranking = self.scores, self.ranking
        header = "label support predicted precision recall f1 average_precision roc_auc ece"
        in_percent = (scores.precision, scores.recall, scores.f1)
        rows: Rows = [header.split()]
        for label, name in enumerate(self.names):
            ranked = (ranking.average_precision[label], ranking.roc_auc[label])
            rows.append([
                name,
                scores.images[label],
                scores.predicted[label],
                *(shown(each[label]) for each in in_percent),
                *("" if number(value) is None else f"{value:.4f}" for value in ranked),
                shown(self.calibration_errors[label]),
            ])  # fmt: skip
        return rows

    def _errors(self) -> Rows:
        rows: Rows = [["path", "label", "truth", "probability"]]
        for error in self.errors:
            name, probability = self.names[error["label"]], f"{error['probability']:.6f}"
            rows.append([self.path_of(error), name, error["has"], probability])
        return rows

    def pictures(self) -> Mapping[str, Callable[[Path], None]]:
        draw = functools.partial(draw_reliability, added_bins(self.bins), of_labels=True)
        return {RELIABILITY_PICTURE: draw}

    def summary(self, result: Evaluation) -> Mapping[str, str]:
        ranking, scores = self.ranking, self.scores
        averages = {
            f"{title}, {kind} average": f"{shown(getattr(of_kind, name))} %"
            for kind, of_kind in (("micro", scores.micro), ("macro", scores.macro))
            for title, name in (("precision", "precision"), ("recall", "recall"), ("F1", "f1"))
        }
        return {
            "mean average precision": f"{defined_mean(ranking.average_precision):.4f}",
            "mean ROC AUC": f"{defined_mean(ranking.roc_auc):.4f}",
            **averages,
            "calibration error (ECE), mean of the labels": (
                f"{shown(defined_mean(self.calibration_errors))} %"
            ),
            "binary cross-entropy": f"{result.loss:.4f}",
        }

    def page_table(self) -> PageTable:
        header = "label|support|predicted|precision %|recall %|F1 %|average precision|ROC AUC|ECE %"
        _, *rows = self._per_label()
        note = f"A label counts as predicted if its probability is at least {THRESHOLD:g}."
        return PageTable("Labels", header.split("|"), rows, (1,), note)

    def caption(self, error: np.void) -> tuple[str, str, str, str]:
        has = "present" if error["has"] else "absent"
        probability = f"{shown(error['probability']) or '?'} %"
        return self.names[error["label"]], f"is {has}, predicted with", probability, ""


def gather_label_report(
    measure: LabelRanking,
    ranking: LabelEvaluation,
    backend: Backend,
    split: Split,
    names: Sequence[str],
) -> LabelReport | None:
    """Return the report in the first process, None in the others; all must call it.

    ``ranking``: the result of ``measure``; ``names``: by label.
    """
    index, logits, has = measure.predictions()
    if not has_own_images(backend):
        index, logits, has = index[:0], logits[:0], has[:0]
    probability = MultiLabelClassification.probabilities(torch.from_numpy(logits)).numpy()
    is_number = np.isfinite(probability)
    predicted = probability >= THRESHOLD
    counts = np.stack([has.sum(axis=0), (has & predicted).sum(axis=0), predicted.sum(axis=0)])
    counts = exchange.gather_rows(counts[None].astype(np.int64))
    columns = zip(probability.T, has.T > 0, is_number.T, strict=True)
    bins = np.stack([count_bins(of[known], is_had[known]) for of, is_had, known in columns])
    bins = exchange.gather_rows(bins[None])
    image, label = np.nonzero((predicted != has) | ~is_number)
    fields = [index[image], label, has[image, label], probability[image, label]]
    errors = exchange.gather_rows(np.rec.fromarrays(fields, LABEL_ERROR))
    if not backend.is_main:
        return None
    images, right, total = counts.sum(axis=0)
    scores = ByClass(images, right, total, names)
    return LabelReport(names, split, worst_first(errors), scores, added_bins(bins), ranking)


def worst_first(errors: np.ndarray) -> np.ndarray:
    """Return wrong predictions, of dtype LABEL_ERROR, the farthest from the truth first: NaN, then
    by distance, then in the order of the images and the labels."""
    distance = np.nan_to_num(np.abs(errors["has"] - errors["probability"]), nan=np.inf)
    return errors[np.lexsort((errors["label"], errors["index"], -distance))]
