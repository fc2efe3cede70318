"""What evaluations and other uses of models of images and texts ask of the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from features.image_text.config import (
    OBJECTIVES,
    TextEvaluationConfig,
    TextsConfig,
)
from training.config import RunConfig
from training.errors import UsageError
from training.feature import Feature

if TYPE_CHECKING:
    from torch import Tensor

    from data.source import DataSource, Split, View
    from features.image_text.zero_shot import ZeroShotData
    from models.spec import ModelSpec
    from training.evaluation.predict import Evaluated, Predictor
    from training.evaluation.report import Report
    from training.loop import Hook, Training
    from training.objectives.base import Measure
    from training.resolve import Run

IMAGE_EMBEDDING, TEXT_EMBEDDING = "image_embedding", "text_embedding"
"""Kinds of ``--features_of``."""


class PairUse(Feature):
    """``--texts`` of ``--predict``, and the reports of evaluations of pairs."""

    flags = TextsConfig
    turned_on_by = tuple(f"--objective {name}" for name in OBJECTIVES)
    requires_it = ("--texts",)
    percentages = {
        "val_image_to_text_r1": "recall@1, image to text",
        "val_text_to_image_r1": "recall@1, text to image",
        "val_image_to_text_r5": "recall@5, image to text",
        "val_text_to_image_r5": "recall@5, text to image",
    }

    def predictor(self, run: Run) -> Predictor:
        from features.image_text.predict import predictor_of

        texts = run.config.of(TextsConfig).texts
        if texts is None:
            raise UsageError(
                f"--predict with a model of --objective {run.config.objective.objective} requires "
                "--texts, which images are compared with"
            )
        return predictor_of(run, texts)

    def report(self, measure: Measure, split: Split) -> Report | None:
        from features.image_text.measures import PairRetrieval
        from features.image_text.report import gather_report

        return gather_report(measure, split) if isinstance(measure, PairRetrieval) else None

    def evaluations(self, training: Training) -> Sequence[Hook]:
        from features.image_text.objective import ImageTextPairs
        from features.image_text.report import PairPictures

        val, objective = training.data.splits.get("val"), training.objective
        assert isinstance(objective, ImageTextPairs)
        return [PairPictures(training.session, objective, val)] if val else []


class ZeroShot(Feature):
    """``--zero_shot``: classification by the names of classes."""

    flags = TextEvaluationConfig
    turned_on_by = ("--zero_shot",)
    percentages = {"val_zero_shot_top1": "zero-shot, top-1"}

    def check_data(self, run: Run, data: DataSource) -> ZeroShotData:
        from features.image_text.zero_shot import open_zero_shot

        return open_zero_shot(run)

    def evaluations(self, training: Training) -> Sequence[Hook]:
        from features.image_text.zero_shot import zero_shot_evaluations

        return [zero_shot_evaluations(training, training.opened[type(self)])]

    def evaluated(self, run: Run) -> Evaluated:
        from features.image_text.zero_shot import evaluated

        return evaluated(run)


class EmbeddingFeatures(Feature):
    """Embeddings that ``--features`` writes."""

    choices = {
        "features_of": {
            IMAGE_EMBEDDING: "of a model of images and texts, what texts are compared with",
            TEXT_EMBEDDING: "what images are compared with, of the text of each image",
        }
    }
    turned_on_by = tuple(f"--features_of {kind}" for kind in (IMAGE_EMBEDDING, TEXT_EMBEDDING))

    def resolve_model(self, config: RunConfig, model: ModelSpec) -> RunConfig:
        if config.objective.objective not in OBJECTIVES:
            raise UsageError(
                f"{self.shown(config)} requires a model of --objective siglip or clip, not "
                f"{config.objective.objective}"
            )
        return config

    def view(self, run: Run, *, augment: bool) -> View | None:
        from features.image_text.embedded_view import EmbeddedImageView, EmbeddedPairView

        is_pair = TEXT_EMBEDDING in (run.config.use.features_of or ())
        return EmbeddedPairView.of(run) if is_pair else EmbeddedImageView()

    def output_features(self, output: Any) -> Mapping[str, Tensor]:
        from features.image_text.model import Embedded

        embedded = Embedded(*output)
        found = {IMAGE_EMBEDDING: embedded.images, TEXT_EMBEDDING: embedded.texts}
        return {kind: values for kind, values in found.items() if values is not None}
