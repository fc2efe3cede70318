"""The flags of what a model is trained for, and of its loss."""

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

from config_fields import (
    bounded,
    count,
    flag,
    fraction,
    global_by_local,
    non_negative,
    path_or_url,
    positive,
    positive_number,
    rate,
)

CLASSIFIES = ("objective=classify",)
"""The condition of flags that need labels, for ``flag``'s ``requires``."""
# Parts of an objective: their defaults do not turn it off.
_mae_flag = functools.partial(flag, requires=("objective=mae",), requires_at_default=True)
_dino_flag = functools.partial(flag, requires=("objective=dino",), requires_at_default=True)


@dataclass(frozen=True)
class ObjectiveConfig:
    """What a model is trained for, and what that adds to it."""

    group: ClassVar[str] = "objective"

    objective: Literal["classify", "mae", "dino"] = flag(
        "classify",
        "what to train for: labels, or without them masked autoencoding (mae) or self-distillation "
        "(dino), see docs/pretraining.md",
        common=True,
    )
    mask_ratio: float = _mae_flag(
        0.75,
        "share of an image's patches that are masked: hidden from the encoder, and reconstructed",
        kind=rate,
    )
    norm_pix_loss: bool = _mae_flag(
        True,
        "reconstruct pixels that are normalized by the mean and deviation of their patch, instead "
        "of the image's own",
    )
    decoder_depth: int = _mae_flag(8, "number of blocks of the decoder", kind=bounded(int, 1, 1000))
    decoder_embed_dim: int = _mae_flag(512, "width of the decoder", kind=bounded(int, 1, 2**20))
    decoder_num_heads: int = _mae_flag(
        16, "number of attention heads of the decoder", kind=positive
    )
    local_crops: int = _dino_flag(
        8,
        "number of local crops of an image, beside two global ones of --image_size",
        kind=bounded(int, 0, 64),
    )
    local_crop_size: int = _dino_flag(
        96,
        "side of a local crop in pixels, a multiple of --patch_size",
        kind=bounded(int, 1, 16384),
    )
    crop_sizes: list[str] | None = flag(
        None,
        "sides of global and local crops in pixels, of which each step has one pair, drawn at "
        "random; one that is given twice is drawn twice as often; the pair of --image_size and "
        "--local_crop_size must be among them (default: that one alone)",
        kind=global_by_local,
        metavar="GxL",
        requires=("objective=dino",),
        incompatible_with=("compile_only", "expect"),
    )
    global_crops_scale: tuple[float, float] = _dino_flag(
        (0.32, 1.0),
        "smallest and largest share of an image's area in a global crop",
        kind=fraction,
        metavar=("MIN", "MAX"),
    )
    local_crops_scale: tuple[float, float] = _dino_flag(
        (0.05, 0.32),
        "smallest and largest share of an image's area in a local crop",
        kind=fraction,
        metavar=("MIN", "MAX"),
    )
    ibot_mask_ratio: tuple[float, float] = _dino_flag(
        (0.1, 0.5),
        "smallest and largest share of the patches that are masked in one of an image's global "
        "crops, drawn for each image",
        kind=fraction,
        metavar=("MIN", "MAX"),
    )
    dino_prototypes: int = _dino_flag(
        65536,
        "number of prototypes that class tokens are compared with",
        kind=bounded(int, 2, 2**24),
    )
    ibot_prototypes: int = _dino_flag(
        65536,
        "number of prototypes that masked patches are compared with",
        kind=bounded(int, 2, 2**24),
    )
    dino_head_hidden: int = _dino_flag(2048, "width inside both heads", kind=bounded(int, 1, 2**20))
    dino_head_bottleneck: int = _dino_flag(
        256, "width of both heads before the prototypes", kind=bounded(int, 1, 2**20)
    )
    student_temp: float = _dino_flag(
        0.1,
        "temperature of the student's probabilities, by which logits are divided",
        kind=positive_number,
    )
    teacher_temp: float = _dino_flag(
        0.07,
        "temperature of the teacher's probabilities after --warmup_teacher_temp_epochs",
        kind=bounded(float, 0.005, 10),
    )
    warmup_teacher_temp: float = _dino_flag(
        0.04,
        "temperature of the teacher's probabilities at the start; it rises linearly",
        kind=bounded(float, 0.005, 10),
    )
    warmup_teacher_temp_epochs: float = _dino_flag(
        30.0,
        "number of epochs from --warmup_teacher_temp to --teacher_temp; 0: the latter from the "
        "start",
        kind=non_negative,
    )
    teacher_momentum: float = _dino_flag(
        0.992,
        "share of itself that the teacher, an average of the student's weights, keeps in a step, "
        "at the start",
        kind=fraction,
    )
    teacher_momentum_end: float = _dino_flag(
        1.0,
        "the same at the last step of --num_epochs, reached along half a cosine; the value of "
        "--teacher_momentum keeps it constant",
        kind=fraction,
    )
    freeze_last_layer_epochs: float = _dino_flag(
        1.0,
        "number of epochs at the start in which the learning rate of the prototypes is 0",
        kind=non_negative,
    )
    ibot_weight: float = _dino_flag(1.0, "weight of the loss of masked patches", kind=non_negative)
    koleo_weight: float = _dino_flag(
        0.1,
        "weight of the KoLeo loss, which spreads the class tokens of different images",
        kind=non_negative,
    )
    koleo_group: int = _dino_flag(
        16,
        "number of consecutive images of a batch among which the KoLeo loss finds nearest "
        "neighbors; must divide the images of a device and pass (default: 16, as DINOv3, or else "
        "the largest smaller number that does)",
        kind=bounded(int, 2, 2**20),
    )
    gram_weights: str | None = flag(
        None,
        "weights of a Gram teacher: a checkpoint of --objective dino (its teacher), a run's "
        "--ckpt_dir, or a file of torch.save or .safetensors with timm's names; the similarities "
        "between the student's patches are then to be those between its patches",
        kind=path_or_url,
        metavar="PATH",
        requires=("objective=dino",),
        incompatible_with=("eval_only", "features", "compile_only"),
    )
    gram_weight: float = flag(
        2.0,
        "weight of the loss of --gram_weights",
        kind=non_negative,
        requires=("gram_weights",),
        requires_at_default=True,
    )
    gram_update_steps: int = flag(
        0,
        "replace the Gram teacher every N steps by the teacher as it is then, the average of the "
        "student's weights; DINOv3: 10000; checkpoints then have the Gram teacher, too; 0: never",
        kind=count,
        requires=("gram_weights",),
    )
    gram_crop_factor: float = flag(
        1.0,
        "height and width of the Gram teacher's crops, which show the same as the global crops, as "
        "a multiple of those; its patch features are resampled to the student's grid; 2: as "
        "DINOv3; 1: it sees the global crops themselves",
        kind=bounded(float, 1, 16),
        requires=("gram_weights",),
    )

    @property
    def uses_labels(self) -> bool:
        """Whether images need labels."""
        return self.objective == "classify"

    @property
    def has_teacher(self) -> bool:
        """Whether a second model is trained as the moving average of the first."""
        return self.objective == "dino"


