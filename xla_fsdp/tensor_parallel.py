"""Tensor parallelism in a timm block, as in Megatron: heads and MLP columns over devices.

The first product of attention and of the MLP is sharded by columns, the second by rows: between
them, devices exchange nothing. Between blocks, activations are sharded along "tensor" too; each
half of a block gathers its input and scatters the sum of its output.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import GluMlp, SwiGLU
from torch import nn

from models.blocks import FOLDED
from training.mesh import LOGICAL_AXIS_RULES
from xla_fsdp.attention.sharded import HeadsAttention
from xla_fsdp.attention.whole import Qkv
from xla_fsdp.products import Int8Marks, add_bias, product
from xla_fsdp.remat import KeptInput
from xla_fsdp.sharding import Mark

Dimensions = Mapping[str, tuple[str, ...]]
"""The kinds of the dimensions of a block's parameters, see ``ModelSpec.block_dimensions``."""


def tensor_dims(dimensions: Dimensions) -> dict[str, int]:
    """Return, by the parameter's name, the dimension that "tensor" shards; no other is.

    It is that of the parameter as ``shard_block`` keeps it.
    """
    return {
        name: index
        for name, kinds in dimensions.items()
        for index, kind in enumerate(kinds)
        if "tensor" in LOGICAL_AXIS_RULES[kind]
    }


def packed_parts(dimensions: Dimensions) -> dict[str, int]:
    """Return the parameters that ``shard_block`` keeps as (parts, rows, ...), and how many parts
    each has."""
    return {name: FOLDED[kinds[0]] for name, kinds in dimensions.items() if kinds[0] in FOLDED}


@dataclass(frozen=True)
class Marks:
    """How activations (batch, tokens, ..., features) lie: each marks a value and its gradient."""

    gather: Mark
    """From what lies between the halves of a block to whole features."""
    scatter: Mark
    """From a product by rows back to what lies between."""
    columns: Mark
    """Features sharded along "tensor"."""
    parts: int
    """How many the batch is sharded into."""
    attention: HeadsAttention
    """Its product."""
    int8: Callable[[str], Int8Marks] | None = None
    """Of a weight, by its name, if products with it are in int8."""

    def of(self, name: str) -> Int8Marks | None:
        return self.int8(name) if self.int8 else None


def shard_block(block: nn.Module, marks: Marks, kept: KeptInput, packed: Mapping[str, int]) -> None:
    """Make a timm block compute with parts of its heads and of its MLP's columns.

    What timm packs in one layer, (parts * rows, ...), becomes (parts, rows, ...): some of the rows
    then hold the queries, keys and values of the same heads, or both halves of a gated MLP.
    ``kept`` holds the results of products by columns.
    """
    for name, parts in packed.items():
        layer, _, key = name.rpartition(".")
        parameter = block.get_parameter(name)
        values = parameter.detach().unflatten(0, (parts, -1))
        unfolded = nn.Parameter(values, requires_grad=parameter.requires_grad)
        block.get_submodule(layer)._parameters[key] = unfolded

    def by_columns(
        x: torch.Tensor, linear: nn.Linear, name: str, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        equation = "bnd,ed->bne" if linear.weight.dim() == 2 else "bnd,ced->bnce"
        widens = linear.out_features > linear.in_features
        y = product(equation, x, linear.weight, kept, marks.of(f"{name}.weight"), widens=widens)
        bias = linear.bias if bias is None else bias
        return marks.columns(add_bias(y, bias, marks.parts))

    def by_rows(x: torch.Tensor, linear: nn.Linear, name: str) -> torch.Tensor:
        y = product("bne,de->bnd", x, linear.weight, int8=marks.of(f"{name}.weight"))
        return add_bias(marks.scatter(y), linear.bias, marks.parts)

    def attention(
        attn,
        x: torch.Tensor,
        rope: torch.Tensor | None = None,
        attn_mask: None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        x = marks.gather(x)
        qkv: Qkv
        if attn.qkv is not None:
            qkv = by_columns(x, attn.qkv, "attn.qkv", _own_bias(attn))
        else:
            names = ("q_proj", "k_proj", "v_proj")
            qkv = [by_columns(x, getattr(attn, name), f"attn.{name}") for name in names]
        y = attn.norm(marks.columns(marks.attention(attn, qkv, rope)))
        return attn.proj_drop(by_rows(y, attn.proj, "attn.proj"))

    def mlp(mlp, x: torch.Tensor) -> torch.Tensor:
        x = marks.gather(x)
        if isinstance(mlp, SwiGLU):
            gate = by_columns(x, mlp.fc1_g, "mlp.fc1_g")
            x = mlp.act(gate) * by_columns(x, mlp.fc1_x, "mlp.fc1_x")
        elif isinstance(mlp, GluMlp):
            first, second = by_columns(x, mlp.fc1, "mlp.fc1").unbind(2)
            x = first * mlp.act(second) if mlp.gate_last else mlp.act(first) * second
        else:
            x = mlp.act(by_columns(x, mlp.fc1, "mlp.fc1"))
        return mlp.drop2(by_rows(mlp.norm(mlp.drop1(x)), mlp.fc2, "mlp.fc2"))

    # Bound methods: a deep copy of the block (the scanned one) has its own.
    for name, forward in (("attn", attention), ("mlp", mlp)):
        part = block.get_submodule(name)
        part.forward = types.MethodType(forward, part)


def _own_bias(attn: Any) -> torch.Tensor | None:
    """Return the bias of queries, keys and values that Eva's attention keeps beside its layer."""
    if getattr(attn, "q_bias", None) is None:
        return None
    return torch.stack([attn.q_bias, attn.k_bias, attn.v_bias])
