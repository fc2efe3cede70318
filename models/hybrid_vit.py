"""HybridViT: a Vision Transformer behind a patch convolution, for images and for volumes.

It is the model of NVIDIA PhysicsNeMo's tutorial on domain parallelism, after its published
description: patch convolution, LayerNorm and ReLU, a learned position embedding, pre-norm blocks,
the mean over all tokens, a linear head. It has 126,907,624 parameters for images of 1024 x 1024 and
1000 classes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import trunc_normal_
from timm.models.vision_transformer import Block
from torch import nn

from models.blocks import PartOfPositions, TokenPart, keep_part, pool_over_parts
from models.initialize import Scheme, initialize, vision_transformer_scheme
from models.spec import ModelSizes, ModelSpec

_CONVOLUTIONS = {2: nn.Conv2d, 3: nn.Conv3d}
_STD = 0.02


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
    """Classifies images, or volumes, of one size; its arguments are ``HybridVitConfig``'s."""

    def __init__(
        self,
        *,
        dimension: int,
        img_size: tuple[int, ...],
        patch_size: int,
        in_chans: int,
        num_classes: int,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float,
        qkv_bias: bool,
        drop_rate: float,
        pos_drop_rate: float,
        proj_drop_rate: float,
        attn_drop_rate: float,
        drop_path_rate: float,
    ) -> None:
        super().__init__()
        self.grid = tuple(size // patch_size for size in img_size)
        self.patch_embed = PatchConvolution(dimension, patch_size, in_chans, embed_dim)
        self.pos_embed = nn.Parameter(torch.zeros(1, torch.Size(self.grid).numel(), embed_dim))
        self.pos_drop = nn.Dropout(pos_drop_rate)
        steps = max(depth - 1, 1)
        self.blocks = nn.Sequential(
            *(
                Block(
                    embed_dim,
                    num_heads,
                    mlp_ratio,
                    qkv_bias=qkv_bias,
                    proj_drop=proj_drop_rate,
                    attn_drop=attn_drop_rate,
                    drop_path=drop_path_rate * index / steps,
                    norm_layer=nn.LayerNorm,
                )
                for index in range(depth)
            )
        )
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (batch, channels, *size) to logits (batch, classes)."""
        x = self.pos_drop(self.add_positions(self.patch_embed(images)))
        return self.head(self.head_drop(self.pool(self.blocks(x))))

    def group_matcher(self) -> dict[str, Any]:
        """Return what timm takes for layers: what comes before the blocks, and each block."""
        return {"stem": r"^pos_embed|patch_embed", "blocks": [(r"^blocks\.(\d+)", None)]}

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters that are better not decayed, as timm's models do."""
        return {"pos_embed"}

    def add_positions(self, x: torch.Tensor) -> torch.Tensor:
        """Add to each token, (batch, patches, width), what was learned of its place."""
        return x + self.pos_embed

    def pool(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over all tokens: (batch, width)."""
        return x.mean(1)


class HybridVitSpec(ModelSpec):
    """The spec of a HybridViT made with ``arguments``, a complete set."""

    def __init__(
        self, name: str, overrides: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> None:
        self._arguments = dict(arguments)
        size = list(arguments["img_size"])
        super().__init__(name, overrides, self._arguments | {"img_size": size})

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return HybridViT(**self._arguments)

    def initialize(self, module: nn.Module, name: str, *, seed: int) -> None:
        initialize(module, name, seed=seed, scheme=self._scheme)

    @functools.cached_property
    def _scheme(self) -> Scheme:
        fill = vision_transformer_scheme(weight_init="", num_classes=self.settings["num_classes"])

        def scheme(part: nn.Module, name: str) -> None:
            if isinstance(part, HybridViT):
                trunc_normal_(part.pos_embed, std=_STD)
            else:
                fill(part, name)

        return scheme

    def put_blocks(self, model: nn.Module, blocks: nn.Module) -> None:
        model.blocks = blocks

    def why_no_token_part(self) -> str | None:
        return None

    def compute_on_part(self, model: nn.Module, part: TokenPart) -> dict[str, PartOfPositions]:
        assert isinstance(model, HybridViT)
        positions = keep_part(model, "pos_embed", 0, part)
        model.add_positions = lambda x: x + positions()  # type: ignore[method-assign]
        model.pool = lambda x: pool_over_parts(x, part, "avg")  # type: ignore[method-assign]
        return {"pos_embed": positions}

    @property
    def token_parameters(self) -> dict[str, int]:
        return {"pos_embed": 0}

    def _sizes(self, model: nn.Module) -> ModelSizes:
        assert isinstance(model, HybridViT)
        arguments = self._arguments
        head_dim = arguments["embed_dim"] // arguments["num_heads"]
        tokens = model.pos_embed.shape[1]
        return ModelSizes(
            input_shape=(arguments["in_chans"], *arguments["img_size"]),
            num_classes=arguments["num_classes"],
            grid=model.grid,
            num_tokens=tokens,
            train_tokens=tokens,
            depth=len(model.blocks),
            embed_dim=arguments["embed_dim"],
            num_heads=arguments["num_heads"],
            head_dim=head_dim,
            value_dim=head_dim,
            hidden=int(arguments["embed_dim"] * arguments["mlp_ratio"]),
            attn_drop_rate=arguments["attn_drop_rate"],
        )
