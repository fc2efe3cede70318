"""What is used of timm beyond its documented interface, in one place.

With another version than it was written for, read these against timm's sources again.
"""

import contextlib
import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

import timm
import torch
from timm.layers import AttentionPoolLatent, AttentionPoolPrr
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    get_mixed_freqs,
    make_coords_dinov3,
)
from timm.layers.pos_embed_sincos import init_random_2d_freqs as init_random_2d_freqs
from timm.models import vision_transformer
from timm.models.eva import Eva
from timm.models.naflexvit import (
    NaFlexVit,
    NaFlexVitCfg,
    _create_naflexvit_from_classic,
)
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from timm.models.vision_transformer import get_init_weights_vit as get_init_weights_vit
from timm.optim.muon import _COEFFICIENTS, _is_suitable_for_muon
from torch import nn

from models.positions import (
    Grid,
    PartOfPositions,
    TokenPart,
    pool_over_parts,
    replace_positions,
)

WRITTEN_FOR = {"timm": "1.0.31"}

SELF_INITIALIZED = (AttentionPoolLatent, AttentionPoolPrr, ResPostBlock)
"""Modules whose constructor calls their ``init_weights``: every scheme leaves that to them."""

MUON_COEFFICIENTS = [*_COEFFICIENTS["quintic"]]
"""Of the five Newton-Schulz iterations that ``timm.optim.Muon`` makes by default."""


def is_suitable_for_muon(shape: torch.Size) -> bool:
    """Return True if ``timm.optim.Muon`` orthogonalizes a parameter of this shape; AdamW updates
    others."""
    return bool(_is_suitable_for_muon(torch.empty(shape, device="meta")))


# -- building a model -----------------------------------------------------------------


def taken_arguments(kind: type[nn.Module]) -> dict[str, Any]:
    """Return the arguments that the constructor of ``kind`` takes, with their defaults, but for the
    device and the dtype, which the caller may not choose."""
    parameters = inspect.signature(kind.__init__).parameters
    return {
        name: parameter.default
        for name, parameter in parameters.items()
        if name not in ("self", "device", "dtype")
    }


