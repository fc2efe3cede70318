"""Attention of short sequences on TPUs (``--attention whole``): no score in HBM.

Our own Pallas kernels (``whole_kernels.py``) hold whole sequences in vector memory. They take
(batch, tokens, heads x width), as the products beside attention write and read. What a model
transposes for PyTorch's product is transposed back, and XLA drops both.
"""

import functools
import math
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from timm.layers import Attention, apply_rot_embed_cat
from torch import nn

from models.blocks import attentions, use_product
from xla_fsdp.attention.kernels import Kernel, Shards, autocast_dtype, lower
from xla_fsdp.attention.sizes import WholeSizes
from xla_fsdp.remat import SaveInput


@functools.cache
def kernel(s: WholeSizes, *, backward: bool) -> Kernel:
    """Return the kernel (q, k, v) -> output, or (q, k, v, gradient of it) -> their gradients.

    Packed, all three are the same array; gradients are packed as these are, or stacked.
    """
    from xla_fsdp.attention import whole_kernels  # imports JAX

    scores, products, branches = s.batch * s.heads * s.tokens**2, 2, 1
    function, arguments = whole_kernels.forward_function, [s.given] * 3
    result: tuple[int, ...] = s.shape
    if backward:
        function, arguments = whole_kernels.backward_function, [*arguments, s.shape]
        result, products, branches = s.gradients, 5, 3
    return lower(
        function(s),
        [(shape, s.dtype) for shape in arguments],
        [(result, s.dtype)],
        flops=products * 2 * scores * s.width,
        transcendentals=scores,
        bytes_accessed=(len(arguments) + branches) * math.prod(s.shape) * s.dtype.itemsize,
        branches=branches,
    )


# ------------------------------------------------------------------------------------------------
# In a model. ``shards`` is None where the program is one device's; ``save`` says which results are
# saved for the backward pass.


Qkv = torch.Tensor | Sequence[torch.Tensor]
"""Queries, keys and values: in one tensor, or each in its own."""


def use_whole(
    module: nn.Module, shards: Shards | None = None, save: SaveInput | None = None
) -> None:
    """Let all of timm's attention in ``module``, a block, compute its product by the kernels.

    See ``use_product``.
    """

    def forward(
        attn: Attention,
        x: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Compute what timm's Attention does, but never with heads in front of tokens."""
        if attn_mask is not None or is_causal:
            raise NotImplementedError("attention has no mask here")
        gate = attn.gate(x).sigmoid() if attn.gate is not None else None
        y = attn.norm(of_layers(attn, attn.qkv(x), shards=shards, save=save))
        return attn.proj_drop(attn.proj(y if gate is None else y * gate))

    for part in attentions(module):
        if type(part) is Attention:
            part.forward = types.MethodType(forward, part)
        else:
            use_product(part, functools.partial(attention, shards=shards, save=save))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shards: Shards | None = None,
    save: SaveInput | None = None,
) -> torch.Tensor:
    """Compute softmax(q k' / sqrt(width)) v in autocast's dtype: (batch, heads, tokens, width)."""
    heads = q.shape[1]
    output = _merged(heads, shards, save, *(x.transpose(1, 2).flatten(2) for x in (q, k, v)))
    return output.unflatten(2, (heads, -1)).transpose(1, 2)


def of_layers(
    attn: Any,
    qkv: Qkv,
    rope: torch.Tensor | None = None,
    *,
    shards: Shards | None,
    save: SaveInput | None,
) -> torch.Tensor:
    """Compute timm's attention from the results of its layers, with rotary embedding or without.

    See ``queries_keys_values``. Returns (batch, tokens, heads x width).
    """
    unchanged = rope is None and isinstance(attn.q_norm, nn.Identity)
    if unchanged and isinstance(qkv, torch.Tensor):
        return _merged(attn.num_heads, shards, save, qkv)
    parts = (x.flatten(2) for x in queries_keys_values(attn, qkv, rope))
    return _merged(attn.num_heads, shards, save, *parts)


def queries_keys_values(
    attn: Any, qkv: Qkv, rope: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values, (batch, tokens, heads, width), normalised and rotated.

    ``qkv`` are the three, (batch, tokens, heads x width), or all in one, side by side or as
    (batch, tokens, 3, heads x width). ``rope`` is (patches, 2 x width), and before these may have
    heads, and images before heads; class and register tokens are not rotated.
    """
    if isinstance(qkv, torch.Tensor):
        qkv = qkv.chunk(3, -1) if qkv.dim() == 3 else qkv.unbind(2)
    q, k, v = (part.unflatten(2, (attn.num_heads, -1)) for part in qkv)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rope is None:
        return q, k, v
    rope = rope.unsqueeze(1) if rope.dim() == 2 else rope.transpose(-2, -3)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        prefix, patches = x.tensor_split([attn.num_prefix_tokens], 1)
        turned = apply_rot_embed_cat(patches, rope, half=attn.rotate_half)
        return torch.cat([prefix, turned], 1).type_as(v)

    return rotated(q), rotated(k), v


def _merged(
    heads: int, shards: Shards | None, save: SaveInput | None, *given: torch.Tensor
) -> torch.Tensor:
    """Compute attention of queries, keys and values, (batch, tokens, heads x width) as the result.

    Or of all in one tensor, side by side or as (batch, tokens, 3, heads x width).
    """
    dtype = autocast_dtype(given[-1])
    return (save or SaveInput()).result(
        _Attention.apply, heads, shards, *(x.to(dtype) for x in given)
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, heads: int, shards: Shards | None, *given):
        *tensors, saved_result = given
        ctx.save_for_backward(*tensors)
        ctx.heads, ctx.shards = heads, shards
        if saved_result is not None:
            return saved_result
        return _call(heads, shards, tensors)[0]

    @staticmethod
    def backward(ctx, grad):
        given = ctx.saved_tensors
        grad = grad.to(given[0].dtype)
        return None, None, *_call(ctx.heads, ctx.shards, given, grad), None


def _call(
    heads: int, shards: Shards | None, given: Sequence[torch.Tensor], *grad: torch.Tensor
) -> list[torch.Tensor]:
    """Compute attention on each device's part of images and heads.

    ``given`` are queries, keys and values, or all in one. With ``grad``, the gradient of the
    result, it returns their gradients.
    """
    packed = len(given) == 1
    parts = [shards.part(x, -1) if shards else x for x in (*given, *grad)]
    shapes = [part.shape for part in parts]
    parts[0] = parts[0].flatten(2)
    batch, tokens, columns = parts[0].shape
    columns //= 3 if packed else 1
    heads //= shards.parts(shards.heads) if shards else 1
    sizes = WholeSizes(batch, tokens, heads, columns // heads, parts[0].dtype, packed)
    if packed and not sizes.can_be_packed:
        sizes, parts = replace(sizes, packed=False), [*parts[0].chunk(3, -1), *parts[1:]]
    elif packed:
        parts = [parts[0]] * 3 + parts[1:]
    (result,) = kernel(sizes, backward=bool(grad))(parts)
    results = [result] if result.dim() == 3 else [*result.unbind(0)]
    if packed and len(results) > 1:
        results = [torch.cat(results, -1)]
    if grad:
        results = [x.reshape(shape) for x, shape in zip(results, shapes, strict=False)]
    return [shards.whole(x, -1) if shards else x for x in results]
