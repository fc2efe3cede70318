"""Masked autoencoders (MAE, He et al., arXiv 2111.06377): a timm ViT, and a decoder of pixels.

The encoder sees only a random subset of an image's patches; a narrow decoder, which replaces
pooling and head, predicts the pixels of the others. Encoder parameters have timm's names, decoder
parameters those of the published weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from timm.layers import LayerNorm
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from features.mae.config import MaeConfig
from models.config import ModelError
from models.initialize import initialize
from models.select import select
from models.spec import ModelSizes, ModelSpec, StackRun
from models.timm_models import BUILT_WITH, TimmSpec, sizes_of_stack, vision_transformer

BLOCKS, DECODER = "blocks", "decoder_blocks"
"""The names of the two stacks of blocks."""
_MLP_RATIO = 4.0
"""MLP ratio of the decoder's blocks, as in the paper."""
_STD = 0.02
_LONGEST_WAVE = 10_000.0


def add_to(encoder: ModelSpec, config: MaeConfig) -> ModelSpec:
    """Return ``encoder`` as a masked autoencoder. Raises ModelError for an unsuitable encoder or
    unsuitable sizes."""
    encoder = vision_transformer(encoder, "<objective> mae")
    if encoder.meta.pos_embed is None:
        raise ModelError(
            "<objective> mae requires <pos_embed> learn; it sets that embedding to fixed sines "
            "and cosines"
        )
    width, heads = config.decoder_embed_dim, config.decoder_num_heads
    if width % heads:
        raise ModelError(
            f"<decoder_embed_dim> {width} is not a multiple of <decoder_num_heads> {heads}"
        )
    for name, size in (("embed_dim", encoder.sizes.embed_dim), ("decoder_embed_dim", width)):
        if size % 4:
            raise ModelError(
                f"<{name}> {size} must be a multiple of 4, as sine-cosine positions require"
            )
    patches, ratio = encoder.sizes.num_patches, config.mask_ratio
    if not 0 < int(patches * (1 - ratio)) < patches:
        what = "masks no patch" if ratio < 0.5 else "leaves no visible patch"
        raise ModelError(f"<mask_ratio> {ratio:g} of {patches} patches {what}: change it")
    spec = MaeSpec(encoder, ratio, config.decoder_depth, width, heads)
    if config.norm_pix_loss and spec.patch_size == (1, 1) and spec.sizes.input_shape[0] == 1:
        raise ModelError("<norm_pix_loss> requires patches with more than one value: turn it off")
    return spec


