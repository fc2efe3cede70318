"""Attention of short sequences by kernels that hold them whole in vector memory: no score in HBM.

Queries, keys and values go to the kernels as (batch, tokens, heads x width), which is how the
products beside attention make and take them: what a model transposes for PyTorch's product is
transposed back, and XLA drops both.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from timm.layers import Attention, apply_rot_embed_cat
from torch import nn

from models.attention_product import attentions, use_product
from xla_fsdp.attention.flash import Shards
from xla_fsdp.attention.kernels import Kernel
from xla_fsdp.attention.whole_kernels import Whole, backward_kernel, forward_kernel
from xla_fsdp.kept import KeptInput

Qkv = torch.Tensor | Sequence[torch.Tensor]
"""Queries, keys and values: in one tensor, or each in its own."""


@dataclass(frozen=True)
class How:
    """How the kernels are called: on which part of a batch, and whether outputs are kept."""

    shards: Shards | None = None
    """None where the program is one device's."""
    kept: KeptInput | None = None


def use_whole(module: nn.Module, how: How) -> None:
    """Let all attention of timm's in ``module``, a block, compute its product by the kernels.

    See ``use_product``.
    """
    for part in attentions(module):
        if type(part) is Attention:
            forward = functools.partial(_forward_unfolded, how=how)
            part.forward = types.MethodType(forward, part)
        else:
            use_product(part, functools.partial(attention, how=how))


def _forward_unfolded(
    attn: Attention,
    x: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    *,
    how: How,
) -> torch.Tensor:
    """Compute what timm's attention does, but never with heads in front of tokens."""
    if attn_mask is not None or is_causal:
        raise NotImplementedError("attention has no mask here")
    gate = attn.gate(x).sigmoid() if attn.gate is not None else None
    y = attn.norm(of_layers(attn, attn.qkv(x), how=how))
    return attn.proj_drop(attn.proj(y if gate is None else y * gate))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How | None = None
) -> torch.Tensor:
    """Compute softmax(q k' / sqrt(width)) v in autocast's dtype: (batch, heads, tokens, width)."""
    heads = q.shape[1]
    output = _merged(heads, how or How(), *(x.transpose(1, 2).flatten(2) for x in (q, k, v)))
    return output.unflatten(2, (heads, -1)).transpose(1, 2)


def of_layers(attn: Any, qkv: Qkv, rope: torch.Tensor | None = None, *, how: How) -> torch.Tensor:
    """Compute the product of timm's attention of what its layers make, with rotary embedding or
    without; see ``queries_keys_values``."""
    as_they_are = rope is None and isinstance(attn.q_norm, nn.Identity)
    if as_they_are and isinstance(qkv, torch.Tensor):
        return _merged(attn.num_heads, how, qkv)
    parts = (x.flatten(2) for x in queries_keys_values(attn, qkv, rope))
    return _merged(attn.num_heads, how, *parts)


def queries_keys_values(
    attn: Any, qkv: Qkv, rope: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values, (batch, tokens, heads, width), normalised and rotated.

    ``qkv`` are the three, (batch, tokens, heads x width), or all in one, side by side or as
    (batch, tokens, 3, heads x width).
    """
    if isinstance(qkv, torch.Tensor):
        qkv = qkv.chunk(3, -1) if qkv.dim() == 3 else qkv.unbind(2)
    q, k, v = (part.unflatten(2, (attn.num_heads, -1)) for part in qkv)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rope is not None:
        q, k = (_rotated(attn, x, rope).type_as(v) for x in (q, k))
    return q, k, v


def _rotated(attn: Any, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate (batch, tokens, heads, width) as timm does, but for class and register tokens.

    ``rope`` is (patches, 2 x width), and before these may have heads, and images before heads.
    """
    rope = rope.unsqueeze(1) if rope.dim() == 2 else rope.transpose(-2, -3)
    prefix, patches = x.tensor_split([attn.num_prefix_tokens], 1)
    rotated = apply_rot_embed_cat(patches, rope, half=attn.rotate_half)
    return torch.cat([prefix, rotated], 1)


def _merged(heads: int, how: How, *given: torch.Tensor) -> torch.Tensor:
    """Compute attention of queries, keys and values, (batch, tokens, heads x width) as the result.

    Or of all in one tensor, side by side or as (batch, tokens, 3, heads x width).
    """
    dtype = given[-1].dtype
    if torch.is_autocast_enabled("xla"):
        dtype = torch.get_autocast_dtype("xla")
    arguments = (heads, how.shards, *(x.to(dtype) for x in given))
    if how.kept:
        return how.kept.result(_Attention.apply, *arguments)
    return _Attention.apply(*arguments, None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, heads: int, shards: Shards | None, *given):
        *tensors, known = given
        ctx.save_for_backward(*tensors)
        ctx.heads, ctx.shards = heads, shards
        return _call(forward_kernel, heads, shards, tensors)[0] if known is None else known

    @staticmethod
    def backward(ctx, grad):
        given = ctx.saved_tensors
        grad = grad.to(given[0].dtype)
        gradients = _call(backward_kernel, ctx.heads, ctx.shards, given, grad)
        return None, None, *gradients, None


def _call(
    kernel: Callable[[Whole], Kernel],
    heads: int,
    shards: Shards | None,
    given: Sequence[torch.Tensor],
    *grad: torch.Tensor,
) -> list[torch.Tensor]:
    """Call a kernel on each device's part of images and heads.

    ``given`` are queries, keys and values, or all in one. With ``grad``, the gradient of the
    result, theirs are returned.
    """
    packed = len(given) == 1
    parts = [shards.part(x, -1) if shards else x for x in (*given, *grad)]
    shapes = [part.shape for part in parts]
    parts[0] = parts[0].flatten(2)
    batch, tokens, columns = parts[0].shape
    columns //= 3 if packed else 1
    heads //= shards.heads_parts if shards else 1
    sizes = Whole(batch, tokens, heads, columns // heads, parts[0].dtype, packed)
    if packed and not sizes.can_be_packed:
        sizes, parts = replace(sizes, packed=False), [*parts[0].chunk(3, -1), *parts[1:]]
    elif packed:
        parts = [parts[0]] * 3 + parts[1:]
    (result,) = kernel(sizes)(parts)
    results = [result] if result.dim() == 3 else [*result.unbind(0)]
    if packed and len(results) > 1:
        results = [torch.cat(results, -1)]
    if grad:
        results = [x.reshape(shape) for x, shape in zip(results, shapes, strict=False)]
    return [shards.whole(x, -1) if shards else x for x in results]