@dataclass(frozen=True)
class LossConfig:
    """Mixed images, label smoothing, the classifier's loss and distillation, in timm's terms.

    The loss of an evaluation of a classifier is always the cross-entropy.
    """

    group: ClassVar[str] = "optimization"

    smoothing: float = flag(
        0.0,
        "label smoothing: share of each label that is spread over all classes",
        kind=rate,
        requires=CLASSIFIES,
    )
    mixup: float = flag(
        0.0,
        "mixup's alpha: the weights of two mixed images are drawn from Beta(alpha, alpha) for each "
        "batch; 0: off",
        kind=non_negative,
        requires=CLASSIFIES,
    )
    cutmix: float = flag(
        0.0,
        "CutMix's alpha: the area of the box pasted from another image is drawn from Beta(alpha, "
        "alpha); 0: off",
        kind=non_negative,
        requires=CLASSIFIES,
    )
    cutmix_minmax: tuple[float, float] | None = flag(
        None,
        "smallest and largest side of CutMix's box, as shares of the image's side; replaces "
        "--cutmix",
        kind=fraction,
        metavar=("MIN", "MAX"),
        requires=CLASSIFIES,
        replaces=("cutmix",),
    )
    mixup_prob: float = flag(
        1.0,
        "probability that a batch is mixed at all",
        kind=fraction,
        requires=("mixup|cutmix|cutmix_minmax",),
    )
    mixup_switch_prob: float = flag(
        0.5,
        "probability of CutMix rather than mixup, where both are on",
        kind=fraction,
        requires=("mixup", "cutmix|cutmix_minmax"),
    )
    bce_loss: bool = flag(
        False,
        "train with binary cross-entropy, for each class, instead of cross-entropy",
        requires=CLASSIFIES,
    )
    bce_sum: bool = flag(
        False,
        "sum the binary cross-entropy over the classes (default: mean)",
        requires=("bce_loss",),
    )
    bce_target_thresh: float | None = flag(
        None,
        "threshold of binary targets: smoothed and mixed labels above it become 1, others 0 "
        "(default: none, labels stay as they are)",
        kind=bounded(float, 0, 1, open_high=True),
        requires=("bce_loss",),
    )
    teacher: str | None = flag(
        None,
        "distillation: the --model of a trained teacher, whose predictions the student learns too "
        "(--objective dino: instead of those of its own average); it must have the student's image "
        "size and classes, or patches",
        metavar="NAME",
        requires=("teacher_weights", "objective=classify|objective=dino"),
        incompatible_with=("plan", "compile_only"),
    )
    teacher_weights: str | None = flag(
        None,
        "weights of --teacher: a checkpoint (of --objective dino its average), a run's --ckpt_dir, "
        "or a file of torch.save or .safetensors with timm's names; loaded at each start",
        kind=path_or_url,
        metavar="PATH",
        requires=("teacher",),
    )
    distillation_type: Literal["hard", "soft"] = flag(
        "hard",
        "target of distillation; hard: the teacher's most probable class, as a second label; soft: "
        "all its probabilities",
        requires=("teacher", *CLASSIFIES),
        requires_at_default=True,
    )
    distillation_alpha: float = flag(
        0.5,
        "share of the distillation loss in the loss; the labels' loss has the rest",
        kind=fraction,
        requires=("teacher", *CLASSIFIES),
        requires_at_default=True,
    )
    distillation_tau: float = flag(
        1.0,
        "temperature of soft distillation, by which the logits of both are divided",
        kind=positive_number,
        requires=("distillation_type=soft",),
    )

    @property
    def mixes(self) -> bool:
        """Whether images are mixed with each other."""
        return self.mixup > 0 or self.cuts

    @property
    def cuts(self) -> bool:
        """Whether boxes of images are replaced by those of others."""
        return self.cutmix > 0 or self.cutmix_minmax is not None
