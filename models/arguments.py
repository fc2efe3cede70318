"""Which arguments of a Vision Transformer go together. Imports nothing heavy: told at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.errors import ModelError


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ModelError for arguments that timm would take and then compute something else.

    ``arguments`` are all of the model's, by timm's names.
    """
    width, heads = arguments["embed_dim"], arguments["num_heads"]
    if width % heads:
        raise ModelError(f"<embed_dim> {width} is not a multiple of <num_heads> {heads}")
    if width * arguments["mlp_ratio"] < 1:
        raise ModelError(f"<mlp_ratio> {arguments['mlp_ratio']} leaves no MLP")
    if arguments["global_pool"] == "token" and not arguments["class_token"]:
        raise ModelError("<global_pool> token needs <class_token>")
    if arguments.get("use_rot_pos_emb") and width // heads % 4:
        raise ModelError(
            f"rotary position embedding needs heads whose width is a multiple of 4: <embed_dim> "
            f"{width} / <num_heads> {heads} is {width // heads}"
        )
    rate = arguments["patch_drop_rate"]
    if rate and int(_patches(arguments) * (1 - rate)) < 1:
        raise ModelError(f"<patch_drop_rate> {rate} leaves no patch")


def check_patches(img_size: Any, patch_size: Any) -> None:
    """Raise ModelError if an image is not a whole number of patches each way."""
    for image, patch in zip(_pair(img_size), _pair(patch_size), strict=True):
        if image % patch:
            raise ModelError(f"<img_size> {image} is not a multiple of <patch_size> {patch}")


def _patches(arguments: Mapping[str, Any]) -> int:
    (height, width), (rows, columns) = map(_pair, (arguments["img_size"], arguments["patch_size"]))
    return (height // rows) * (width // columns)


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)
