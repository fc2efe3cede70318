"""The flags of what classes of different sizes change in the loss."""

from dataclasses import dataclass
from typing import ClassVar

from config_fields import flag, local_name, positive_number
from training.objectives.config import CLASSIFIES


@dataclass(frozen=True)
class ClassWeightsConfig:
    """How the loss makes up for the sizes of the classes."""

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
    logit_adjustment: float | None = flag(
        None,
        "in the training loss, add TAU times the logarithm of a class's share of the training "
        "images to its logit, so that without it rare classes are predicted more often (arXiv "
        "2007.07314); 1 makes up for the sizes; evaluations and predictions use the plain logits "
        "(docs/unbalanced_classes.md) (default: 0)",
        kind=positive_number,
        metavar="TAU",
        requires=CLASSIFIES,
    )

    @property
    def in_loss(self) -> bool:
        """Whether the loss differs from class to class."""
        return self.class_weights is not None or self.logit_adjustment is not None
