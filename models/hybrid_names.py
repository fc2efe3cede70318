"""The family of HybridViT, images or volumes: ``--model hybrid_vit``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from models.config import check_patches, check_taken, check_width, spatial_size

if TYPE_CHECKING:
    from models.spec import ModelSpec

NAME = "hybrid_vit"
_WITHOUT_PREFIX = "vit"


@dataclass(frozen=True)
class HybridVitConfig:
    """The arguments of a HybridViT, by timm's names where timm has one."""

    dimension: int = 2
    """Spatial dimensions of the input: 2 for images, 3 for volumes."""
    img_size: int | tuple[int, ...] = 1024
    """Pixels along each of them, or one number for all; a volume's slices come first."""
    patch_size: int = 8
    in_chans: int = 3
    num_classes: int = 1000
    embed_dim: int = 768
    depth: int = 16
    num_heads: int = 6
    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    drop_rate: float = 0.0
    pos_drop_rate: float = 0.0
    proj_drop_rate: float = 0.0
    attn_drop_rate: float = 0.0
    drop_path_rate: float = 0.0


def names() -> list[str]:
    return [_WITHOUT_PREFIX]


def knows(name: str) -> bool:
    return name == _WITHOUT_PREFIX


def open_model(name: str, overrides: Mapping[str, Any]) -> ModelSpec:
    """Return the model with ``overrides``, fields of ``HybridVitConfig``, over its own arguments.

    Raises ModelError for an argument that it does not have, and for sizes that do not fit.
    """
    check_taken(NAME, overrides, HybridVitConfig)
    config = HybridVitConfig(**overrides)
    size = spatial_size(config.img_size, config.dimension)
    check_patches(size, config.patch_size, len(size))
    check_width(asdict(config))
    # Imported only now: timm takes seconds, and a wrong size is reported before.
    from models.hybrid_vit import HybridVitSpec

    return HybridVitSpec(overrides, replace(config, img_size=size))
