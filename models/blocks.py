"""What a block is made of: whether all are alike, and what may take their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import (
    Attention,
    AttentionRope,
    DropPath,
    GluMlp,
    Mlp,
    SwiGLU,
    resample_abs_pos_embed,
)
from timm.models.eva import EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block, ResPostBlock
from torch import nn
from torch.overrides import TorchFunctionMode

# ------------------------------------------------------------------------------------------------
# Puts another function in the place of PyTorch's attention product, from outside of a model.


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of queries, keys and values that computes what attention does with them."""


def attentions(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of timm's in ``module``, it among them, that compute attention."""
    return (part for part in module.modules() if hasattr(part, "fused_attn"))


def use_product(attention: nn.Module, product: Product) -> None:
    """Let one module of timm's attention compute its product by ``product``.

    Call it on the module that will run: a copy of it would run the original.
    """
    # timm's own products, by TIMM_FUSED_ATTN=0, would not be seen.
    attention.fused_attn = True  # type: ignore[assignment]
    forward, mode = attention.forward, _ByProduct(product)

    def forward_with_mode(*args, **kwargs):
        with mode:
            return forward(*args, **kwargs)

    attention.forward = forward_with_mode


class _ByProduct(TorchFunctionMode):
    """Takes ``scaled_dot_product_attention`` over from PyTorch, as far as a ViT uses it."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self._product = product

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(self, q, k, v, attn_mask=None, dropout_p: float = 0.0, is_causal: bool = False):
        if attn_mask is not None or dropout_p or is_causal:
            raise NotImplementedError("attention has no mask and no dropout here")
        return self._product(q, k, v)


# ------------------------------------------------------------------------------------------------
# What a model has to know to compute with a part of an image's tokens; the rest is elsewhere.


Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TokenPart:
    """Holds which patches of each image are here, and how all parts of an image come together.

    Patches are numbered row by row; a part has consecutive ones. Class and register tokens are in
    every part, with the same values. ``sum`` and ``largest`` return the sum and the maximum over
    all parts of a tensor that each of them has, and pass gradients back to all of them.
    """

    first: int
    """The number of the first patch that is here."""
    patches: int
    """How many patches are here."""
    of: int
    """How many patches an image has."""
    sum: Reduce
    largest: Reduce

    @property
    def last(self) -> int:
        """Return the number after that of the last patch that is here."""
        return self.first + self.patches


class PartOfPositions(nn.Module):
    """The part of a learned position embedding that lies with a part of the tokens.

    Entries for class and register tokens, if there are any, come before those of the patches; the
    part with the first patch keeps them, and gives them to the others in each forward pass.
    """

    def __init__(self, whole: torch.Tensor, prefix: int, part: TokenPart) -> None:
        """Take the part of ``whole``, (1, prefix + patches, width), that goes with ``part``."""
        super().__init__()
        self._prefix, self._part = prefix, part
        self.first = prefix + part.first if part.first else 0
        """The number of the first entry that is kept here."""
        values = whole.detach()[:, self.first : prefix + part.last].clone()
        self.values = nn.Parameter(values, requires_grad=whole.requires_grad)

    def forward(self) -> torch.Tensor:
        """Return the entries of all tokens that are here: (1, prefix + patches, width).

        They are a copy: FSDP lets go of a module's parameters when its forward pass is over.
        """
        if not self._prefix:
            return self.values.clone()
        kept = self._prefix if self.first == 0 else 0
        given = self.values[:, :kept]
        if not kept:  # zeros, and yet of this parameter: all parts record the same operations
            given = nn.functional.pad(given, (0, 0, 0, self._prefix))
        return torch.cat([self._part.sum(given), self.values[:, kept:]], dim=1)


def keep_part(model: nn.Module, name: str, prefix: int, part: TokenPart) -> PartOfPositions:
    """Replace the model's parameter ``name`` by what goes with ``part``; see PartOfPositions."""
    positions = PartOfPositions(getattr(model, name), prefix, part)
    delattr(model, name)
    model.add_module(f"part_of_{name}", positions)
    return positions


def pool_over_parts(
    x: torch.Tensor, part: TokenPart, kind: str, prefix: int = 0, with_prefix: bool = False
) -> torch.Tensor:
    """Pool tokens, (batch, prefix + patches here, width), over all parts, as timm does: "token",
    "avg", "max" or "avgmax"; the first ``prefix`` tokens count only ``with_prefix``."""
    if kind == "token":
        return x[:, 0]
    patches, before = x[:, prefix:], x[:, : prefix if with_prefix else 0]

    def mean() -> torch.Tensor:
        total = part.sum(patches.sum(1, dtype=torch.float32))
        total = total + before.sum(1, dtype=torch.float32)
        return (total / (part.of + before.shape[1])).to(x.dtype)

    def largest() -> torch.Tensor:
        found = part.largest(patches.amax(1))
        return torch.maximum(found, before.amax(1)) if before.shape[1] else found

    if kind == "avg":
        return mean()
    return largest() if kind == "max" else 0.5 * (largest() + mean())


# ------------------------------------------------------------------------------------------------
# Learned position embeddings for images of other grids than a model's own.
#
# ``F.interpolate`` with mode bicubic has no lowering in torch_xla 2.9: it would bring each step to
# the CPU. What it computes is linear, and along one dimension after the other: two small matrices.


Grid = tuple[int, int]
"""How many rows and columns of patches an image has."""


class Resampling:
    """Makes of a learned position embedding that of another grid, as timm's
    ``resample_abs_pos_embed`` does (bicubic, with antialiasing)."""

    def __init__(
        self, own: Grid, grid: Grid, prefix: int, constant: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Take the model's own grid, the other one, and how many entries come before those of the
        patches; ``constant`` puts the matrices on the devices."""
        self._own, self._prefix = own, prefix
        self._rows, self._columns = (
            constant(_matrix(*sizes)) for sizes in zip(own, grid, strict=True)
        )

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return (1, prefix + patches of the other grid, width), computed in fp32, for
        (1, prefix + own patches, width); the first entries stay as they are."""
        first, patches = positions[:, : self._prefix], positions[0, self._prefix :]
        with torch.autocast(positions.device.type, enabled=False):
            by_row = patches.float().unflatten(0, self._own)
            rows = (self._rows @ by_row.flatten(1)).unflatten(1, by_row.shape[1:])
            resampled = torch.matmul(self._columns, rows).flatten(0, 1)
        return torch.cat([first, resampled[None].to(positions.dtype)], dim=1)


def _matrix(size: int, new_size: int) -> torch.Tensor:
    """Return what resamples ``size`` values to ``new_size``: (new_size, size), fp32."""
    return resample_abs_pos_embed(
        torch.eye(size)[None], [new_size, 1], [size, 1], num_prefix_tokens=0
    )[0]


# ------------------------------------------------------------------------------------------------


Made = dict[str, Any]
"""What a block is made of: for each thing in it, by a name to tell, its class, shape or value."""


def blocks_differ(blocks: Sequence[nn.Module]) -> str | None:
    """Return a line that names the first block that is not made or set like block 0, and how.

    None if all compute the same with other weights, whatever their probabilities of drop path.
    """
    first = _made_of(blocks[0]) | _settings(blocks[0])
    return _first_difference(first, [_made_of(block) | _settings(block) for block in blocks])


def parameters_differ(blocks: Sequence[nn.Module]) -> str | None:
    """Return the same for their classes and parameters alone."""
    return _first_difference(_made_of(blocks[0]), [_made_of(block) for block in blocks])


def _first_difference(first: Made, each: Sequence[Made]) -> str | None:
    for index, made in enumerate(each):
        for what in [*first, *made]:
            here, there = made.get(what, "missing"), first.get(what, "missing")
            if here != there:
                return f"in block {index} {what} is {here}, in block 0 {there}"
    return None


def _made_of(block: nn.Module) -> Made:
    made: Made = {"the block": type(block).__name__}
    made |= {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    return made


def _settings(block: nn.Module) -> Made:
    """Classes of all modules in it, and the plain values that each of them is set to."""
    found: Made = {}
    for name, part in block.named_modules():
        if isinstance(part, DropPath | nn.Identity):  # one is in the place of the other
            continue
        found[name or "the block"] = type(part).__name__
        for key, value in vars(part).items():
            plain = isinstance(value, bool | int | float | str | tuple)
            if plain and not key.startswith("_"):
                found[f"{name}.{key}" if name else key] = value
    return found


# -- what is sharded of a block's work, and how ----------------------------------------

FOLDED = {"qkv": 3, "glu": 2}
"""Dimensions of a parameter that timm folds into the one behind them, with their sizes: queries,
keys and values; what a gated MLP multiplies."""

_PROJECTIONS = ("attn.q_proj", "attn.k_proj", "attn.v_proj")
_WIDENING = ("mlp.fc1", "mlp.fc1_g", "mlp.fc1_x")
_OF_WIDTH = ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "ls1.gamma", "ls2.gamma")
_OF_HEAD = ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias")

_DIMENSIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_OF_WIDTH, "gamma_1", "gamma_2"), ("width",)),
    "attn.qkv.weight": ("qkv", "heads", "width"),
    "attn.qkv.bias": ("qkv", "heads"),
    **{f"{name}.weight": ("heads", "width") for name in _PROJECTIONS},
    **{f"{name}.bias": ("heads",) for name in _PROJECTIONS},
    **dict.fromkeys(("attn.q_bias", "attn.v_bias"), ("heads",)),
    **{f"attn.{name}": ("head",) for name in _OF_HEAD},
    **dict.fromkeys(("attn.norm.weight", "attn.norm.bias"), ("heads",)),
    "attn.proj.weight": ("width", "heads"),
    "attn.proj.bias": ("width",),
    **{f"{name}.weight": ("hidden", "width") for name in _WIDENING},
    **{f"{name}.bias": ("hidden",) for name in _WIDENING},
    **dict.fromkeys(("mlp.norm.weight", "mlp.norm.bias"), ("hidden",)),
    "mlp.fc2.weight": ("width", "hidden"),
    "mlp.fc2.bias": ("width",),
}
_GATED: dict[str, tuple[str, ...]] = {
    "mlp.fc1.weight": ("glu", "hidden", "width"),
    "mlp.fc1.bias": ("glu", "hidden"),
}
"""The same where one layer makes both of what the MLP multiplies."""


