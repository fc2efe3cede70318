"""Says how images and labels of a batch are mixed, and which loss is made less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from config_fields import bounded, flag, fraction, non_negative, positive_number, rate
from training.errors import UsageError

_MIXES = "mixup|cutmix|cutmix_minmax"


@dataclass(frozen=True)
class LossConfig:
    """Says what a training step is shown of a batch and what it makes less, in timm's terms.

    The loss of an evaluation is the cross-entropy, whatever is set here.
    """

    group: ClassVar[str] = "optimization"

    smoothing: float = flag(
        0.0, "label smoothing: this share of each label is spread over all classes", kind=rate
    )
    mixup: float = flag(
        0.0,
        "alpha of mixup: shares of two images are drawn from Beta(alpha, alpha), anew for each "
        "batch; 0: off",
        kind=non_negative,
    )
    cutmix: float = flag(
        0.0,
        "alpha of cutmix: the area of the box that is taken from another image, drawn so; 0: off",
        kind=non_negative,
    )
    cutmix_minmax: tuple[float, float] | None = flag(
        None,
        "smallest and largest side of that box, as shares of the image's; in the place of --cutmix "
        "(default: none)",
        kind=fraction,
        metavar=("MIN", "MAX"),
        instead_of=("cutmix",),
    )
    mixup_prob: float = flag(
        1.0, "probability that a batch is mixed at all", kind=fraction, needs=(_MIXES,)
    )
    mixup_switch_prob: float = flag(
        0.5,
        "probability of cutmix where both are on",
        kind=fraction,
        needs=("mixup", "cutmix|cutmix_minmax"),
    )
    bce_loss: bool = flag(
        False, "binary cross-entropy, each class for itself, in the place of cross-entropy"
    )
    bce_sum: bool = flag(
        False, "sum it over the classes (default: their mean)", needs=("bce_loss",)
    )
    bce_target_thresh: float | None = flag(
        None,
        "labels above it, smoothed and mixed, are 1, others 0 (default: they stay)",
        kind=bounded(float, 0, 1, open_high=True),
        metavar="X",
        needs=("bce_loss",),
    )
    teacher: str | None = flag(
        None,
        "distillation: a trained --model, made for the student's images and classes, whose answers "
        "to the same images the student is to give, too (default: none)",
        metavar="NAME",
        needs=("teacher_weights",),
        conflicts=("plan", "compile_only"),
    )
    teacher_weights: str | None = flag(
        None,
        "the teacher's: a checkpoint, a run's --ckpt_dir, or a file of torch.save or .safetensors "
        "with timm's names; read again at each start (default: none)",
        metavar="PATH",
        needs=("teacher",),
    )
    distillation_type: Literal["hard", "soft"] = flag(
        "hard",
        "hard: the teacher's likeliest class is a second label; soft: all its probabilities",
        needs=("teacher",),
    )
    distillation_alpha: float = flag(
        0.5,
        "share of the teacher's part in the loss; the labels' has the rest",
        kind=fraction,
        needs=("teacher",),
    )
    distillation_tau: float = flag(
        1.0,
        "temperature: logits of both are divided by it",
        kind=positive_number,
        needs=("distillation_type=soft",),
    )

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with each other."""
        return self.mixup > 0 or self.cuts

    @property
    def cuts(self) -> bool:
        """Whether boxes of images are cut out for others."""
        return self.cutmix > 0 or self.cutmix_minmax is not None


def check_mixing(config: LossConfig, images: int, shape: Sequence[int]) -> None:
    """Raise UsageError if ``images`` images of one pass and device cannot be mixed.

    ``shape``: (channels, *spatial) of one.
    """
    if not config.mixes:
        return
    named = "--mixup" if config.mixup else "--cutmix" if config.cutmix else "--cutmix_minmax"
    if images % 2:
        raise UsageError(
            f"{named} mixes the images of a device two by two, and there are {images} in a pass: "
            "choose --batch_size and --grad_accum_steps so that the number is even"
        )
    if config.cuts and len(shape) != 3:
        raise UsageError("cutmix is for images: of volumes use --mixup")
    if config.cutmix_minmax is not None:
        low, high = config.cutmix_minmax
        if any(int(side * low) >= int(side * high) for side in shape[1:]):
            raise UsageError(
                f"--cutmix_minmax {low:g} {high:g} leaves no side of a box to be drawn in images "
                f"of {shape[1]} x {shape[2]}: the second must be larger"
            )
