"""Tensor parallelism in a timm block, as in Megatron: heads and MLP columns are sharded.

The first product of attention and of the MLP is sharded by columns, the second by rows. Each half
of a block gathers its input, whose tokens are sharded along "tensor" too, and scatters the sum of
its output.
"""

import math
import types
from collections.abc import Mapping

import torch
from timm.layers import GluMlp, SwiGLU
from torch import nn

from models.blocks import Qkv, queries_keys_values
from tpu_attention import flash, whole
from xla_fsdp.layout import MeshLayout, gather, mark_both, scatter
from xla_fsdp.parallel_plan import XlaPlan
from xla_fsdp.products import add_bias, product
from xla_fsdp.remat import SaveInput


def pack(block: nn.Module, packed: Mapping[str, int]) -> None:
    """Unfold what timm packs in one layer, (parts * rows, ...), to (parts, rows, ...): some rows
    then hold queries, keys and values of the same heads, or both halves of a gated MLP."""
    for name, parts in packed.items():
        layer, _, key = name.rpartition(".")
        parameter = block.get_parameter(name)
        values = parameter.detach().unflatten(0, (parts, -1))
        unfolded = nn.Parameter(values, requires_grad=parameter.requires_grad)
        block.get_submodule(layer)._parameters[key] = unfolded


def shard_heads_and_columns(
    block: nn.Module, plan: XlaPlan, layout: MeshLayout, save: SaveInput
) -> None:
    """Make a timm block, packed by ``pack``, compute with some of its heads and MLP columns;
    ``save`` may save results of products by columns."""
    batch_shards = layout.mesh.batch_shards
    shards = layout.shards(*layout.mesh.logical_spec("batch", "heads"))

    def by_columns(
        x: torch.Tensor, linear: nn.Linear, name: str, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        equation = "bnd,ed->bne" if linear.weight.dim() == 2 else "bnd,ced->bnce"
        widens = linear.out_features > linear.in_features
        int8 = layout.int8_marks(f"{name}.weight", linear.weight.shape)
        y = product(equation, x, linear.weight, save, int8, widens=widens)
        y = add_bias(y, linear.bias if bias is None else bias, batch_shards)
        return mark_both(y, layout.mark_columns)

    def by_rows(x: torch.Tensor, linear: nn.Linear, name: str) -> torch.Tensor:
        int8 = layout.int8_marks(f"{name}.weight", linear.weight.shape)
        y = product("bne,de->bnd", x, linear.weight, int8=int8)
        y = scatter(y, layout.mark_tokens, layout.mark_rows)
        return add_bias(y, linear.bias, batch_shards)

    def attention(
        attn,
        x: torch.Tensor,
        rope: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        x = gather(x, layout.mark_tokens, layout.mark_rows)
        qkv: Qkv
        if attn.qkv is not None:
            bias = None
            if getattr(attn, "q_bias", None) is not None:  # Eva has the bias beside the layer
                bias = torch.stack([attn.q_bias, attn.k_bias, attn.v_bias])
            qkv = by_columns(x, attn.qkv, "attn.qkv", bias)
        else:
            names = ("q_proj", "k_proj", "v_proj")
            qkv = [by_columns(x, getattr(attn, name), f"attn.{name}") for name in names]
        # The product with a part of the heads on each device: (batch, tokens, heads x width).
        if plan.attention == "whole":
            y = whole.attend(attn, qkv, rope, attn_mask, calls=shards, save=save)
        elif plan.attention == "flash":
            y = flash.attend(attn, qkv, rope, attn_mask, calls=shards)
        else:
            # As PyTorch does, with dropout. Not by F.scaled_dot_product_attention: it folds batch
            # and heads into one dimension, which cannot be sharded along two axes; einsum is one
            # product to XLA.
            q, k, v = queries_keys_values(attn, qkv, rope)
            scores = torch.einsum("bqhd,bkhd->bhqk", q * attn.scale, k)
            if attn_mask is not None:
                scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
            weights = attn.attn_drop(scores.softmax(dim=-1))
            y = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)
        y = attn.norm(mark_both(y, layout.mark_columns))
        return attn.proj_drop(by_rows(y, attn.proj, "attn.proj"))

    def mlp(mlp, x: torch.Tensor) -> torch.Tensor:
        x = gather(x, layout.mark_tokens, layout.mark_rows)
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
