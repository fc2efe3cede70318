"""The table of features, the optional parts of the program.

Everything below ``features/`` knows them by this table alone. ``training/feature.py`` says what a
feature may do. Imports nothing heavy; features are imported when the table is first read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Self, TypeVar

Flags = TypeVar("Flags")

FEATURES = (
    "features.native_resolution.feature:NativeResolution",
    "features.mae.feature:Mae",
    "features.image_text.feature:ImageText",
    "features.image_text.evaluation:PairUse",
    "features.image_text.evaluation:ZeroShot",
    "features.image_text.evaluation:EmbeddingFeatures",
    "features.dino.feature:Dino",
    "features.dino.feature:CropSizes",
    "features.dino.feature:GramTeacher",
    "features.table_split:SavedSplit",
    "features.multi_label:MultiLabel",
    "features.mixup:Mixup",
    "features.distillation:Distillation",
    "features.image_sizes.feature:Buckets",
    "features.image_sizes.feature:ImageSizeSchedule",
    "features.feature_evaluation:FeatureEvaluation",
    "features.feature_evaluation:SegmentProbe",
    "features.linear_probe:LinearProbe",
    "features.save_bad_step:SaveBadStep",
    "features.weight_average:ModelEma",
    "features.unbalanced_classes:ClassSizes",
    "features.unbalanced_classes:BestByClass",
    "features.unbalanced_classes:ClassWeights",
    "features.unbalanced_classes:LogitAdjustment",
    "features.unbalanced_classes:BalancedSampling",
    "features.intensity:IntensityWords",
    "features.intensity:Bands",
)
"""Module and class of each feature, in the order in which features are asked, and in which their
flags follow each other in ``--help``."""

_added: list[Any] = []


def set_added_features(added: Sequence[Any]) -> None:
    """Add features, subclasses of ``Feature``, to the table, in place of those added before. Called
    in every process before flags are parsed."""
    if _added != added:
        _added[:] = added
        features.cache_clear()


@functools.cache
def features() -> tuple[Any, ...]:
    """Return all features: an instance of each class of the table."""
    entries = (entry.partition(":") for entry in FEATURES)
    shipped = [getattr(import_module(module), name) for module, _, name in entries]
    return tuple(feature() for feature in (*shipped, *_added))


def objective_feature(name: str) -> Any | None:
    """Return the feature that adds this word to ``--objective``; None for the core's own."""
    named = (each for each in features() if name in each.choices.get("objective", ()))
    return next(named, None)


def arranged_objectives() -> list[str]:
    """Return the choices of ``--objective`` that can be trained with images in the arrangements of
    features (``Feature.arranged``)."""
    taking = (feature for feature in features() if feature.takes_arranged)
    added = [word for feature in taking for word in feature.choices["objective"]]
    return ["classify", *added]


def added_parameters() -> tuple[str, ...]:
    """Return the prefixes of the names of parameters that features add to a model."""
    return tuple(prefix for feature in features() for prefix in feature.parameters)


class FeatureFlags(tuple[Any, ...]):
    """The values of all features' flags: an instance of each one's dataclass."""

    @classmethod
    def defaults(cls) -> Self:
        return cls(flags() for flags in flag_classes())

    def of(self, flags: type[Flags]) -> Flags:
        """Return the instance of this dataclass."""
        return next(each for each in self if type(each) is flags)


def flag_classes() -> list[type]:
    """Return the dataclasses of features' flags (``Feature.model_flags`` and ``flags``)."""
    declared = [(feature.model_flags, feature.flags) for feature in features()]
    return [flags for of_feature in declared for flags in of_feature if flags]
