"""Vision Transformer arguments by timm's names: checks, presets and flags.

Imports nothing heavy, so that ``--help`` and the checks are fast.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from config_fields import bounded, flag, positive, positive_number, rate


class ModelError(Exception):
    """The requested model cannot be built; the one-line message says why, or what to change.

    Model arguments appear in the text as ``<img_size>``: ``with_flag_names`` replaces them by flag
    names, ``str()`` by the argument names.
    """

    def with_flag_names(self, names: Mapping[str, str]) -> str:
        """Return the message with each argument's name replaced by its entry in ``names``, if
        any."""
        return re.sub(r"<(\w+)>", lambda match: names.get(match[1], match[1]), self.args[0])

    def __str__(self) -> str:
        return self.with_flag_names({})


# ------------------------------------------------------------------------------------------------
# Checks of arguments.


def check_taken(name: str, given: Iterable[str], config: type) -> None:
    """Raise ModelError for an argument that is no field of ``config``, the model ``name``'s."""
    taken = [field.name for field in fields(config)]
    for argument in given:
        if argument not in taken:
            raise ModelError(f"{name} does not accept <{argument}>; it accepts {', '.join(taken)}")


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ModelError for arguments, all of the model's, with which timm would silently compute
    something else."""
    check_width(arguments)
    width, heads = arguments["embed_dim"], arguments["num_heads"]
    if arguments["global_pool"] == "token" and not arguments["class_token"]:
        raise ModelError("<global_pool> token requires <class_token>")
    if arguments.get("use_rot_pos_emb") and width // heads % 4:
        raise ModelError(
            "rotary position embedding requires a head width that is a multiple of 4: "
            f"<embed_dim> {width} / <num_heads> {heads} is {width // heads}"
        )
    if (arguments.get("rope_rescale_coords") or 1) > 1 and not arguments["use_rot_pos_emb"]:
        raise ModelError("<rope_rescale_coords> requires a model with rotary position embedding")
    rate = arguments["patch_drop_rate"]
    if rate:
        image, patch = spatial_size(arguments["img_size"]), spatial_size(arguments["patch_size"])
        patches = (image[0] // patch[0]) * (image[1] // patch[1])
        if int(patches * (1 - rate)) < 1:
            raise ModelError(f"<patch_drop_rate> {rate} drops every patch: use a lower rate")


def check_width(arguments: Mapping[str, Any]) -> None:
    """Raise ModelError for a width that the heads do not divide, or that leaves no MLP."""
    width, heads = arguments["embed_dim"], arguments["num_heads"]
    if width % heads:
        raise ModelError(f"<embed_dim> {width} is not a multiple of <num_heads> {heads}")
    if width * arguments["mlp_ratio"] < 1:
        raise ModelError(
            f"<mlp_ratio> {arguments['mlp_ratio']} gives an MLP of width 0 for <embed_dim> "
            f"{width}: use a larger ratio"
        )


def check_patches(img_size: Any, patch_size: Any, dimension: int = 2) -> None:
    """Raise ModelError if an image is not a whole number of patches along each dimension."""
    images = spatial_size(img_size, dimension)
    for image, patch in zip(images, spatial_size(patch_size, dimension), strict=True):
        if image % patch:
            raise ModelError(f"<img_size> {image} is not a multiple of <patch_size> {patch}")


def spatial_size(size: Any, dimension: int = 2) -> tuple[int, ...]:
    """Return the size along each spatial dimension; one number stands for all of them. Raises
    ModelError for another number of numbers."""
    if isinstance(size, int):
        return (size,) * dimension
    if len(size) != dimension:
        numbers = " ".join(map(str, size))
        raise ModelError(f"<img_size> {numbers} has {len(size)} values: use 1 or {dimension}")
    return tuple(size)


# ------------------------------------------------------------------------------------------------
# Arguments and presets.


@dataclass(frozen=True)
class VitConfig:
    """The arguments of ``timm.models.vision_transformer.VisionTransformer``; the defaults are those
    of the 10-billion-parameter ViT: no class token, mean over the normalized tokens, learned
    positions."""

    img_size: int = 224
    patch_size: int = 14
    in_chans: int = 3
    num_classes: int = 1000
    global_pool: str = "avg"
    embed_dim: int = 5120
    depth: int = 32
    num_heads: int = 32
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    qk_norm: bool = False
    scale_attn_norm: bool = False
    scale_mlp_norm: bool = False
    proj_bias: bool = True
    init_values: float | None = None
    class_token: bool = False
    pos_embed: str = "learn"
    no_embed_class: bool = False
    reg_tokens: int = 0
    pre_norm: bool = False
    final_norm: bool = True
    fc_norm: bool | None = False
    pool_include_prefix: bool = False
    drop_rate: float = 0.0
    pos_drop_rate: float = 0.0
    patch_drop_rate: float = 0.0
    proj_drop_rate: float = 0.0
    attn_drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    weight_init: str = ""


_VIT_10B = VitConfig()
# Heads of 128: the width of a TPU's matrix unit. 12 * depth * embed_dim^2 parameters.
_VIT_60B = replace(_VIT_10B, embed_dim=10240, depth=48, num_heads=80)
_VIT_120B = replace(_VIT_10B, embed_dim=14336, depth=48, num_heads=112)

# timm's names and sizes: class token, token pooling, final norm before the pool.
_TIMM = VitConfig(class_token=True, global_pool="token", fc_norm=None, patch_size=16)

PRESETS: dict[str, VitConfig] = {
    "vit_tiny_patch16_224": replace(_TIMM, embed_dim=192, depth=12, num_heads=3),
    "vit_small_patch16_224": replace(_TIMM, embed_dim=384, depth=12, num_heads=6),
    "vit_base_patch16_224": replace(_TIMM, embed_dim=768, depth=12, num_heads=12),
    "vit_large_patch16_224": replace(_TIMM, embed_dim=1024, depth=24, num_heads=16),
    "vit_huge_patch14_224": replace(_TIMM, patch_size=14, embed_dim=1280, depth=32, num_heads=16),
    "vit_giant_patch14_224": replace(
        _TIMM, patch_size=14, embed_dim=1408, depth=40, num_heads=16, mlp_ratio=48 / 11
    ),
    "vit_gigantic_patch14_224": replace(
        _TIMM, patch_size=14, embed_dim=1664, depth=48, num_heads=16, mlp_ratio=64 / 13
    ),
    "vit_10b": _VIT_10B,
    "vit_60b": _VIT_60B,
    "vit_120b": _VIT_120B,
}

DEFAULT_MODEL = "vit_10b"
NAFLEX_FAMILY = "timm/naflexvit_"
"""What the names of timm's NaFlexVits start with, whose images have any size."""


