"""HybridViT: a Vision Transformer behind a patch convolution, for images and for volumes.

It is the model of NVIDIA PhysicsNeMo's tutorial on domain parallelism, after its published
description: patch convolution, LayerNorm and ReLU, a learned position embedding, pre-norm blocks,
the mean over all tokens, a linear head. It has 126,907,624 parameters for images of 1024 x 1024 and
1000 classes.
"""

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models.vision_transformer import Block
from torch import nn

from models.config import ModelError, check_patches, check_taken, check_width, spatial_size
from models.initialize import initialize, vision_transformer_scheme
from models.positions import PartOfPositions, TokenPart, pool_over_parts, replace_positions
from models.spec import ModelSizes, ModelSpec

NAME = "hybrid_vit"
_WITHOUT_PREFIX = "vit"
_CONVOLUTIONS = {2: nn.Conv2d, 3: nn.Conv3d}
_STD = 0.02
_RESET = "reset"


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
    weight_init: str = ""
    """'': truncated normal, std 0.02, as timm's; 'reset': as the tutorial, PyTorch's own for each
    layer, and positions of zero."""


class PatchConvolution(nn.Module):
    """Makes a token of each patch: convolution, LayerNorm, ReLU."""

    def __init__(self, dimension: int, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        convolution = _CONVOLUTIONS[dimension]
        self.proj = convolution(in_chans, embed_dim, patch_size, patch_size)
        self.norm = nn.LayerNorm(embed_dim)
        self.act = nn.ReLU()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (batch, channels, *size) to (batch, patches, width)."""
        return self.act(self.norm(self.proj(images).flatten(2).transpose(1, 2)))


class HybridViT(nn.Module):
    """Classifies images, or volumes, of one size, ``img_size``, whose numbers are all given."""

    def __init__(self, config: HybridVitConfig) -> None:
        super().__init__()
        assert isinstance(config.img_size, tuple)
        self.grid = tuple(size // config.patch_size for size in config.img_size)
        self.patch_embed = PatchConvolution(
            config.dimension, config.patch_size, config.in_chans, config.embed_dim
        )
        patches = torch.Size(self.grid).numel()
        self.pos_embed = nn.Parameter(torch.zeros(1, patches, config.embed_dim))
        self.pos_drop = nn.Dropout(config.pos_drop_rate)
        steps = max(config.depth - 1, 1)
        self.blocks = nn.Sequential(
            *(
                Block(
                    config.embed_dim,
                    config.num_heads,
                    config.mlp_ratio,
                    qkv_bias=config.qkv_bias,
                    proj_drop=config.proj_drop_rate,
                    attn_drop=config.attn_drop_rate,
                    drop_path=config.drop_path_rate * index / steps,
                    norm_layer=nn.LayerNorm,
                )
                for index in range(config.depth)
            )
        )
        self.head_drop = nn.Dropout(config.drop_rate)
        self.head = nn.Linear(config.embed_dim, config.num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (batch, channels, *size) to logits (batch, classes)."""
        x = self.pos_drop(self.add_positions(self.patch_embed(images)))
        return self.head(self.head_drop(self.pool(self.blocks(x))))

    def group_matcher(self) -> dict[str, Any]:
        """Return patterns of layers, as timm's models do: what is before the blocks, each block."""
        return {"stem": r"^pos_embed|patch_embed", "blocks": [(r"^blocks\.(\d+)", None)]}

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay, as timm's models do."""
        return {"pos_embed"}

    def add_positions(self, x: torch.Tensor) -> torch.Tensor:
        """Add its learned position to each token, (batch, patches, width)."""
        return x + self.pos_embed

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over all tokens: (batch, width)."""
        return x.mean(1)


class HybridVitSpec(ModelSpec):
    """The spec of a HybridViT."""

    head_method = "pool"

    def __init__(self, overrides: Mapping[str, Any], config: HybridVitConfig) -> None:
        self._config = config
        settings = asdict(config)
        super().__init__(NAME, overrides, settings | {"img_size": list(settings["img_size"])})

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return HybridViT(self._config)

    def initialize(self, module: nn.Module, name: str, *, seed: int) -> None:
        how = self._config.weight_init
        fill = vision_transformer_scheme(weight_init=how, num_classes=self._config.num_classes)

        def scheme(part: nn.Module, name: str) -> None:
            if not isinstance(part, HybridViT):
                fill(part, name)
            elif how == _RESET:
                nn.init.zeros_(part.pos_embed)
            else:
                trunc_normal_(part.pos_embed, std=_STD)

        initialize(module, name, seed=seed, scheme=scheme)

    def why_no_token_part(self) -> str | None:
        return None

    def compute_on_part(self, model: nn.Module, part: TokenPart) -> dict[str, PartOfPositions]:
        assert isinstance(model, HybridViT)
        positions = replace_positions(model, "pos_embed", 0, part)
        model.add_positions = lambda x: x + positions()  # type: ignore[method-assign]
        model.pool = lambda x: pool_over_parts(x, part, "avg")  # type: ignore[method-assign]
        return {"pos_embed": positions}

    @property
    def token_parameters(self) -> dict[str, int]:
        return {"pos_embed": 0}

    @functools.cached_property
    def sizes(self) -> ModelSizes:
        model, config = self.meta, self._config
        assert isinstance(model, HybridViT)
        tokens = model.pos_embed.shape[1]
        assert isinstance(config.img_size, tuple)
        head_dim = config.embed_dim // config.num_heads
        return ModelSizes(
            input_shape=(config.in_chans, *config.img_size),
            num_classes=config.num_classes,
            grid=model.grid,
            num_tokens=tokens,
            train_tokens=tokens,
            depth=len(model.blocks),
            embed_dim=config.embed_dim,
            num_heads=config.num_heads,
            head_dim=head_dim,
            value_dim=head_dim,
            hidden=int(config.embed_dim * config.mlp_ratio),
            attn_drop_rate=config.attn_drop_rate,
        )


# -- the family: what ``--model`` knows of it ------------------------------------------------------


def names() -> list[str]:
    return [_WITHOUT_PREFIX]


def open_model(name: str, overrides: Mapping[str, Any]) -> ModelSpec | None:
    """Return the model with ``overrides``, fields of ``HybridVitConfig``, over its own arguments;
    None for another name. Raises ModelError for arguments that do not fit."""
    if name != _WITHOUT_PREFIX:
        return None
    check_taken(NAME, overrides, HybridVitConfig)
    config = HybridVitConfig(**overrides)
    size = spatial_size(config.img_size, config.dimension)
    check_patches(size, config.patch_size, len(size))
    check_width(asdict(config))
    if config.weight_init not in ("", _RESET):
        raise ModelError(f"{NAME} accepts <weight_init> '' and {_RESET}")
    return HybridVitSpec(overrides, replace(config, img_size=size))
