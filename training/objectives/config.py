"""The flags of what a model is trained for, and of a classifier's loss."""

from dataclasses import dataclass
from typing import ClassVar

from config_fields import bounded, flag, rate
from training.feature_table import features, objective_feature

CLASSIFIES = ("objective=classify",)
"""The condition of flags that need labels, for ``flag``'s ``requires``."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """What a model is trained for."""

    group: ClassVar[str] = "objective"

    objective: str = flag(
        "classify",
        "training objective; classify: supervised by labels",
        choices=("classify",),
        common=True,
    )

    @property
    def uses_labels(self) -> bool:
        """Whether images need labels."""
        feature = objective_feature(self.objective)
        return feature is None or feature.uses_labels

    @property
    def has_teacher(self) -> bool:
        """Whether a second model is trained as the moving average of the first."""
        feature = objective_feature(self.objective)
        return feature is not None and feature.has_teacher


@dataclass(frozen=True)
class LossConfig:
    """Label smoothing and the classifier's loss, in timm's terms.

    The loss of an evaluation of a classifier is always the cross-entropy.
    """

    group: ClassVar[str] = "optimization"

    smoothing: float = flag(
        0.0,
        "label smoothing: fraction of each label that is spread over all classes",
        kind=rate,
        requires=CLASSIFIES,
    )
    bce_loss: bool = flag(
        False,
        "train with binary cross-entropy per class instead of cross-entropy",
        requires=CLASSIFIES,
    )
    bce_sum: bool = flag(
        False,
        "sum the binary cross-entropy over the classes (default: mean)",
        requires=("bce_loss",),
    )
    bce_target_thresh: float | None = flag(
        None,
        "binarize the targets of --bce_loss: smoothed and mixed labels above this threshold "
        "become 1, others 0 (default: none, targets are not binarized)",
        kind=bounded(float, 0, 1, open_high=True),
        requires=("bce_loss",),
    )


def flags_of_weights() -> tuple[type, ...]:
    """Return the dataclasses of what a model is trained for, without which its weights are useless:
    its objective's, and those of features (``Feature.saved_with_weights``)."""
    return (ObjectiveConfig, *(each.flags for each in features() if each.saved_with_weights))