class MaeSpec(TimmSpec):
    """Spec of a masked autoencoder: the encoder's spec, and the sizes of the decoder."""

    frozen = ("pos_embed",)

    def __init__(
        self, encoder: TimmSpec, mask_ratio: float, depth: int, width: int, heads: int
    ) -> None:
        self.encoder = encoder
        self.shown = int(encoder.sizes.num_patches * (1 - mask_ratio))
        """Number of patches per image that the encoder sees."""
        self._decoder = {"depth": depth, "width": width, "heads": heads}
        given = (encoder.name, encoder.overrides, encoder.kind, encoder.arguments)
        super().__init__(*given, encoder.preprocessing)
        self.settings |= {
            "decoder_depth": depth,
            "decoder_embed_dim": width,
            "decoder_num_heads": heads,
        }

    def build(self) -> nn.Module:
        arguments = self.arguments | BUILT_WITH[self.kind] | {"num_classes": 0}
        return MaskedAutoencoder(arguments, self.shown, **self._decoder)

    def initialize(self, module: nn.Module, name: str, *, seed: int) -> None:
        initialize(module, name, seed=seed, scheme=_scheme)

    @functools.cached_property
    def sizes(self) -> ModelSizes:
        """Sizes of the encoder, which sees only a subset of the patches in evaluations, too."""
        whole = self.encoder.sizes
        tokens = whole.num_tokens - whole.num_patches + self.shown
        return replace(whole, num_tokens=tokens, train_tokens=tokens)

    @functools.cached_property
    def stacks(self) -> Mapping[str, ModelSizes]:
        whole = self.encoder.sizes
        decoder = sizes_of_stack(whole, self.meta.decoder_blocks, train_tokens=whole.num_tokens)
        return {BLOCKS: self.sizes, DECODER: decoder}

    @property
    def runs(self) -> Sequence[StackRun]:
        """The encoder's run, to which all FLOPs are attributed, and the decoder's, which returns
        pixels."""
        pixels, flops = math.prod(self.sizes.input_shape), self.train_flops_per_image
        encoder, decoder = (sizes.train_tokens for sizes in self.stacks.values())
        return [
            StackRun(BLOCKS, encoder, pixels, self.sizes.num_classes, flops),
            StackRun(DECODER, decoder, pixels, pixels, 0.0),
        ]

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a patch in pixels."""
        model: Any = self.meta
        return model.patch_size

    def why_no_token_part(self) -> str | None:
        return "its decoder needs all tokens of an image"

    def why_one_grid(self) -> str | None:
        return "its positions are fixed for one grid"

    def example(self) -> tuple[torch.Tensor, ...]:
        ranks = torch.empty(1, self.sizes.num_patches, dtype=torch.int32, device="meta")
        return (*super().example(), ranks)


class MaskedAutoencoder(VisionTransformer):
    """Predicts all patches of images of which ``shown`` patches are visible."""

    def __init__(
        self, arguments: Mapping[str, Any], shown: int, *, depth: int, width: int, heads: int
    ) -> None:
        """``arguments``: the encoder's, by timm's names; the others are sizes of the decoder."""
        super().__init__(**arguments)
        place: Any = {"device": "meta"}
        self.attn_pool = None
        self.patch_embed.strict_img_size = False  # it is given a part of the patches
        self.shown, grid = shown, self.patch_embed.grid_size
        self.patch_size: tuple[int, int] = self.patch_embed.patch_size

        self.decoder_embed = nn.Linear(self.embed_dim, width, **place)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width, **place))
        self.decoder_positions = FixedPositions(self.num_prefix_tokens, grid, width)
        block = functools.partial(Block, width, heads, _MLP_RATIO, qkv_bias=True, **place)
        self.decoder_blocks = nn.Sequential(*(block() for _ in range(depth)))
        self.decoder_norm = LayerNorm(width, **place)
        values = self.in_chans * self.patch_size[0] * self.patch_size[1]
        self.decoder_pred = nn.Linear(width, values, **place)

    def no_weight_decay(self) -> set[str]:
        return {*super().no_weight_decay(), "mask_token"}

    def forward(self, images: torch.Tensor, ranks: torch.Tensor | None = None) -> torch.Tensor:
        """Return the predicted pixels of all patches, (batch, patches, values per patch).

        Without ``ranks``, return the encoder's output for whole images, as timm computes it.

        ``images``: (batch, channels, height, width), normalized. ``ranks``: (batch, patches),
        integers: the position of each patch in a random order of the image's patches; the first
        ``shown`` are visible. Products with ones and zeros select patches: they are exact in fp32,
        sharded like the batch, and deterministic on GPUs, unlike the gradient of a gather.
        """
        if ranks is None:
            return super().forward(images)
        places = torch.arange(self.shown, dtype=ranks.dtype, device=ranks.device)
        selected = ranks[:, None, :] == places[:, None]  # (batch, shown, patches)

        # The encoder embeds only visible patches, as an image with one row of patches.
        height, width = self.patch_size
        pixels = select(selected, patches_of(images, self.patch_size))
        pixels = pixels.unflatten(2, (height, width, self.in_chans))
        x = self.patch_embed(pixels.permute(0, 4, 2, 1, 3).flatten(3))
        prefix_positions, patch_positions = self.pos_embed.tensor_split(
            [0 if self.no_embed_class else self.num_prefix_tokens], dim=1
        )
        x = x + select(selected, patch_positions)
        tokens = [token for token in (self.cls_token, self.reg_token) if token is not None]
        if tokens:
            prefix = torch.cat(tokens, dim=1)
            prefix = prefix if self.no_embed_class else prefix + prefix_positions
            x = torch.cat([prefix.expand(len(x), -1, -1).to(x.dtype), x], dim=1)
        x = self.blocks(self.norm_pre(self.pos_drop(x)))
        x = self.fc_norm(self.norm(x))  # one of the two is the last norm

        # The decoder gets each visible patch at its position, and the mask token elsewhere.
        x = self.decoder_embed(x)
        first, seen = x.tensor_split([self.num_prefix_tokens], dim=1)
        hidden = (ranks >= self.shown)[..., None]
        x = select(selected.transpose(1, 2), seen) + hidden * self.mask_token
        x = torch.cat([first.to(x.dtype), x], dim=1)
        x = self.decoder_blocks(x + self.decoder_positions().to(x.dtype))
        return self.decoder_pred(self.decoder_norm(x)[:, self.num_prefix_tokens :])


def patches_of(images: torch.Tensor, patch_size: tuple[int, int]) -> torch.Tensor:
    """Return images, (batch, channels, height, width), as (batch, patches, values per patch),
    ordered by row, column, channel within a patch."""
    height, width = patch_size
    rows = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))
    return rows.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def images_of(
    patches: torch.Tensor, patch_size: tuple[int, int], grid: Sequence[int]
) -> torch.Tensor:
    """Return images from patches, (batch, patches, values per patch); the inverse of
    ``patches_of``."""
    pixels = patches.unflatten(2, (*patch_size, -1)).unflatten(1, tuple(grid))
    return pixels.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


# -- Positions: fixed, of sines and cosines ------------------------------------------------------


def sines_and_cosines(prefix: int, grid: tuple[int, int], width: int) -> torch.Tensor:
    """Return fixed positions, (1, prefix + patches, width), fp32, with zeros for the first
    ``prefix``. The first half of a position encodes the patch's column, the second half its row, as
    in MAE's published weights; each half is sines, then cosines, with wavelengths from 2 pi to
    10,000 times that (Vaswani et al. 2017)."""
    rows, columns = grid
    quarter = width // 4
    frequency = _LONGEST_WAVE ** -(torch.arange(quarter, dtype=torch.float64) / quarter)

    def waves(places: torch.Tensor) -> torch.Tensor:  # (patches, width / 2)
        angles = places.double()[:, None] * frequency
        return torch.cat([angles.sin(), angles.cos()], dim=1)

    column = torch.arange(columns).repeat(rows)
    row = torch.arange(rows).repeat_interleave(columns)
    positions = torch.cat([waves(column), waves(row)], dim=1)
    return torch.cat([positions.new_zeros(prefix, width), positions])[None].float()


class FixedPositions(nn.Module):
    """Positions that are computed, and therefore not saved in checkpoints."""

    values: torch.Tensor

    def __init__(self, prefix: int, grid: tuple[int, int], width: int) -> None:
        super().__init__()
        self._arguments = (prefix, grid, width)
        shape = (1, prefix + grid[0] * grid[1], width)
        self.register_buffer("values", torch.empty(shape, device="meta"), persistent=False)

    def init_non_persistent_buffers(self) -> None:
        """Fill the buffer; ``models.initialize`` calls this method by timm's name."""
        self.values.copy_(sines_and_cosines(*self._arguments))

    def forward(self) -> torch.Tensor:
        return self.values


# -- First weights ---------------------------------------------------------------------------------


def _scheme(part: nn.Module, name: str) -> None:
    """Initialize as in the paper (appendix A): Xavier uniform; tokens normal, std 0.02."""
    if isinstance(part, MaskedAutoencoder):
        prefix = 0 if part.no_embed_class else part.num_prefix_tokens
        part.pos_embed.copy_(sines_and_cosines(prefix, part.patch_embed.grid_size, part.embed_dim))
        for token in (part.cls_token, part.reg_token, part.mask_token):
            if token is not None:
                nn.init.normal_(token, std=_STD)
    elif isinstance(part, nn.Linear | nn.Conv2d):
        nn.init.xavier_uniform_(part.weight.flatten(1))
        if part.bias is not None:
            nn.init.zeros_(part.bias)
    elif hasattr(part, "reset_parameters"):
        part.reset_parameters()  # type: ignore[operator]
