"""Distillation: a trained teacher, ``--teacher``, whose predictions are an additional target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.config import RunConfig
from training.feature import Feature, SmallSizes
from training.objectives.distillation_config import DistillationConfig

if TYPE_CHECKING:
    from data.source import DataSource
    from models.spec import ModelSpec
    from training.resolve import Run


class Distillation(Feature):
    """What a teacher excludes, its classes, and its FLOPs (``Teacher`` in
    ``training/objectives/``)."""

    flags = DistillationConfig
    turned_on_by = ("--teacher",)
    excludes = {
        "--mesh_domain": "",
        **dict.fromkeys(("--compile_only", "--plan"), "it reads no weights"),
    }

    def shown(self, config: RunConfig) -> str:
        return "--teacher"

    def check_data(self, run: Run, data: DataSource) -> None:
        from training.checkpoints.compatible import check_same_classes
        from training.teachers import weights_of_teacher
        from training.weights.describe import describe

        path = run.config.of(DistillationConfig).teacher_weights
        if run.teacher and path and data.classes:
            weights = weights_of_teacher(path, "--teacher_weights")
            names = describe(weights).classes_among(data.classes)
            check_same_classes(names, weights.path, data, run)

    def train_flops(self, run: Run, model: ModelSpec, flops: float) -> float:
        """Without those of the model's average, which the teacher replaces as the teacher."""
        if not run.teacher:
            return flops
        return flops - sum(each.train_flops for each in model.runs if not each.learns)

    def shrink(self, config: RunConfig, small: SmallSizes) -> RunConfig:
        return config.with_flags(DistillationConfig())
