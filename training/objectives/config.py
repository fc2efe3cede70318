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
        "training objective; classify: supervised by labels; mae: masked autoencoding; dino: "
        "self-distillation (docs/pretraining.md)",
        common=True,
    )
    mask_ratio: float = _mae_flag(
        0.75,
        "fraction of the patches of an image that are hidden from the encoder and reconstructed",
        kind=rate,
    )
    norm_pix_loss: bool = _mae_flag(
        True,
        "reconstruct pixels normalized by the mean and standard deviation of their patch, instead "
        "of the image's pixels",
    )
    decoder_depth: int = _mae_flag(8, "number of blocks of the decoder", kind=bounded(int, 1, 1000))
    decoder_embed_dim: int = _mae_flag(512, "width of the decoder", kind=bounded(int, 1, 2**20))
    decoder_num_heads: int = _mae_flag(
        16, "number of attention heads of the decoder", kind=positive
    )
    local_crops: int = _dino_flag(
        8,
        "number of local crops per image, in addition to two global crops of --image_size",
        kind=bounded(int, 0, 64),
    )
    local_crop_size: int = _dino_flag(
        96,
        "side of a local crop in pixels, a multiple of --patch_size",
        kind=bounded(int, 1, 16384),
    )
    crop_sizes: list[str] | None = flag(
        None,
        "sides of global and local crops in pixels; each step samples one pair; repeat a pair to "
        "sample it more often; --image_size with --local_crop_size must be one of the pairs "
        "(default: only that pair)",
        kind=global_by_local,
        metavar="GxL",
        requires=("objective=dino",),
        incompatible_with=("compile_only", "expect"),
    )
    global_crops_scale: tuple[float, float] = _dino_flag(
        (0.32, 1.0),
        "range of the area of a global crop, as a fraction of the image",
        kind=fraction,
        metavar=("MIN", "MAX"),
    )
    local_crops_scale: tuple[float, float] = _dino_flag(
        (0.05, 0.32),
        "range of the area of a local crop, as a fraction of the image",
        kind=fraction,
        metavar=("MIN", "MAX"),
    )
    ibot_mask_ratio: tuple[float, float] = _dino_flag(
        (0.1, 0.5),
        "range of the fraction of patches that are masked in one of the two global crops of an "
        "image, sampled per image",
        kind=fraction,
        metavar=("MIN", "MAX"),
    )
    dino_prototypes: int = _dino_flag(
        65536,
        "number of prototypes of the DINO head, for class tokens",
        kind=bounded(int, 2, 2**24),
    )
    ibot_prototypes: int = _dino_flag(
        65536,
        "number of prototypes of the iBOT head, for masked patches",
        kind=bounded(int, 2, 2**24),
    )
    dino_head_hidden: int = _dino_flag(
        2048, "hidden width of both heads", kind=bounded(int, 1, 2**20)
    )
    dino_head_bottleneck: int = _dino_flag(
        256, "bottleneck width of both heads, before the prototypes", kind=bounded(int, 1, 2**20)
    )
    student_temp: float = _dino_flag(
        0.1,
        "softmax temperature of the student",
        kind=positive_number,
    )
    teacher_temp: float = _dino_flag(
        0.07,
        "softmax temperature of the teacher after --warmup_teacher_temp_epochs",
        kind=bounded(float, 0.005, 10),
    )
    warmup_teacher_temp: float = _dino_flag(
        0.04,
        "softmax temperature of the teacher at the start; increases linearly to --teacher_temp",
        kind=bounded(float, 0.005, 10),
    )
    warmup_teacher_temp_epochs: float = _dino_flag(
        30.0,
        "number of epochs over which the teacher's temperature goes from --warmup_teacher_temp to "
        "--teacher_temp; 0: --teacher_temp from the start",
        kind=non_negative,
    )
    teacher_momentum: float = _dino_flag(
        0.992,
        "EMA momentum of the teacher at the start: the fraction of its weights that the teacher "
        "keeps at each step",
        kind=fraction,
    )
    teacher_momentum_end: float = _dino_flag(
        1.0,
        "EMA momentum of the teacher at the last step of --num_epochs; follows a cosine from "
        "--teacher_momentum",
        kind=fraction,
    )
    freeze_last_layer_epochs: float = _dino_flag(
        1.0,
        "keep the learning rate of the prototypes at 0 for the first X epochs",
        kind=non_negative,
    )
    ibot_weight: float = _dino_flag(
        1.0, "weight of the iBOT loss of masked patches", kind=non_negative
    )
    koleo_weight: float = _dino_flag(
        0.1,
        "weight of the KoLeo loss, which spreads the class tokens of different images apart",
        kind=non_negative,
    )
    koleo_group: int = _dino_flag(
        16,
        "number of consecutive images of a batch among which the KoLeo loss searches for nearest "
        "neighbors; must divide the number of images per device and pass (default: 16, as in "
        "DINOv3, or the next smaller divisor)",
        kind=bounded(int, 2, 2**20),
    )
    gram_weights: str | None = flag(
        None,
        "add a Gram loss that pulls the similarities between the student's patch features toward "
        "those of a Gram teacher with these weights: a checkpoint of --objective dino (its "
        "teacher is used), a run's --ckpt_dir, or a torch.save or .safetensors file with timm's "
        "parameter names",
        kind=path_or_url,
        metavar="PATH",
        requires=("objective=dino",),
        incompatible_with=("eval_only", "features", "compile_only"),
    )
    gram_weight: float = flag(
        2.0,
        "weight of the Gram loss of --gram_weights",
        kind=non_negative,
        requires=("gram_weights",),
        requires_at_default=True,
    )
    gram_update_steps: int = flag(
        0,
        "replace the Gram teacher with the current EMA teacher every N steps, and save the Gram "
        "teacher in checkpoints; DINOv3 uses 10000; 0: never",
        kind=count,
        requires=("gram_weights",),
    )
    gram_crop_factor: float = flag(
        1.0,
        "side of the Gram teacher's crops as a multiple of the global crops' side; both show the "
        "same part of the image; the teacher's patch features are resampled to the student's "
        "grid; DINOv3 uses 2; 1: use the global crops",
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
        "label smoothing: fraction of each label that is spread over all classes",
        kind=rate,
        requires=CLASSIFIES,
    )
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
    teacher: str | None = flag(
        None,
        "distillation: --model name of a trained teacher, whose predictions are an additional "
        "target (with --objective dino, they replace those of the EMA teacher); must have the "
        "student's image size and number of classes (dino: number of patches)",
        metavar="NAME",
        requires=("teacher_weights", "objective=classify|objective=dino"),
        incompatible_with=("plan", "compile_only"),
    )
    teacher_weights: str | None = flag(
        None,
        "weights of --teacher: a checkpoint (of --objective dino: its EMA teacher is used), a "
        "run's --ckpt_dir, or a torch.save or .safetensors file with timm's parameter names; "
        "loaded at each start",
        kind=path_or_url,
        metavar="PATH",
        requires=("teacher",),
    )
    distillation_type: Literal["hard", "soft"] = flag(
        "hard",
        "distillation target; hard: the teacher's most probable class, as a second label; soft: "
        "the teacher's probabilities",
        requires=("teacher", *CLASSIFIES),
        requires_at_default=True,
    )
    distillation_alpha: float = flag(
        0.5,
        "weight of the distillation loss; the loss of the labels has weight 1 - X",
        kind=fraction,
        requires=("teacher", *CLASSIFIES),
        requires_at_default=True,
    )
    distillation_tau: float = flag(
        1.0,
        "temperature of soft distillation, which divides the logits of teacher and student",
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
