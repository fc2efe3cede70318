"""Classification of images with several labels: average precision and ROC AUC of each label.

The loss is the binary cross-entropy. An evaluation needs the logits of all images at once, label by
label: each process keeps those of its images, and at the end receives those of its share of labels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from data.batch import PADDING, Batch
from training.backend import Backend
from training.logs.records import Evaluation
from training.objectives.base import OF_IMAGES, Measure
from training.objectives.classify import Classification
from training.processes import exchange


class MultiLabelClassification(Classification):
    """Trains the model to predict which labels an image has."""

    @staticmethod
    def probabilities(logits: torch.Tensor) -> torch.Tensor:
        return logits.float().sigmoid()

    def measure(self, images: int = 0) -> Measure:
        return LabelRanking(self._input, self._backend)


# -- formulas ------------------------------------------------------------------------------------


def average_precision_and_auc(scores: np.ndarray, has_label: np.ndarray) -> tuple[float, float]:
    """Return the average precision and the area under the ROC curve of one label, both 0 to 1, as
    scikit-learn's ``average_precision_score`` and ``roc_auc_score``.

    scores: (images,), higher for images that have the label; equal scores are one threshold.
    has_label: (images,), 0 or 1. NaN stands for what is undefined: the average precision if no
    image has the label, the area also if all have it, both if a score is NaN.
    """
    images, positives = len(scores), int(has_label.sum())
    if not positives or np.isnan(scores).any():
        return np.nan, np.nan
    order = np.argsort(scores)[::-1]
    scores, has_label = scores[order], has_label[order]
    is_last = np.append(scores[1:] != scores[:-1], True)  # of the images with equal scores
    seen = np.flatnonzero(is_last) + 1
    found = np.cumsum(has_label, dtype=np.int64)[is_last]
    more, wrong = np.diff(found, prepend=0), np.diff(seen - found, prepend=0)
    precision = float((more / positives * (found / seen)).sum())
    if positives == images:
        return precision, np.nan
    # Each image without the label adds the images with it that are above; equal ones count half.
    return precision, float((wrong * (found - more / 2)).sum() / positives / (images - positives))


# -- an evaluation -------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelEvaluation(Evaluation):
    """An evaluation by label; the loss is the binary cross-entropy per label."""

    average_precision: tuple[float, ...] = ()
    """By label, 0 to 1; NaN if no image has it."""
    roc_auc: tuple[float, ...] = ()
    """By label, 0 to 1; NaN if no image has it, or all have it."""
    positives: tuple[int, ...] = ()
    """The number of images by label."""

    @property
    def values(self) -> dict[str, float]:
        means = {
            "val_map": defined_mean(self.average_precision),
            "val_roc_auc": defined_mean(self.roc_auc),
        }
        defined = {name: value for name, value in means.items() if np.isfinite(value)}
        return super().values | defined

    @property
    def quality(self) -> str:
        return (
            f"mean average precision {defined_mean(self.average_precision):.4f}, mean ROC AUC "
            f"{defined_mean(self.roc_auc):.4f}"
        )

    def figures_by_label(self, names: Sequence[str]) -> list[dict[str, Any]]:
        rows = zip(names, self.positives, self.average_precision, self.roc_auc, strict=True)
        return [
            {"label": name, "images": images}
            | {
                figure: round(value, 6) if np.isfinite(value) else None
                for figure, value in (("average_precision", precision), ("roc_auc", auc))
            }
            for name, images, precision, auc in rows
        ]

    def __str__(self) -> str:
        defined = np.isfinite(self.average_precision).sum()
        absent = len(self.average_precision) - defined
        without = f", {absent} without images" if absent else ""
        return f"{super().__str__()}, {self.quality} of {defined} labels{without}"


def defined_mean(values: Sequence[float]) -> float:
    """Return the mean of those that are defined; NaN if none is."""
    defined = [value for value in values if np.isfinite(value)]
    return float(np.mean(defined)) if defined else np.nan


class LabelRanking(Measure):
    """Sums the loss, and collects the logits of this process's images."""

    def __init__(self, model_input: Callable[[Batch], Any], backend: Backend) -> None:
        self._input, self._backend = model_input, backend
        self._totals = np.zeros(2)  # loss, images
        self._parts: list[dict[str, np.ndarray]] = []

    def of_batch(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        logits, target = model(self._input(batch)).float(), batch["target"]
        present = target[:, 0] != PADDING
        losses = F.binary_cross_entropy_with_logits(logits, target.float(), reduction="none")
        loss = torch.where(present, losses.mean(dim=-1), 0.0).sum()
        totals = self._backend.sum(torch.stack([loss, present.sum().float()]))
        of_images = {"index": batch["index"], "logits": logits, "target": target}
        return {"totals": totals, OF_IMAGES: of_images}

    def add(self, values: Mapping[str, Any]) -> None:
        self._totals += values["totals"]
        part = values[OF_IMAGES]
        self._parts.append(part | {"target": part["target"].astype(np.uint8)})

    def predictions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what was predicted for this process's images: their numbers, (images,),
        the logits, (images, labels) fp32, and which labels they have, (images, labels) uint8."""
        index, logits, target = (
            np.concatenate([part[name] for part in self._parts])
            for name in ("index", "logits", "target")
        )
        return index, logits, target

    def result(self) -> LabelEvaluation:
        """Return the figures of all labels; all processes must call this."""
        index, logits, target = self.predictions()
        labels = logits.shape[1]
        mine: list[tuple[int, float, float, int]] = []  # label, its figures, its images
        for owner, share in enumerate(np.array_split(np.arange(labels), exchange.count())):
            if not len(share):
                continue
            gathered = [
                exchange.gather_rows(values, owner)
                for values in (index, logits[:, share], target[:, share])
            ]
            if owner != exchange.rank():
                continue
            numbers, scores, has_label = gathered
            # Processes that share images, each with other rows, have the same.
            _, first = np.unique(numbers, return_index=True)
            for column, label in enumerate(share.tolist()):
                has = has_label[first, column]
                figures = average_precision_and_auc(scores[first, column], has)
                mine.append((label, *figures, int(has.sum())))
        by_label = sorted(itertools.chain(*exchange.all_gather_object(mine)))
        _, precision, auc, positives = zip(*by_label, strict=True)
        loss, images = self._totals.tolist()
        return LabelEvaluation(
            loss / (images or float("nan")),
            images=int(images),
            average_precision=precision,
            roc_auc=auc,
            positives=positives,
        )
