"""Flash attention on TPUs (``--attention flash``): attention scores are never stored in HBM.

Pallas kernels (``pallas.py``) hold a block of queries and a block of keys in vector memory. They
take (batch, tokens, heads x width), as the products beside attention write and read. What a model
transposes for PyTorch's product is transposed back, and XLA drops both.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models.blocks import Qkv, attentions, is_segments, queries_keys_values, use_product
from tpu_attention.kernels import Array, Calls, FlashSizes, Kernel, lower, padded_width


@functools.cache
def kernel(s: FlashSizes, *, backward: bool) -> Kernel:
    """Lower the kernel of the forward or the backward pass; ``pallas.py`` has their arguments."""
    from tpu_attention import pallas  # imports JAX

    query: Array = (s.shape, s.dtype)
    key: Array = (s.key_shape, s.dtype)
    statistic: Array = (s.statistic_shape, torch.float32)
    arguments = [query, key, key]
    arguments += [(s.mask_shape, torch.int32)] * (s.masked + s.segmented)
    # Between HBM and a kernel: a block whenever the grid's choice changes.
    query_bytes, key_bytes = (
        math.prod(shape) * s.dtype.itemsize for shape in (s.shape, s.key_shape)
    )
    if backward:
        function, products = pallas.flash_backward, 5
        key_gradient: Array = (s.key_gradient_shape, s.dtype)
        arguments += [statistic, statistic, query]
        results = [query, key_gradient, key_gradient]
        rounds = s.key_blocks if s.blocks > 1 else 1
        streamed_bytes = query_bytes * (2 * rounds + 1) + 4 * key_bytes * s.spans
    else:
        function, products = pallas.flash_forward, 2
        results = [query, statistic]
        streamed_bytes = 2 * query_bytes + 2 * key_bytes * (s.blocks if s.key_blocks > 1 else 1)
    scores = s.batch * s.heads * s.blocks * s.block * s.key_blocks * s.key_block
    return lower(
        function(s),
        arguments,
        results,
        flops=2 * products * scores * s.width,
        transcendentals=scores,
        bytes_accessed=streamed_bytes,
    )


class Flash:
    """Attention softmax(scale q k') v of each device's part of images and heads, by the kernels.

    Queries, keys, values, output and their gradients are whole, (batch, tokens, heads x width), as
    ``merge_heads`` makes them. Statistics are log(sum(exp(scores))) of each query, fp32 (batch,
    heads, tokens). ``mask``, int32 (batch, keys) or None, is 1 for keys that are no padding, 0 for
    others; or ``segmented``, the number of each token's segment, from 0 on: queries attend to the
    keys of their own.
    """

    def __init__(
        self, heads: int, width: int, scale: float, calls: Calls, *, segmented: bool = False
    ) -> None:
        """``heads``: of all devices; ``width``: of a head, as the model has it."""
        self._heads, self._width, self._scale, self._calls = heads, width, scale, calls
        self._segmented = segmented
        self._local_heads = heads // calls.head_shards
        self._padded_width = padded_width(self._local_heads, width)

    def merge_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Make (batch, tokens, heads x width), of the width that kernels take, of (batch, heads,
        tokens, width)."""
        x = x.transpose(1, 2)
        if self._padded_width > self._width:
            x = F.pad(x, (0, self._padded_width - self._width))
        return x.flatten(2)

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Do the inverse of ``merge_heads``."""
        return x.unflatten(2, (self._heads, -1))[..., : self._width].transpose(1, 2)

    def forward(self, q, k, v, mask) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and statistics."""
        sizes, arguments = self._local(q, k, v, mask)
        output, statistics = self._calls.call(kernel, sizes, arguments, backward=False)
        return self._calls.whole(output, -1), self._calls.whole(statistics.flatten(1, 2), 1)

    def backward(self, q, k, v, mask, statistics, inner, grad) -> list[torch.Tensor]:
        """Return the gradients of q, k and v; ``inner`` is the sum of the output times its
        gradient for each query, shaped as statistics."""
        sizes, arguments = self._local(q, k, v, mask)
        for x in (statistics, inner):
            arguments.append(self._calls.part(x, 1).reshape(sizes.statistic_shape))
        arguments.append(self._calls.part(grad, -1))
        grads = self._calls.call(kernel, sizes, arguments, backward=True)
        grad_q, *grads_kv = (self._calls.whole(x, -1) for x in grads)
        if sizes.spans > 1:
            return [grad_q, *(x.float().sum(1).to(x.dtype) for x in grads_kv)]
        return [grad_q, *(x.squeeze(1) for x in grads_kv)]

    def _local(self, q, k, v, mask) -> tuple[FlashSizes, list[torch.Tensor]]:
        """Return the sizes of what a device computes, and its part of these."""
        batch, tokens, _ = q.shape
        keys, calls = k.shape[1], self._calls
        sizes = FlashSizes(
            batch // calls.image_shards,
            self._local_heads,
            tokens,
            keys,
            self._padded_width,
            q.dtype,
            self._scale,
            masked=mask is not None,
            segmented=self._segmented,
        )
        arguments = [calls.part(x, -1) for x in (q, k, v)]
        if sizes.key_blocks * sizes.key_block > keys and mask is None:
            sizes = replace(sizes, masked=True)
            mask = torch.ones((batch, keys), dtype=torch.int32, device=q.device)
        if mask is not None:
            # Behind the last key: of a segment that no query has.
            mask = F.pad(mask, (0, sizes.mask_shape[2] - keys), value=-1)
            # Made outside of the parts: made inside the manual region, the partitioner aborts.
            arguments += [calls.part(mask[:, None])] * (1 + self._segmented)
        return sizes, arguments


@dataclass(frozen=True)
class FlashProducts:
    """Attention to a part of the keys, whose results are combined with those of others.

    Tensors are (batch, heads, tokens, width), statistics fp32 (batch, heads, tokens), ``valid`` is
    1 for keys that are no padding, int32 (batch, keys), or None if there is no padding.
    """

    calls: Calls

    def forward(self, q, k, v, valid, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return softmax(scale q k') v over these keys alone, and statistics."""
        flash = Flash(q.shape[1], q.shape[3], scale, self.calls)
        q, k, v = (flash.merge_heads(x) for x in (q, k, v))
        output, statistics = flash.forward(q, k, v, valid)
        return flash.split_heads(output), statistics

    def backward(self, q, k, v, statistics, grad, inner, valid, scale: float):
        """Return these keys' share of the gradients of q, k and v. ``statistics`` are over all
        keys; ``inner`` is the sum over each row of the whole output times its gradient ``grad``."""
        flash = Flash(q.shape[1], q.shape[3], scale, self.calls)
        q, k, v, grad = (flash.merge_heads(x) for x in (q, k, v, grad))
        grads = flash.backward(q, k, v, valid, statistics, inner, grad)
        return [flash.split_heads(x) for x in grads]


# ------------------------------------------------------------------------------------------------
# In a model.


def use_flash(module: nn.Module, calls: Calls) -> None:
    """Let timm's attention in a block compute its product by the kernels (``use_product``)."""
    for part in attentions(module):
        use_product(part, functools.partial(attention, calls=calls))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    calls: Calls,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax(q k' / sqrt(width)) v in autocast's dtype: (batch, heads, tokens, width).
    ``segments``, int32 (batch, tokens) from 0 on: tokens attend to those of their own segment."""
    _, heads, _, width = q.shape
    dtype = calls.dtype(v)
    flash = Flash(heads, width, width**-0.5, calls, segmented=segments is not None)
    merged = (flash.merge_heads(x.to(dtype)) for x in (q, k, v))
    return flash.split_heads(_FlashAttention.apply(flash, segments, *merged))


def attend(
    attn: Any,
    qkv: Qkv,
    rope: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
    *,
    calls: Calls,
) -> torch.Tensor:
    """Compute an ``Attend`` of timm's attention; see ``attention`` for ``segments``."""
    if not (segments is None or is_segments(segments)):
        raise NotImplementedError("flash attention supports no mask other than segments")
    q, k, v = (x.transpose(1, 2) for x in queries_keys_values(attn, qkv, rope))
    return attention(q, k, v, calls, segments).transpose(1, 2).flatten(2)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, flash: Flash, segments, q, k, v):
        output, statistics = flash.forward(q, k, v, segments)
        ctx.save_for_backward(q, k, v, segments, output, statistics)
        ctx.flash = flash
        return output

    @staticmethod
    def backward(ctx, grad):
        q, k, v, segments, output, statistics = ctx.saved_tensors
        grad, heads = grad.to(q.dtype), statistics.shape[1]
        products = output.float() * grad.float()
        inner = products.unflatten(2, (heads, -1)).sum(-1).transpose(1, 2)
        grads = ctx.flash.backward(q, k, v, segments, statistics, inner, grad)
        return None, None, *grads
