"""The product of attention where heads are sharded over devices, in each form of ``--attention``.

All take timm's module with queries, keys and values in one, (batch, tokens, 3, heads x width), and
return (batch, tokens, heads x width).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from timm.layers import Attention

from xla_fsdp.attention import flash, whole

HeadsAttention = Callable[[Attention, torch.Tensor], torch.Tensor]


def choose(form: str, shards: flash.Shards, how: whole.How) -> HeadsAttention:
    """Return what computes by a value of ``--attention``, auto resolved."""
    if form == "sdpa":
        return by_products
    if form == "flash":
        return functools.partial(by_flash, shards=shards)
    return functools.partial(whole.of_packed, how=how)


def by_products(attn: Attention, qkv: torch.Tensor) -> torch.Tensor:
    """Compute as PyTorch does, with dropout.

    Not by F.scaled_dot_product_attention: it folds batch and heads into one dimension, which cannot
    be sharded along two axes; einsum is one product to XLA.
    """
    q, k, v = whole.normalised(attn, qkv)
    scores = torch.einsum("bqhd,bkhd->bhqk", q * attn.scale, k)
    weights = attn.attn_drop(scores.softmax(dim=-1))
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


def by_flash(attn: Attention, qkv: torch.Tensor, shards: flash.Shards) -> torch.Tensor:
    """Compute by the kernels that hold a few scores at a time."""
    q, k, v = (x.transpose(1, 2) for x in whole.normalised(attn, qkv))
    return flash.attention(q, k, v, shards).transpose(1, 2).flatten(2)
