"""The flag of class weights."""

from dataclasses import dataclass
from typing import ClassVar

from config_fields import flag, local_name
from training.objectives.config import CLASSIFIES


@dataclass(frozen=True)
class ClassWeightsConfig:
    """How much the images of each class count in the loss."""

    group: ClassVar[str] = "optimization"
    after: ClassVar[str] = "smoothing"

    class_weights: str | None = flag(
        None,
        "weights of the classes in the training loss, as in PyTorch's cross_entropy; auto: N / (K "
        "n) for a class with n of the N training images, of K classes with images; FILE: CSV with "
        "the columns class (name or number) and weight, which are scaled. Their mean over the "
        "training images is 1, and the loss is divided by the number of images, so it does not "
        "depend on how a batch is divided (docs/unbalanced_classes.md) (default: 1 each)",
        kind=local_name,
        metavar="auto|FILE",
        requires=CLASSIFIES,
    )
