"""The flags of native resolution: of the sequences, and of the images in them."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from config_fields import bounded, flag, positive
from data.config import DataConfig
from models.config import ModelConfig


@dataclass(frozen=True)
class SequenceConfig:
    """The sequences that the model computes on, which are arguments of the model."""

    group: ClassVar[str] = ModelConfig.group
    after: ClassVar[str] = "img_size"

    native_resolution: bool | None = flag(
        None,
        "train on whole images of any size and aspect ratio: packs the patches of several images "
        "into each sequence, with a preset or timm model rebuilt as timm's NaFlexVit "
        "(docs/native_resolution.md) (default: on for timm/naflexvit_*)",
    )
    token_budget: int | None = flag(
        None,
        "native resolution: sequence length in tokens, counting patches, class and register "
        "tokens; --batch_size then counts sequences (default: 1024)",
        kind=bounded(int, 1, 2**16 - 1),
        metavar="N",
    )
    max_images_per_sequence: int | None = flag(
        None,
        "native resolution: maximum number of images per sequence, up to 255 (default: one per "
        "64 tokens of --token_budget)",
        kind=bounded(int, 1, 255),
        metavar="N",
    )
    pos_embed_interp_mode: Literal["bicubic", "bilinear"] | None = flag(
        None,
        "native resolution: how learned positions are resampled to the grid of each image, with "
        "antialiasing (default: the model's; bilinear for weights of transformers' SigLIP 2)",
    )


@dataclass(frozen=True)
class ImagesConfig:
    """The sizes of the images in sequences."""

    group: ClassVar[str] = DataConfig.group
    after: ClassVar[str] = "buckets"

    max_tokens_per_image: int | None = flag(
        None,
        "native resolution: maximum number of tokens per image; larger images are scaled "
        "down (default: the number for an --image_size image, at most --token_budget)",
        kind=positive,
        metavar="N",
    )
    resize_to_budget: bool = flag(
        False,
        "native resolution: scale each image up or down to about --max_tokens_per_image",
    )
    side_scale: tuple[float, float] = flag(
        (1.0, 1.0),
        "native resolution: range of the random factor that scales the sides of each "
        "training image (NaViT)",
        kind=bounded(float, 0.1, 10),
        metavar=("MIN", "MAX"),
    )
