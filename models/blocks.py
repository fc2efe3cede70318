"""What a block is made of: whether all are alike, and what may take their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.layers import Attention, AttentionRope, DropPath, GluMlp, Mlp, SwiGLU
from timm.models.eva import EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block, ResPostBlock
from torch import nn

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
