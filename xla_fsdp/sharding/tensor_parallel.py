"""Tensor parallelism in a timm block, as in Megatron: heads and MLP columns over devices.

The first product of attention and of the MLP is sharded by columns, the second by rows: between
them, devices exchange nothing. Between blocks, activations are sharded along "tensor" too; each
half of a block gathers its input and scatters the sum of its output.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from models.blocks import PLAIN_BLOCK
from training.mesh import LIES_ALONG
from xla_fsdp.attention.of_heads import HeadsAttention
from xla_fsdp.int8 import Int8Marks
from xla_fsdp.kept import KeptInput
from xla_fsdp.products import add_bias, product
from xla_fsdp.sharding.marks import Mark

QKV = 3
_PACKED = ("attn.qkv.weight", "attn.qkv.bias")

TENSOR_DIMS = {
    name: index + (name in _PACKED)  # packed, they have one more in front
    for name, dimensions in PLAIN_BLOCK.items()
    for index, dimension in enumerate(dimensions)
    if "tensor" in LIES_ALONG.get(dimension, ())
}
"""By the parameter's name in its block, the dimension that "tensor" shards; no other is."""


def is_packed(name: str) -> bool:
    """Tell whether the parameter is one that ``shard_block`` keeps as (3, rows, ...)."""
    return name.endswith(_PACKED)


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


def shard_block(block: nn.Module, marks: Marks, kept: KeptInput) -> None:
    """Make a timm block compute with parts of its heads and of its MLP's columns.

    timm's packed qkv, (3 * rows, ...), becomes (3, rows, ...): a part of the rows then holds
    the queries, keys and values of the same heads. ``kept`` holds the results of products by
    columns.
    """
    qkv = block.get_submodule("attn.qkv")
    for key, parameter in qkv._parameters.items():
        if parameter is not None:
            packed = parameter.detach().unflatten(0, (QKV, -1))
            qkv._parameters[key] = nn.Parameter(packed, requires_grad=parameter.requires_grad)

    def attention(attn, x: torch.Tensor, attn_mask=None, is_causal: bool = False) -> torch.Tensor:
        x = marks.gather(x)
        qkv = product("bnd,ced->bnce", x, attn.qkv.weight, kept, marks.of("attn.qkv.weight"))
        qkv = marks.columns(add_bias(qkv, attn.qkv.bias, marks.parts))
        y = attn.norm(marks.columns(marks.attention(attn, qkv)))
        return attn.proj_drop(_by_rows(y, attn.proj, "attn.proj", marks))

    def mlp(mlp, x: torch.Tensor) -> torch.Tensor:
        x = product(
            "bnd,ed->bne", marks.gather(x), mlp.fc1.weight, kept, marks.of("mlp.fc1.weight")
        )
        x = marks.columns(add_bias(x, mlp.fc1.bias, marks.parts))
        x = mlp.norm(mlp.drop1(mlp.act(x)))
        return mlp.drop2(_by_rows(x, mlp.fc2, "mlp.fc2", marks))

    # Bound methods: a deep copy of the block (the scanned one) has its own.
    for name, forward in (("attn", attention), ("mlp", mlp)):
        part = block.get_submodule(name)
        part.forward = types.MethodType(forward, part)


def _by_rows(x: torch.Tensor, linear: nn.Linear, name: str, marks: Marks) -> torch.Tensor:
    y = product("bne,de->bnd", x, linear.weight, int8=marks.of(f"{name}.weight"))
    y = marks.scatter(y)
    return add_bias(y, linear.bias, marks.parts)
