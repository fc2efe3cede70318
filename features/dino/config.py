"""The flags of self-distillation (DINO), and of its Gram teacher."""

import argparse
import functools
from dataclasses import dataclass
from typing import ClassVar

from config_fields import (
    bounded,
    count,
    flag,
    fraction,
    height_by_width,
    non_negative,
    path_or_url,
    positive_number,
    shortened,
)


def global_by_local(text: str) -> str:
    """Parse GxL, the sides of global and local crops in pixels."""
    try:
        return height_by_width(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{shortened(text)!r} is not GxL, the sides of global and local crops in pixels, such "
            "as 512x112"
        ) from None


HEAD_SETTINGS = ("dino_prototypes", "ibot_prototypes", "dino_head_hidden", "dino_head_bottleneck")
"""The fields that decide the sizes of the heads."""

# Parts of an objective: their defaults do not turn it off.
_flag = functools.partial(flag, requires=("objective=dino",), requires_at_default=True)


@dataclass(frozen=True)
class DinoConfig:
    """Crops, heads, teacher and losses of self-distillation."""

    group: ClassVar[str] = "objective"

    local_crops: int = _flag(
        8,
        "number of local crops per image, in addition to two global crops of --image_size",
        kind=bounded(int, 0, 64),
    )
    local_crop_size: int = _flag(
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
    )
    global_crops_scale: tuple[float, float] = _flag(
        (0.32, 1.0),
        "range of the area of a global crop, as a fraction of the image",
        kind=fraction,
        metavar=("MIN", "MAX"),
    )
    local_crops_scale: tuple[float, float] = _flag(
        (0.05, 0.32),
        "range of the area of a local crop, as a fraction of the image",
        kind=fraction,
        metavar=("MIN", "MAX"),
    )
    ibot_mask_ratio: tuple[float, float] = _flag(
        (0.1, 0.5),
        "range of the fraction of patches that are masked in one of the two global crops of an "
        "image, sampled per image",
        kind=fraction,
        metavar=("MIN", "MAX"),
    )
    dino_prototypes: int = _flag(
        65536,
        "number of prototypes of the DINO head, for class tokens",
        kind=bounded(int, 2, 2**24),
    )
    ibot_prototypes: int = _flag(
        65536,
        "number of prototypes of the iBOT head, for masked patches",
        kind=bounded(int, 2, 2**24),
    )
    dino_head_hidden: int = _flag(2048, "hidden width of both heads", kind=bounded(int, 1, 2**20))
    dino_head_bottleneck: int = _flag(
        256, "bottleneck width of both heads, before the prototypes", kind=bounded(int, 1, 2**20)
    )
    student_temp: float = _flag(
        0.1,
        "softmax temperature of the student",
        kind=positive_number,
    )
    teacher_temp: float = _flag(
        0.07,
        "softmax temperature of the teacher after --warmup_teacher_temp_epochs",
        kind=bounded(float, 0.005, 10),
    )
    warmup_teacher_temp: float = _flag(
        0.04,
        "softmax temperature of the teacher at the start; increases linearly to --teacher_temp",
        kind=bounded(float, 0.005, 10),
    )
    warmup_teacher_temp_epochs: float = _flag(
        30.0,
        "number of epochs over which the teacher's temperature goes from --warmup_teacher_temp to "
        "--teacher_temp; 0: --teacher_temp from the start",
        kind=non_negative,
    )
    teacher_momentum: float = _flag(
        0.992,
        "EMA momentum of the teacher at the start: the fraction of its weights that the teacher "
        "keeps at each step",
        kind=fraction,
    )
    teacher_momentum_end: float = _flag(
        1.0,
        "EMA momentum of the teacher at the last step of --num_epochs; follows a cosine from "
        "--teacher_momentum",
        kind=fraction,
    )
    freeze_last_layer_epochs: float = _flag(
        1.0,
        "keep the learning rate of the prototypes at 0 for the first X epochs",
        kind=non_negative,
    )
    ibot_weight: float = _flag(1.0, "weight of the iBOT loss of masked patches", kind=non_negative)
    koleo_weight: float = _flag(
        0.1,
        "weight of the KoLeo loss, which spreads the class tokens of different images apart",
        kind=non_negative,
    )
    koleo_group: int = _flag(
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
    def crop_pairs(self) -> list[tuple[int, int]]:
        """Return the sides of global and local crops of each of ``--crop_sizes``."""
        pairs = (size.partition("x") for size in self.crop_sizes or ())
        return [(int(side), int(local)) for side, _, local in pairs]
