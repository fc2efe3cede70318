"""Models of images of any size and shape: timm's NaFlexVit, computed on sequences that hold several
images each, all of one length (NaViT, arXiv 2307.06304).

timm computes on a batch of images that are padded to the longest, or to a few lengths. Here a
sequence has the tokens of whole images one after the other; attention and pooling keep them apart.
All shapes are the same in each step. What timm does once for each grid of a batch is computed for
each patch, from its place in its image.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.layers import RotaryEmbeddingDinoV3
from timm.models.naflexvit import NaFlexEmbeds, NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models import timm_models, timm_private
from models.blocks import blocks_differ
from models.config import (
    NAFLEX_FAMILY,
    PRESETS,
    ModelError,
    VitConfig,
    check_patches,
    check_taken,
    check_width,
)
from models.initialize import initialize, vision_transformer_scheme
from models.spec import ModelSizes, ModelSpec, StackRun, TimmModel, train_flops_of
from models.timm_models import as_json, preprocessing_of

# ------------------------------------------------------------------------------------------------
# The model.


Packed = dict[str, torch.Tensor]
"""The tokens of a batch of sequences, by timm's names. An image has its class and register tokens
first, then its patches; it is in one sequence, whole.

- ``patches``: (sequences, tokens, values), normalized pixels by row, column and channel, as in
  timm's NaFlexVit; of class and register tokens anything.
- ``patch_coord``: (sequences, tokens, 4), integers: row and column of the patch, rows and columns
  of its image. Of class and register tokens: the token's number, then zeros.
- ``segment_ids``: (sequences, tokens), int32: the number of the token's image, from 1 on; 0:
  padding.