@contextlib.contextmanager
def arguments_given_to(*kinds: type[nn.Module]) -> Iterator[dict[str, Any]]:
    """Yield a dict that will hold the keyword arguments that one of ``kinds`` is made with inside:
    timm's functions merge a name's own arguments with the caller's and store neither."""
    seen: dict[str, Any] = {}
    constructors = {kind: kind.__init__ for kind in kinds}

    def watched(kind: type[nn.Module]) -> Any:
        @functools.wraps(constructors[kind])
        def construct(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            if type(self) is kind:
                seen.update(kwargs)
            constructors[kind](self, *args, **kwargs)

        return construct

    try:
        for kind in kinds:
            kind.__init__ = watched(kind)  # type: ignore[method-assign]
        yield seen
    finally:
        for kind, constructor in constructors.items():
            kind.__init__ = constructor  # type: ignore[method-assign]


def checkpoint_filter(name: str) -> Callable[..., dict[str, torch.Tensor]]:
    """Return the function (state dict, model) that converts published weights for timm's model
    ``name``, with its own arguments; VisionTransformer's for models of other names, and for
    NaFlexVits."""
    found: Callable[..., dict[str, torch.Tensor]] = vision_transformer.checkpoint_filter_fn
    architecture = name.partition(".")[0]
    if not timm.is_model(architecture) or architecture.startswith("naflexvit_"):
        return found

    def build(*args: Any, pretrained_filter_fn: Any = found, **kwargs: Any) -> None:
        nonlocal found
        found = pretrained_filter_fn

    create = timm.model_entrypoint(architecture)
    module: Any = sys.modules[create.__module__]
    before, module.build_model_with_cfg = module.build_model_with_cfg, build
    try:
        create()
    finally:
        module.build_model_with_cfg = before
    return found


# -- values ---------------------------------------------------------------------------


def why_buffers_unknown(model: nn.Module) -> str | None:
    """Return which buffer cannot be computed from the model's settings; None if all can."""
    saved = model.state_dict().keys() - dict(model.named_parameters()).keys()
    if saved:
        return f"it has the persistent buffer {min(saved)}, which cannot be sharded or saved"
    for name, part in model.named_modules():
        has_buffers = next(part.buffers(recurse=False), None) is not None
        if has_buffers and not hasattr(part, "init_non_persistent_buffers"):
            return f"{name} has buffers that no function computes"
    return None


def computed_buffers(part: nn.Module) -> dict[str, torch.Tensor]:
    """Return the module's own buffers that no state dict holds, by name, computed on the CPU in
    fp32 (in a lower precision angles are far off) by a copy with tensors of its own."""
    twin = copy.copy(part)  # shares everything, but for what is replaced here

    def empty(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        copies = dict(tensors)
        for name, tensor in tensors.items():
            if tensor is not None:
                dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
                copies[name] = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        return copies

    twin.__dict__["_parameters"] = empty(part._parameters)  # timm reads the device from them
    twin.__dict__["_buffers"] = empty(part._buffers)
    twin.init_non_persistent_buffers()  # type: ignore[operator]
    names = part._non_persistent_buffers_set & twin._buffers.keys()
    return {name: twin._buffers[name] for name in names}  # type: ignore[misc]


# -- forward pass ---------------------------------------------------------------------


def put_blocks(model: nn.Module, stack: str, blocks: nn.Module) -> None:
    """Do what ``ModelSpec.put_blocks`` says."""
    setattr(model, stack, blocks)
    if not isinstance(model, Eva):  # a VisionTransformer calls its blocks as one module already
        return

    def features(x: torch.Tensor, attn_mask: None = None, is_causal: bool = False) -> torch.Tensor:
        """Compute what ``Eva.forward_features`` does without a mask, its blocks called once."""
        assert attn_mask is None
        assert not is_causal
        x, rope = model._pos_embed(model.patch_embed(x))
        given = {} if rope is None else {"rope": rope}
        how = "stacked" if model.rope_mixed else "shared"
        return model.norm(model.blocks(model.norm_pre(x), **{how: given}))

    model.forward_features = features


# -- other grids than its own -----------------------------------------------------------


def compute_on_grids(
    model: nn.Module, positions: Mapping[Grid, Callable[[torch.Tensor], torch.Tensor]]
) -> None:
    """Let a VisionTransformer also compute with images of these grids of patches; ``positions``:
    functions from its position embedding to that of each grid."""
    assert isinstance(model, VisionTransformer)
    patches, embed, add_positions = model.patch_embed, model.patch_embed.forward, model._pos_embed
    patches.strict_img_size = False
    resample: Callable[[torch.Tensor], torch.Tensor] | None = None

    def embed_any_grid(images: torch.Tensor) -> torch.Tensor:
        nonlocal resample
        height, width = patches.dynamic_feat_size(images.shape[-2:])
        resample = positions.get((height, width))
        return embed(images)

    def add_resampled(x: torch.Tensor) -> torch.Tensor:
        if resample is None:
            return add_positions(x)
        before = {key: value for key, value in vars(model).items() if key == "pos_embed"}
        # Python finds an attribute before a parameter of the same name. (FSDP may have put one
        # there already.)
        vars(model)["pos_embed"] = resample(model.pos_embed).to(model.pos_embed.dtype)
        try:
            return add_positions(x)
        finally:
            del vars(model)["pos_embed"]
            vars(model).update(before)

    patches.forward, model._pos_embed = embed_any_grid, add_resampled


# -- rotary positions -------------------------------------------------------------------


def rescale_coords(rope: Any, index: int) -> None:
    """Let ``rope`` multiply its coordinates by the entry ``index`` of its ``coord_factors`` in
    training, once it has some (``models.positions.set_rope_factors``), in place of timm's own
    factor, which each process would draw for itself, and on the host."""
    without_factors = rope.get_embed
    rope.coord_factors = None

    def get_embed(shape: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        factors = rope.coord_factors
        if factors is None or not rope.training:
            return without_factors(shape, dtype)
        factor = factors[index : index + 1]
        # What timm's own does, all coordinates multiplied: computed on the devices.
        if isinstance(rope, RotaryEmbeddingDinoV3):
            how = (rope.normalize_coords, rope.grid_indexing, rope.grid_offset)
            coords = make_coords_dinov3(*rope.feat_shape, *how, device=rope.periods.device)
            return torch.cat(rope._get_pos_embed_from_coords(coords * factor), dim=-1)
        if isinstance(rope, RotaryEmbeddingMixed):
            return get_mixed_freqs(rope.freqs, rope.t_x * factor, rope.t_y * factor)
        assert isinstance(rope, RotaryEmbeddingCat)
        # Angles are products of bands and coordinates.
        return rope._build_embed_cat(rope.feat_shape, rope.bands * factor)

    rope.get_embed = get_embed


# -- NaFlexVit --------------------------------------------------------------------------


_OF_CLASSIC = ("no_embed_class", "dynamic_img_size", "scale_attn_norm", "scale_mlp_norm")
"""Arguments of a VisionTransformer that timm converts to those of a NaFlexVit, or drops."""


def naflex_arguments(name: str, classic: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments of the NaFlexVit that timm builds for ``name``, or, where given, for the
    arguments of a VisionTransformer: all of them, but for the device and the dtype.

    Raises TypeError or ValueError if timm has none.
    """
    own = {"in_chans": 3, "num_classes": 1000, "img_size": None}
    with arguments_given_to(NaFlexVit) as given:
        if classic is None:
            convert = {} if name.startswith("naflexvit_") else {"use_naflex": True}
            timm.create_model(name, device="meta", **convert)
        else:
            known = {field.name for field in fields(NaFlexVitCfg)} | own.keys() | {*_OF_CLASSIC}
            default = taken_arguments(VisionTransformer)
            for key in classic.keys() - known:
                if classic[key] != default[key]:
                    raise TypeError(f"NaFlexVit does not accept <{key}>")
            converted = {key: value for key, value in classic.items() if key in known}
            if converted.get("pos_embed") == "learn":
                converted["pos_embed"] = "learned"
            _create_naflexvit_from_classic(name, device="meta", **converted)
    config = asdict(given.pop("cfg", None) or NaFlexVitCfg())
    config |= own
    return config | {key: value for key, value in given.items() if key in config}


def nominal_size(model: NaFlexVit, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return the height and width in pixels of the images that its positions are for."""
    size, patch = arguments["img_size"], model.embeds.patch_size
    if size is not None:
        return (size, size) if isinstance(size, int) else tuple(size)
    rows, columns = model.embeds.pos_embed_grid_size or (16, 16)
    return rows * patch[0], columns * patch[1]


def why_not_by_patch(model: NaFlexVit, most_positions: int) -> str | None:
    """Return why what timm computes for each grid cannot be computed for each patch; or None."""
    embeds, rope = model.embeds, model.rope
    if not embeds.is_linear or embeds.norm_input is not None or embeds.enable_patch_interpolator:
        return "its patch embedding is not a single linear layer"
    if not embeds.channels_last:
        return "its patches are channels-first"
    if embeds.pos_embed is not None:
        kind, cubic = embeds.pos_embed_interp_mode, embeds.pos_embed_interp_mode == "bicubic"
        if embeds.pos_embed_use_grid_sample:
            return "its positions are resampled with grid_sample"
        if kind not in ("bilinear", "bicubic") or (cubic and not embeds.pos_embed_antialias):
            return f"its positions are resampled with {kind} without antialiasing"
        rows, columns = embeds.pos_embed.shape[1:3]
        if rows * columns > most_positions:
            return f"its {rows} x {columns} positions exceed the limit of {most_positions:,}"
    if rope is not None and not isinstance(rope, RotaryEmbeddingCat | RotaryEmbeddingDinoV3):
        return f"its rotary positions are timm's {type(rope).__name__}"
    if rope is not None and rope.aug_active:
        return (
            "<rope_rescale_coords> and shifted or jittered coordinates apply to whole batches only"
        )
    return None


# -- a part of the tokens -------------------------------------------------------------


def compute_on_part(
    model: nn.Module, part: TokenPart, parameters: Mapping[str, int]
) -> dict[str, PartOfPositions]:
    """Do what ``ModelSpec.compute_on_part`` says, with its ``token_parameters``."""
    assert isinstance(model, Eva | VisionTransformer)
    model.patch_embed.strict_img_size = False  # it is given fewer rows than its images have
    positions = {
        name: replace_positions(model, name, prefix, part) for name, prefix in parameters.items()
    }
    embed, pool = model._pos_embed, model.pool

    def embed_part(x: torch.Tensor) -> Any:
        for name, module in positions.items():
            setattr(model, name, module())
        embedded = embed(x)
        for name in positions:
            delattr(model, name)
        if not isinstance(embedded, tuple):
            return embedded
        x, rope = embedded
        return x, None if rope is None else part.own(rope, rope.dim() - 2)

    def pool_all(x: torch.Tensor, pool_type: str | None = None) -> torch.Tensor:
        if model.attn_pool is not None:  # its attention sees all tokens, as in blocks
            return pool(x, pool_type)
        with_prefix = bool(getattr(model, "pool_include_prefix", False))
        kind = pool_type or model.global_pool
        return pool_over_parts(x, part, kind, model.num_prefix_tokens, with_prefix)

    model._pos_embed, model.pool = embed_part, pool_all
    return positions