def dimensions(block: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the kinds of the dimensions of each parameter, see ``ModelSpec.block_dimensions``."""
    known = _DIMENSIONS | (_GATED if isinstance(block.mlp, GluMlp) else {})
    return {name: known[name] for name, _ in block.named_parameters()}


def why_no_tensor_parallel(block: nn.Module) -> str | None:
    """Return why ``block`` has no heads and MLP columns to shard, in a line that begins with "its",
    or None."""
    if type(block) not in (Block, ResPostBlock, EvaBlock, EvaBlockPostNorm):
        return f"its blocks are of timm's {type(block).__name__}"
    attention, mlp = block.attn, block.mlp
    if type(attention) not in (Attention, AttentionRope, EvaAttention):
        return f"its attention is timm's {type(attention).__name__}"
    if getattr(attention, "gate", None) is not None:
        return "its attention has a gate"
    if getattr(attention, "num_kv_groups", 1) > 1:
        return "its attention has fewer heads of keys than of queries"
    if type(mlp) not in (Mlp, GluMlp, SwiGLU):
        return f"its MLP is timm's {type(mlp).__name__}"
    return None


# -- what TransformerEngine's layer may stand for --------------------------------------


def _why_not_plain(block: nn.Module) -> str | None:
    """Return why ``block`` is not timm's plain one, in a line that begins with "its", or None."""
    if type(block) is not Block:
        return f"its blocks are of timm's {type(block).__name__}, not Block"
    if type(block.attn) is not Attention:
        return f"its attention is timm's {type(block.attn).__name__}, not Attention"
    if getattr(block.attn, "gate", None) is not None:
        return "its attention has a gate"
    if type(block.mlp) is not Mlp:
        return f"its MLP is timm's {type(block.mlp).__name__}, not Mlp"
    return None


def why_no_transformer_engine(block: nn.Module) -> str | None:
    """Return why TransformerEngine's layer does not compute what ``block`` does; None if it does.

    GELU and its tanh approximation, which is all that it has, count as the same.
    """
    reason = _why_not_plain(block)
    if reason:
        return reason
    assert isinstance(block, Block)
    attention, mlp = block.attn, block.mlp
    unsupported = {
        "its norm is not LayerNorm": not isinstance(block.norm1, nn.LayerNorm),
        "its activation is not GELU": "gelu" not in type(mlp.act).__name__.lower()
        or "quick" in type(mlp.act).__name__.lower(),
        "it has layer scale (<init_values>)": not isinstance(block.ls1, nn.Identity),
        "it has <scale_attn_norm>": not isinstance(attention.norm, nn.Identity),
        "it has <scale_mlp_norm>": not isinstance(mlp.norm, nn.Identity),
        "it has <proj_drop_rate>": mlp.drop1.p > 0,  # timm drops inside the MLP too
        "its <qkv_bias> is not as its <proj_bias>": (attention.qkv.bias is None)
        != (attention.proj.bias is None),
    }
    return next((text for text, found in unsupported.items() if found), None)