# ------------------------------------------------------------------------------------------------
# Flags.


def _timm_flag(name: str, help: str, **more):
    """Return a flag for one of timm's arguments; None is the model's own value."""
    value = getattr(_VIT_10B, name)
    shown = {"True": "on", "False": "off", "None": "none", "": "''"}.get(str(value), value)
    return flag(None, f"{help} (default: the model's; {DEFAULT_MODEL}: {shown})", **more)


@dataclass(frozen=True)
class ModelConfig:
    """The model, and the values that differ from its own; the fields have timm's names."""

    group: ClassVar[str] = "model (timm's names; a flag overrides the model's own)"

    model: str | None = flag(
        None,
        "preset, hybrid_vit, or timm/NAME for timm's VisionTransformer and Eva models (see "
        f"--list_models) (default: {DEFAULT_MODEL})",
        metavar="NAME",
        common=True,
    )
    img_size: int | tuple[int, ...] | None = _timm_flag(
        "img_size",
        "side of square images, or height and width, in pixels; volumes: slices, height and width",
        kind=bounded(int, 1, 16384),
        metavar="N",
        several=True,
        names=("--image_size", "--img_size"),
        common=True,
    )
    dimension: int | None = flag(
        None,
        "number of spatial dimensions of hybrid_vit; 2: images, 3: volumes (default: 2)",
        kind=bounded(int, 2, 3),
        metavar="{2,3}",
    )
    patch_size: int | None = _timm_flag("patch_size", "side of a patch in pixels", kind=positive)
    in_chans: int | None = _timm_flag(
        "in_chans",
        "number of input channels: 3 (RGB) or 1 (grayscale); any number for volumes",
        kind=bounded(int, 1, 1024),
    )
    num_classes: int | None = _timm_flag(
        "num_classes", "number of classes", kind=bounded(int, 1, 10**7), common=True
    )
    embed_dim: int | None = _timm_flag("embed_dim", "embedding width", kind=bounded(int, 1, 2**20))
    depth: int | None = _timm_flag(
        "depth",
        "number of transformer blocks",
        kind=bounded(int, 1, 1000),
        names=("--num_blocks", "--depth"),
    )
    num_heads: int | None = _timm_flag("num_heads", "number of attention heads", kind=positive)
    mlp_ratio: float | None = _timm_flag(
        "mlp_ratio", "MLP width divided by embedding width", kind=bounded(float, 0.001, 1000)
    )
    global_pool: Literal["token", "avg", "avgmax", "max", "map"] | None = _timm_flag(
        "global_pool", "token pooling before the head; token: the class token"
    )
    class_token: bool | None = _timm_flag("class_token", "prepend a class token")
    reg_tokens: int | None = _timm_flag(
        "reg_tokens", "number of register tokens to prepend", kind=bounded(int, 0, 2**20)
    )
    pos_embed: Literal["learn", "none"] | None = _timm_flag(
        "pos_embed", "position embedding; learn: learned"
    )
    no_embed_class: bool | None = _timm_flag(
        "no_embed_class", "add no position embedding to prefix tokens (class, register)"
    )
    pool_include_prefix: bool | None = _timm_flag(
        "pool_include_prefix", "include prefix tokens in the pooling"
    )
    qkv_bias: bool | None = _timm_flag("qkv_bias", "add a bias to query, key and value projections")
    qk_norm: bool | None = _timm_flag("qk_norm", "normalize queries and keys")
    proj_bias: bool | None = _timm_flag(
        "proj_bias", "add a bias to the attention output and MLP projections"
    )
    scale_attn_norm: bool | None = _timm_flag(
        "scale_attn_norm", "add a norm between attention and its output projection"
    )
    scale_mlp_norm: bool | None = _timm_flag("scale_mlp_norm", "add a norm inside the MLP")
    init_values: float | None = _timm_flag(
        "init_values", "initial value of layer scale", kind=positive_number
    )
    pre_norm: bool | None = _timm_flag("pre_norm", "add a norm before the blocks")
    final_norm: bool | None = _timm_flag("final_norm", "add a norm after the blocks")
    fc_norm: bool | None = _timm_flag(
        "fc_norm", "apply the final norm after pooling instead of before"
    )
    drop_rate: float | None = _timm_flag(
        "drop_rate", "dropout rate before the head", kind=rate, requires=("objective=classify",)
    )
    pos_drop_rate: float | None = _timm_flag(
        "pos_drop_rate",
        "dropout rate after the embedding",
        kind=rate,
        names=("--pos_dropout", "--pos_drop_rate"),
    )
    patch_drop_rate: float | None = _timm_flag(
        "patch_drop_rate",
        "fraction of patches dropped in training",
        kind=rate,
    )
    proj_drop_rate: float | None = _timm_flag(
        "proj_drop_rate",
        "dropout rate of the MLP and the attention output projection",
        kind=rate,
        names=("--mlp_dropout", "--proj_drop_rate"),
    )
    attn_drop_rate: float | None = _timm_flag(
        "attn_drop_rate",
        "dropout rate of attention weights",
        kind=rate,
        names=("--att_dropout", "--attn_drop_rate"),
    )
    drop_path_rate: float | None = _timm_flag(
        "drop_path_rate",
        "stochastic depth rate of the last block; increases linearly from 0 at the first block",
        kind=rate,
    )
    rope_rescale_coords: float | None = flag(
        None,
        "in training, rescale rotary position coordinates by a random factor between 1/X and X, "
        "log-uniform, drawn per step and crop size; 2: as in DINOv3; 1: off (default: the "
        "model's, usually 1)",
        kind=bounded(float, 1, 1000),
    )
    weight_init: Literal["", "jax", "jax_nlhb", "moco", "reset"] | None = _timm_flag(
        "weight_init",
        "timm's weight initialization scheme: '', jax, jax_nlhb, moco or reset; hybrid_vit: '' or "
        "reset, as PhysicsNeMo's tutorial: PyTorch's own, and positions of zero",
    )

    def overrides(self) -> dict[str, object]:
        """Return what was given, by timm's names."""
        arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        del arguments["model"]
        return {name: value for name, value in arguments.items() if value is not None}
