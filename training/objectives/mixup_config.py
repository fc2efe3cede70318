"""The flags of mixup and CutMix."""

from dataclasses import dataclass
from typing import ClassVar

from config_fields import flag, fraction, non_negative
from training.objectives.config import CLASSIFIES


@dataclass(frozen=True)
class MixupConfig:
    """How images are mixed with each other, in timm's terms."""

    group: ClassVar[str] = "optimization"
    after: ClassVar[str] = "smoothing"

    mixup: float = flag(
        0.0,
        "alpha of mixup: the mixing weight is drawn from Beta(alpha, alpha) for each batch; 0: off",
        kind=non_negative,
        requires=CLASSIFIES,
    )
    cutmix: float = flag(
        0.0,
        "alpha of CutMix: the relative area of the box pasted from another image is drawn from "
        "Beta(alpha, alpha); 0: off",
        kind=non_negative,
        requires=CLASSIFIES,
    )
    cutmix_minmax: tuple[float, float] | None = flag(
        None,
        "range of the side of the CutMix box, as a fraction of the side of the image; instead of "
        "--cutmix",
        kind=fraction,
        metavar=("MIN", "MAX"),
        requires=CLASSIFIES,
        replaces=("cutmix",),
    )
    mixup_prob: float = flag(
        1.0,
        "probability of applying mixup or CutMix to a batch",
        kind=fraction,
        requires=("mixup|cutmix|cutmix_minmax",),
    )
    mixup_switch_prob: float = flag(
        0.5,
        "probability of CutMix rather than mixup if both are on",
        kind=fraction,
        requires=("mixup", "cutmix|cutmix_minmax"),
    )

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with each other."""
        return self.mixup > 0 or self.cuts

    @property
    def cuts(self) -> bool:
        """Whether boxes of images are replaced by those of others."""
        return self.cutmix > 0 or self.cutmix_minmax is not None
