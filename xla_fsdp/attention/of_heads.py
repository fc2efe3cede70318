"""The product of attention where heads are sharded over devices, in each form of ``--attention``.

All take timm's module with queries, keys and values, (batch, tokens, heads x width) each, or in one
tensor, (batch, tokens, 3, heads x width), and the table of a rotary embedding or None. They return
(batch, tokens, heads x width).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from xla_fsdp.attention import flash, whole

HeadsAttention = Callable[[Any, whole.Qkv, torch.Tensor | None], torch.Tensor]


def choose(form: str, shards: flash.Shards, how: whole.How) -> HeadsAttention:
    """Return what computes by a value of ``--attention``, auto resolved."""
    if form == "sdpa":
        return by_products
    if form == "flash":
        return functools.partial(by_flash, shards=shards)
    return functools.partial(whole.of_layers, how=how)


def by_products(attn: Any, qkv: whole.Qkv, rope: torch.Tensor | None) -> torch.Tensor:
    """Compute as PyTorch does, with dropout.

    Not by F.scaled_dot_product_attention: it folds batch and heads into one dimension, which cannot
    be sharded along two axes; einsum is one product to XLA.
    """
    q, k, v = whole.queries_keys_values(attn, qkv, rope)
    scores = torch.einsum("bqhd,bkhd->bhqk", q * attn.scale, k)
    weights = attn.attn_drop(scores.softmax(dim=-1))
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


def by_flash(
    attn: Any, qkv: whole.Qkv, rope: torch.Tensor | None, *, shards: flash.Shards
) -> torch.Tensor:
    """Compute by the kernels that hold a few scores at a time."""
    q, k, v = (x.transpose(1, 2) for x in whole.queries_keys_values(attn, qkv, rope))
    return flash.attention(q, k, v, shards).transpose(1, 2).flatten(2)
