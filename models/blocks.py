"""What a block is made of: whether all are alike, and what may take their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from timm.layers import Attention, DropPath, Mlp
from timm.models.vision_transformer import Block
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


# -- timm's plain block: norm, attention, norm, MLP ------------------------------------

PLAIN_BLOCK: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"), ("width",)),
    "attn.qkv.weight": ("heads", "width"),
    "attn.qkv.bias": ("heads",),
    **dict.fromkeys(("attn.q_norm.weight", "attn.q_norm.bias"), ("head",)),
    **dict.fromkeys(("attn.k_norm.weight", "attn.k_norm.bias"), ("head",)),
    "attn.norm.weight": ("heads",),
    "attn.norm.bias": ("heads",),
    "attn.proj.weight": ("width", "heads"),
    "attn.proj.bias": ("width",),
    "mlp.fc1.weight": ("hidden", "width"),
    "mlp.fc1.bias": ("hidden",),
    "mlp.norm.weight": ("hidden",),
    "mlp.norm.bias": ("hidden",),
    "mlp.fc2.weight": ("width", "hidden"),
    "mlp.fc2.bias": ("width",),
    "ls1.gamma": ("width",),
    "ls2.gamma": ("width",),
}
"""What the dimensions of each parameter are. Those of qkv hold the heads of queries, then those
of keys, then those of values."""


def why_not_plain(block: nn.Module) -> str | None:
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
    reason = why_not_plain(block)
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