"""


class PackedVit(NaFlexVit):
    """NaFlexVit with the same weights by the same names, which maps ``Packed`` to logits (sequences
    x images, classes), of ``images`` places for images in each sequence."""

    def __init__(self, images: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.images = images
        self.mask_of: Callable[[torch.Tensor], torch.Tensor] = same_image
        """What attention is given as its mask, made of ``segment_ids`` of ``Packed``. A backend
        sets it whose product of attention takes something else."""
        for block in self.blocks:
            if hasattr(block.attn, "num_prefix_tokens"):  # rotated as positions say: not at all
                block.attn.num_prefix_tokens = 0

    def forward(self, packed: Packed) -> torch.Tensor:
        return self.forward_head(self.forward_features(packed), packed)

    def forward_features(self, packed: Packed) -> torch.Tensor:
        """Return the tokens after all blocks and the norm, (sequences, tokens, width)."""
        x = self.norm_pre(self.embeds.pos_drop(self._embed(packed)))
        shared = {"attn_mask": self.mask_of(packed["segment_ids"])}
        if self.rope is not None:
            shared["rope"] = rotations_at(self.rope, packed["patch_coord"])
        if isinstance(self.blocks, nn.Sequential):
            for block in self.blocks:
                x = block(x, **shared)
        else:  # as ``ModelSpec.put_blocks`` has it
            x = self.blocks(x, shared=shared)
        return self.norm(x)

    def forward_head(
        self, tokens: torch.Tensor, packed: Packed, pre_logits: bool = False
    ) -> torch.Tensor:
        """Return logits, or what the head is given, of each place for an image: (sequences x
        images, ...)."""
        x = self.head_drop(self.fc_norm(self._pool_images(tokens, packed).flatten(0, 1)))
        return x if pre_logits else self.head(x)

    def _embed(self, packed: Packed) -> torch.Tensor:
        embeds, patch_coord = self.embeds, packed["patch_coord"]
        x = embeds.norm(embeds.proj(packed["patches"]))
        x = x + positions_at(embeds, patch_coord).to(x.dtype)
        if not self.num_prefix_tokens:
            return x
        first = [token for token in (embeds.cls_token, embeds.reg_token) if token is not None]
        tokens = torch.cat(first, 1)[0]
        # By a product with ones and zeros: exact, and its gradient needs no sum without an order.
        number = torch.where(patch_coord[..., 2] == 0, patch_coord[..., 0], -1)
        chosen = number[..., None] == torch.arange(len(tokens), device=number.device)
        prefix = torch.matmul(chosen.to(tokens.dtype), tokens).to(x.dtype)
        return torch.where((number >= 0)[..., None], prefix, x)

    def _pool_images(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Pool the tokens of each image, (sequences, images, width), as timm does. Of a place
        without an image the result is finite."""
        is_patch, kind = packed["patch_coord"][..., 2] > 0, self.global_pool
        if kind == "token":
            return _sum_over(_tokens_of(packed, self.images, first=True), x)
        of_image = _tokens_of(packed, self.images)
        if not self.pool_include_prefix:
            of_image = of_image & is_patch[:, None]
        if kind == "map":
            return self._attend_images(x, of_image)
        pooled = []
        if "avg" in kind:
            pooled.append(_mean_over(of_image, x))
        if "max" in kind:  # image by image: of all at once the memory would be that of so many x
            lowest = torch.finfo(x.dtype).min
            largest = [
                torch.where(chosen[..., None], x, lowest).max(1).values
                for chosen in of_image.unbind(1)
            ]
            present = of_image.any(2, keepdim=True)
            pooled.append(torch.where(present, torch.stack(largest, 1), 0.0).to(x.dtype))
        return pooled[0] if len(pooled) == 1 else 0.5 * (pooled[0] + pooled[1])

    def _attend_images(self, x: torch.Tensor, of_image: torch.Tensor) -> torch.Tensor:
        """Pool by attention as timm's AttentionPoolLatent, its query once for each image."""
        pool: Any = self.attn_pool
        # A query without keys would be 0 / 0: it sees all tokens, and counts for nothing.
        mask = of_image | ~of_image.any(2, keepdim=True)
        query = pool.q(pool.latent).unflatten(-1, (pool.num_heads, -1)).transpose(1, 2)
        keys, values = pool.kv(x).unflatten(-1, (2, pool.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query = pool.q_norm(query).expand(len(x), -1, self.images, -1)
        pooled = F.scaled_dot_product_attention(
            query, pool.k_norm(keys), values, attn_mask=mask[:, None]
        )
        pooled = pool.proj_drop(pool.proj(pooled.transpose(1, 2).flatten(2)))
        return pooled + pool.mlp(pool.norm(pooled))


def _tokens_of(packed: Packed, images: int, *, first: bool = False) -> torch.Tensor:
    """Return which tokens are those of each image, bool (sequences, images, tokens); ``first``: its
    first token alone, the class token of models that have one."""
    numbers = torch.arange(1, images + 1, device=packed["segment_ids"].device)
    of_image = packed["segment_ids"][:, None] == numbers[:, None]
    if first:
        row, _, rows, _ = packed["patch_coord"].unbind(-1)
        of_image = of_image & ((rows == 0) & (row == 0))[:, None]
    return of_image


def _sum_over(tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the sums of ``x``, (sequences, tokens, width), over sets of tokens, (sequences, sets,
    tokens)."""
    return torch.matmul(tokens.to(x.dtype), x)


def _mean_over(tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As ``_sum_over``, the means; 0 of a set without tokens."""
    return (_sum_over(tokens, x) / tokens.sum(2, keepdim=True).clamp(min=1)).to(x.dtype)


def same_image(segments: torch.Tensor) -> torch.Tensor:
    """Return which tokens attend to each other, bool (sequences, 1, tokens, tokens). Padding does
    to padding: so every token has something to attend to."""
    return (segments[:, :, None] == segments[:, None])[:, None]


# ------------------------------------------------------------------------------------------------
# Positions, of each patch by itself.


_CUBIC = -0.5
"""The a of PyTorch's bicubic interpolation with antialiasing."""


def positions_at(embeds: NaFlexEmbeds, patch_coord: torch.Tensor) -> torch.Tensor:
    """Return NaFlexEmbeds' position embedding of patches at ``patch_coord``, as ``Packed`` has
    them, (..., width), fp32: what ``F.interpolate`` would resample the table to, at each patch. 0
    without one."""
    row, column, rows, columns = patch_coord.float().unbind(-1)
    # Tokens that are no patches get the values of some patch: of 0 / 0 the gradient would be NaN.
    rows, columns = rows.clamp(min=1), columns.clamp(min=1)
    row, column = torch.minimum(row, rows - 1), torch.minimum(column, columns - 1)
    if embeds.pos_embed_ar_preserving:
        rows = columns = torch.maximum(rows, columns)
    kind = "cpu" if patch_coord.is_meta else patch_coord.device.type  # meta has no autocast
    with torch.autocast(kind, enabled=False):
        if embeds.pos_embed_type == "learned":
            table = embeds.pos_embed[0].float()
            how = {
                "cubic": embeds.pos_embed_interp_mode == "bicubic",
                "antialias": embeds.pos_embed_antialias,
                "align_corners": embeds.pos_embed_align_corners,
            }
            by_row = _weights_at(row, rows, table.shape[0], **how)
            by_column = _weights_at(column, columns, table.shape[1], **how)
            by_both = (by_row[..., :, None] * by_column[..., None, :]).flatten(-2)
            return torch.matmul(by_both, table.flatten(0, 1))
        if embeds.pos_embed_type == "factorized":
            tables = embeds.pos_embed_y[0].float(), embeds.pos_embed_x[0].float()
            by_row, by_column = (
                _weights_at(place, size, len(table))
                for place, size, table in zip((row, column), (rows, columns), tables, strict=True)
            )
            return torch.matmul(by_row, tables[0]) + torch.matmul(by_column, tables[1])
    return row.new_zeros(1)


def _weights_at(
    place: torch.Tensor,
    size: torch.Tensor,
    entries: int,
    *,
    cubic: bool = False,
    antialias: bool = False,
    align_corners: bool = False,
) -> torch.Tensor:
    """Return the weights of a table's entries, (..., entries), in its value at ``place`` after it
    is resampled to ``size``, as PyTorch's ``F.interpolate`` computes them along one dimension."""
    entry = torch.arange(entries, device=place.device, dtype=torch.float32)
    if align_corners:
        center = place * ((entries - 1) / (size - 1).clamp(min=1))
    else:
        center = (place + 0.5) * (entries / size) - 0.5
    away = entry - center[..., None]
    if not antialias:  # between two entries; beyond the ends as at the ends
        return (1 - (entry - center.clamp(0, entries - 1)[..., None]).abs()).clamp(min=0)
    if not align_corners:  # a larger step between positions takes more entries
        away = away / (entries / size).clamp(min=1)[..., None]
    away = away.abs()
    weights = (1 - away).clamp(min=0)
    if cubic:
        a = _CUBIC
        near = ((a + 2) * away - (a + 3)) * away * away + 1
        far = ((a * away - 5 * a) * away + 8 * a) * away - 4 * a
        weights = torch.where(away < 1, near, torch.where(away < 2, far, 0.0))
    return weights / weights.sum(-1, keepdim=True)


def rotations_at(rope: Any, patch_coord: torch.Tensor) -> torch.Tensor:
    """Return the sines and cosines of rotary positions at ``patch_coord``, as ``Packed`` has them:
    (sequences, 1, tokens, 2 x width of a head), fp32. Class and register tokens are not rotated."""
    row, column, rows, columns = patch_coord.float().unbind(-1)
    sizes = [rows.clamp(min=1), columns.clamp(min=1)]
    is_dinov3 = isinstance(rope, RotaryEmbeddingDinoV3)
    coordinates = []
    for place, size in zip((row, column), sizes, strict=True):
        if is_dinov3:
            largest, smallest = torch.maximum(*sizes), torch.minimum(*sizes)
            by = {"max": largest, "min": smallest, "separate": size}[rope.normalize_coords]
            coordinates.append(2 * ((place + 0.5 + rope.grid_offset) / by) - 1)
        else:
            coordinates.append(place + rope.grid_offset)
    if not is_dinov3 and rope.ref_feat_shape is not None:
        coordinates = [
            x / size * reference
            for x, size, reference in zip(coordinates, sizes, rope.ref_feat_shape, strict=True)
        ]
    if rope.grid_indexing == "xy":
        coordinates.reverse()
    places_of_both = torch.stack(coordinates, -1)[..., None]
    if is_dinov3:
        angles = (2 * math.pi * places_of_both / rope.periods).flatten(-2)
    else:
        angles = (places_of_both * rope.bands).flatten(-2)
    angles = torch.where((rows > 0)[..., None], angles, 0.0)
    sine, cosine = (
        torch.cat([x, x], -1) if rope.rotate_half else x.repeat_interleave(2, -1)
        for x in (angles.sin(), angles.cos())
    )
    return torch.cat([sine, cosine], -1)[:, None]


# ------------------------------------------------------------------------------------------------
# Its spec.

_SEQUENCES = ("token_budget", "max_images_per_sequence")
_RESAMPLING = "pos_embed_interp_mode"
_TOKEN_BUDGET = 1024
_TOKENS_PER_IMAGE = 64
"""A sequence has a place for an image by default for so many tokens: an image of 8 x 8 patches."""
_MOST_IMAGES = 255
"""An image's number in its sequence is a byte."""
_ANY_NAFLEX = "naflexvit_base_patch16_gap"
"""timm's name of a NaFlexVit, of which all arguments are given."""
_MOST_POSITIONS = 4096
"""Of a learned grid of positions: each patch weighs all of them."""


@dataclass(frozen=True)
class SequenceShape:
    """Sequences with the tokens of several whole images of any size."""

    patch: tuple[int, int]
    """Height and width of a patch in pixels."""
    prefix: int
    """Number of class and register tokens per image, before its patches."""
    tokens: int
    """Length of a sequence."""
    images: int
    """Maximum number of images per sequence."""

    def values_of_patch(self, channels: int) -> int:
        return math.prod(self.patch) * channels


class NativeSpec(ModelSpec):
    """A NaFlexVit made with ``arguments``, NaFlexVit's own, on sequences as ``sequences`` says."""

    training_settings = _SEQUENCES

    def __init__(
        self,
        name: str,
        overrides: Mapping[str, Any],
        arguments: Mapping[str, Any],
        sequences: Mapping[str, Any],
        preprocessing: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises ModelError if the arguments are incompatible, or not computed here."""
        self.arguments, self.sequences = dict(arguments), dict(sequences)
        settings = {**arguments, **sequences, "native_resolution": True}
        super().__init__(name, overrides, {key: as_json(v) for key, v in settings.items()})
        self.preprocessing = None if preprocessing is None else dict(preprocessing)
        check_width(arguments)
        meta: Any = self.meta
        if arguments["global_pool"] == "token" and not arguments["class_token"]:
            raise ModelError("<global_pool> token requires <class_token>")
        if reason := timm_private.why_not_by_patch(meta, _MOST_POSITIONS):
            raise ModelError(f"{name} does not support native resolution: {reason}")
        if difference := blocks_differ([*meta.blocks], settings=False):
            raise ModelError(f"the blocks of {name} differ: {difference}")
        prefix = self.shape.prefix
        if self.shape.tokens <= prefix:
            raise ModelError(
                f"<token_budget> {self.shape.tokens} is too small: the {prefix} class and "
                "register tokens of an image leave no room for a patch"
            )

    @property
    def converted(self) -> dict[str, str]:  # type: ignore[override]
        names = {name: name.removeprefix("embeds.") for name, _ in self.meta.named_parameters()}
        names = {name: other for name, other in names.items() if name != other}
        return {
            name: f"patch_embed.{other}" if other.startswith("proj.") else other
            for name, other in names.items()
        }

    def convert(
        self, name: str, values: torch.Tensor, read: Callable[[str], torch.Tensor | None]
    ) -> torch.Tensor:
        """As timm's conversion of a VisionTransformer: class and register tokens, which have no
        position here, take theirs in."""
        wanted = self.meta.get_parameter(name).shape
        tokens = [token for key in ("cls_token", "reg_token") if (token := read(key)) is not None]
        if name == "embeds.proj.weight" and values.dim() == 4:
            values = values.permute(0, 2, 3, 1).flatten(1)  # channels last
        elif name == "embeds.pos_embed":
            if values.dim() == 3:  # (1, tokens, width), class and register tokens first, if at all
                side = math.isqrt(values.shape[1])
                first = values.shape[1] - side * side
                if first not in (0, sum(token.shape[1] for token in tokens)):
                    raise ModelError(
                        f"pos_embed with {values.shape[1]} tokens is not a square grid"
                    )
                values = values[:, first:].unflatten(1, (side, side))
            if values.shape[1:3] != wanted[1:3]:
                values = F.interpolate(
                    values.float().permute(0, 3, 1, 2),
                    wanted[1:3],
                    mode=self.arguments["pos_embed_interp_mode"],
                    antialias=self.arguments["pos_embed_antialias"],
                ).permute(0, 2, 3, 1)
        elif name in ("embeds.cls_token", "embeds.reg_token"):
            positions = read("pos_embed")
            if positions is not None and math.isqrt(positions.shape[1]) ** 2 != positions.shape[1]:
                first = tokens[0].shape[1] if name == "embeds.reg_token" and tokens[1:] else 0
                values = values + positions[:, first : first + values.shape[1]]
        if values.shape != wanted:
            raise ModelError(
                f"{name} has shape {tuple(values.shape)}, but the model needs {tuple(wanted)}"
            )
        return values

    def as_timm(self) -> TimmModel | None:
        if any(v != self.settings[name] for name, v in self.arguments.items() if "layer" in name):
            return None  # a layer that has no name
        arguments = {name: self.settings[name] for name in self.arguments}
        return TimmModel(_ANY_NAFLEX, arguments, "embeds.proj", fixed_size=False)

    def image_features(
        self, tokens: torch.Tensor, given: Packed
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        first = _sum_over(_tokens_of(given, self.shape.images, first=True), tokens)
        patches = _tokens_of(given, self.shape.images) & (given["patch_coord"][..., 2] > 0)[:, None]
        return first.flatten(0, 1), _mean_over(patches, tokens).flatten(0, 1), None

    @property
    def segments(self) -> int:  # type: ignore[override]
        return self.shape.images

    @functools.cached_property
    def shape(self) -> SequenceShape:
        model: Any = self.meta
        tokens, images = (self.sequences[key] for key in _SEQUENCES)
        return SequenceShape(model.embeds.patch_size, model.num_prefix_tokens, tokens, images)

    def build(self) -> nn.Module:
        # Patches are dropped on the host, before images become sequences.
        arguments = self.arguments | {"patch_drop_rate": 0.0, "weight_init": "", "device": "meta"}
        images = self.sequences["max_images_per_sequence"]
        try:
            return PackedVit(images, **arguments)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(f"timm cannot build {self.name}: {reason}") from None

    def initialize(self, module: nn.Module, name: str, *, seed: int) -> None:
        settings = self.settings
        scheme = vision_transformer_scheme(
            weight_init=settings["weight_init"],
            num_classes=settings["num_classes"],
            fix_init=settings["fix_init"],
        )
        initialize(module, name, seed=seed, scheme=scheme)

    def why_no_token_part(self) -> str | None:
        return "its sequences contain several images (native resolution)"

    def compute_on_part(self, model: nn.Module, part: Any) -> Any:
        raise NotImplementedError

    @property
    def token_parameters(self) -> dict[str, int]:
        return {}  # positions are a grid, of no certain tokens

    @property
    def has_class_token(self) -> bool:
        return self.meta.embeds.cls_token is not None  # type: ignore[union-attr]

    @functools.cached_property
    def sizes(self) -> ModelSizes:
        model: Any = self.meta
        height, width = timm_private.nominal_size(model, self.arguments)
        high, wide = model.embeds.patch_size
        attention = model.blocks[0].attn
        last = [part for name, part in model.blocks[0].named_modules() if name.endswith("fc2")]
        return ModelSizes(
            input_shape=(model.in_chans, height, width),
            num_classes=self.settings["num_classes"],
            grid=(height // high, width // wide),
            num_tokens=self.shape.tokens,
            train_tokens=self.shape.tokens,
            depth=len(model.blocks),
            embed_dim=model.embed_dim,
            num_heads=attention.num_heads,
            head_dim=attention.head_dim,
            value_dim=attention.head_dim,
            hidden=last[0].in_features,
            attn_drop_rate=self.settings["attn_drop_rate"],
        )

    @property
    def runs(self) -> list[StackRun]:
        sizes, shape = self.sizes, self.shape
        pixels = shape.tokens * shape.values_of_patch(sizes.input_shape[0])
        outputs = shape.images * sizes.num_classes
        return [StackRun("blocks", shape.tokens, pixels, outputs, self.train_flops_per_image)]

    def example(self) -> tuple[Any, ...]:
        """Return a sequence of one image of the model's own size, which may be larger than a
        sequence in training."""
        tokens = self.shape.prefix + self.sizes.num_patches
        values = self.shape.values_of_patch(self.sizes.input_shape[0])
        packed = {
            "patches": torch.empty(1, tokens, values, device="meta"),
            "patch_coord": torch.empty(1, tokens, 4, dtype=torch.int32, device="meta"),
            "segment_ids": torch.empty(1, tokens, dtype=torch.int32, device="meta"),
        }
        return (packed,)

    @functools.cached_property
    def train_flops_per_image(self) -> float:
        """FLOPs of a whole sequence of images of the model's own size: a token attends to those of
        its image alone."""
        model = self.build()
        model.images = 1  # type: ignore[assignment]
        of_image = train_flops_of(model, self.example())
        return of_image * self.shape.tokens / (self.shape.prefix + self.sizes.num_patches)


# ------------------------------------------------------------------------------------------------
# The family.

_NAMES = {"scale_attn_norm": "scale_attn_inner_norm"}
"""NaFlexVit's names of arguments that VisionTransformer has, too."""
_CLASSES = 1000
"""For a model that timm has without a head."""


def names() -> list[str]:
    """Return the ends of timm's names of NaFlexVits, behind ``NAFLEX_FAMILY``."""
    prefix = NAFLEX_FAMILY.removeprefix("timm/")
    return sorted(name.removeprefix(prefix) for name in timm.list_models(module="naflexvit"))


def open_model(name: str, overrides: Mapping[str, Any]) -> NativeSpec | None:
    """Return the NaFlexVit ``name``, behind ``NAFLEX_FAMILY``; None if timm has no such model.
    Raises ModelError as ``rebuild``."""
    full_name = NAFLEX_FAMILY + name
    return rebuild(full_name, overrides) if timm.is_model(full_name[5:]) else None


def rebuild(name: str, overrides: Mapping[str, Any]) -> NativeSpec:
    """Return a NaFlexVit in place of the model ``name``, a preset or timm's, with ``overrides``
    over its own arguments. Raises ModelError if timm has none, or the arguments do not fit."""
    given = {n: value for n, value in overrides.items() if n not in (*_SEQUENCES, _RESAMPLING)}
    if given.pop("native_resolution", True) is False:
        raise ModelError(f"{name} supports native resolution only: remove --no-native_resolution")
    timms = name.removeprefix("timm/")
    try:
        if name in PRESETS:
            check_taken(name, given, VitConfig)
            classic = asdict(replace(PRESETS[name], **given))
            arguments = timm_private.naflex_arguments(name, classic)
        elif (
            not name.startswith(NAFLEX_FAMILY)
            and isinstance(known := timm_models.open_model(timms, given), timm_models.TimmSpec)
            and known.kind is VisionTransformer
        ):
            arguments = timm_private.naflex_arguments(timms, known.arguments)
        else:
            arguments = timm_private.naflex_arguments(timms)
            if given.get("pos_embed") == "learn":
                given["pos_embed"] = "learned"
            given = {_NAMES.get(key, key): value for key, value in given.items()}
            for argument in given:
                if argument not in arguments:
                    raise ModelError(
                        f"{name} does not accept <{argument}> (it is timm's NaFlexVit)"
                    )
            if not arguments["num_classes"]:
                arguments["num_classes"] = _CLASSES
            arguments |= given
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"timm cannot build {name} with native resolution: {reason}") from None
    arguments[_RESAMPLING] = overrides.get(_RESAMPLING, arguments[_RESAMPLING])
    if arguments["img_size"] is not None:
        check_patches(arguments["img_size"], arguments["patch_size"])

    # Sequences.
    tokens = overrides.get("token_budget", _TOKEN_BUDGET)
    images = overrides.get("max_images_per_sequence")
    if images is None:
        images = min(max(tokens // _TOKENS_PER_IMAGE, 1), _MOST_IMAGES)
    sequences = {"token_budget": tokens, "max_images_per_sequence": images}
    return NativeSpec(name, overrides, arguments, sequences, preprocessing_of(timms))
