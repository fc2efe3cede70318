"""Which arguments of a Vision Transformer go together. Imports nothing heavy: told at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from models.errors import ModelError


def check_taken(name: str, given: Iterable[str], config: type) -> None:
    """Raise ModelError for an argument that is no field of ``config``, the model ``name``'s."""
    taken = [field.name for field in fields(config)]
    for argument in given:
        if argument not in taken:
            raise ModelError(f"{name} does not take <{argument}>; it takes {', '.join(taken)}")


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ModelError for arguments that timm would take and then compute something else.

    ``arguments`` are all of the model's, by timm's names.
    """
    check_width(arguments)
    width, heads = arguments["embed_dim"], arguments["num_heads"]
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


def check_width(arguments: Mapping[str, Any]) -> None:
    """Raise ModelError for a width that cannot be divided over the heads, or leaves no MLP."""
    width, heads = arguments["embed_dim"], arguments["num_heads"]
    if width % heads:
        raise ModelError(f"<embed_dim> {width} is not a multiple of <num_heads> {heads}")
    if width * arguments["mlp_ratio"] < 1:
        raise ModelError(f"<mlp_ratio> {arguments['mlp_ratio']} leaves no MLP")


def check_patches(img_size: Any, patch_size: Any, dimension: int = 2) -> None:
    """Raise ModelError if an image is not a whole number of patches each way."""
    images = spatial_size(img_size, dimension)
    for image, patch in zip(images, spatial_size(patch_size, dimension), strict=True):
        if image % patch:
            raise ModelError(f"<img_size> {image} is not a multiple of <patch_size> {patch}")


def spatial_size(size: Any, dimension: int = 2) -> tuple[int, ...]:
    """Return the size along each spatial dimension; one number stands for all of them.

    Raises ModelError if there are not as many numbers.
    """
    if isinstance(size, int):
        return (size,) * dimension
    if len(size) != dimension:
        told = " ".join(map(str, size))
        raise ModelError(f"<img_size> {told} has {len(size)} numbers: give 1 or {dimension}")
    return tuple(size)


def _patches(arguments: Mapping[str, Any]) -> int:
    height, width = spatial_size(arguments["img_size"])
    rows, columns = spatial_size(arguments["patch_size"])
    return (height // rows) * (width // columns)
