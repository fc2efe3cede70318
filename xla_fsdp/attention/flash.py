"""Flash attention on TPUs (``--attention flash``): no matrix of scores in HBM.

Our own Pallas kernels (``flash_kernels.py``) hold a block of queries and a block of keys in vector
memory. They take (batch, tokens, heads x width), as the products beside attention write and read.
What a model transposes for PyTorch's product is transposed back, and XLA drops both. The model
stays timm's: what it asks of ``scaled_dot_product_attention`` is computed by the kernels.
"""

import functools
import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from models.blocks import attentions, use_product
from xla_fsdp.attention.kernels import Kernel, Shards, autocast_dtype, lower
from xla_fsdp.attention.sizes import FlashSizes, padded_width

_Array = tuple[tuple[int, ...], torch.dtype]


@functools.cache
def kernel(s: FlashSizes, scale: float, *, backward: bool) -> Kernel:
    """Return the kernel (q, k, v[, valid]) -> output, statistics, or the one of their gradients.

    That is (q, k, v[, valid], statistics, inner, gradient of the output) -> gradients of q, k, v:
    see ``flash_kernels``, which has the functions.
    """
    from xla_fsdp.attention import flash_kernels  # imports JAX

    query: _Array = (s.shape, s.dtype)
    key: _Array = (s.key_shape, s.dtype)
    key_gradient: _Array = (s.key_gradient_shape, s.dtype)
    statistic: _Array = (s.statistic_shape, torch.float32)
    given, results, products = [query, key, key], [query, statistic], 2
    function = flash_kernels.forward_function
    # Between HBM and a kernel: a block whenever the grid's choice changes.
    query_bytes, key_bytes = (
        math.prod(shape) * s.dtype.itemsize for shape in (s.shape, s.key_shape)
    )
    streamed_bytes = 2 * query_bytes + 2 * key_bytes * (s.blocks if s.key_blocks > 1 else 1)
    if s.masked:
        given.append((s.valid_shape, torch.int32))
    if backward:
        given += [statistic, statistic, query]
        results, products = [query, key_gradient, key_gradient], 5
        function = flash_kernels.backward_function
        rounds = s.key_blocks if s.blocks > 1 else 1
        streamed_bytes = query_bytes * (2 * rounds + 1) + 4 * key_bytes * s.spans
    scores = s.batch * s.heads * s.blocks * s.block * s.key_blocks * s.key_block
    return lower(
        function(s, scale),
        given,
        results,
        flops=2 * products * scores * s.width,
        transcendentals=scores,
        bytes_accessed=streamed_bytes,
    )


class Flash:
    """Attention softmax(scale q k') v of each device's part of images and heads, by the kernels.

    Queries, keys, values, output and their gradients are (batch, tokens, heads x width), as
    ``merged`` makes them, and whole: with ``shards`` each device computes its part of them;
    without, the program is one device's. Statistics are log(sum(exp(scores))) of each query, fp32
    (batch, heads, tokens).

    ``valid`` is 1 for keys that are no padding, int32 (batch, keys), or None if there is no
    padding.
    """

    def __init__(self, heads: int, width: int, scale: float, shards: Shards | None) -> None:
        """``heads``: of all devices; ``width``: of a head, as the model has it."""
        own_heads = heads // (shards.parts(shards.heads) if shards else 1)
        self._heads, self._width, self._own_heads = heads, width, own_heads
        self._padded = padded_width(own_heads, width)
        self._scale, self._shards = scale, shards

    def merged(self, x: torch.Tensor) -> torch.Tensor:
        """Make (batch, tokens, heads x width) of (batch, heads, tokens, width).

        Heads are padded with zeros to the width that the kernels take.
        """
        x = x.transpose(1, 2)
        if self._padded > self._width:
            x = F.pad(x, (0, self._padded - self._width))
        return x.flatten(2)

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """Do the inverse of ``merged``."""
        return x.unflatten(2, (self._heads, -1))[..., : self._width].transpose(1, 2)

    def inner(self, output: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Return the sum of the output times its gradient for each query, as statistics are."""
        products = output.float() * grad.float()
        return products.unflatten(2, (self._heads, -1)).sum(-1).transpose(1, 2)

    def forward(self, q, k, v, valid) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and statistics."""
        sizes, given = self._given(q, k, v, valid)
        output, statistics = kernel(sizes, self._scale, backward=False)(given)
        return self._whole(output, -1), self._whole(statistics.flatten(1, 2), 1)

    def backward(self, q, k, v, valid, statistics, inner, grad) -> list[torch.Tensor]:
        """Return the gradients of q, k and v; ``inner`` is shaped as statistics."""
        sizes, given = self._given(q, k, v, valid)
        rows = (self._part(x, 1).reshape(sizes.statistic_shape) for x in (statistics, inner))
        given += [*rows, self._part(grad, -1)]
        grads = kernel(sizes, self._scale, backward=True)(given)
        of_queries, *of_keys = (self._whole(x, -1) for x in grads)
        if sizes.spans > 1:
            return [of_queries, *(x.float().sum(1).to(x.dtype) for x in of_keys)]
        return [of_queries, *(x.squeeze(1) for x in of_keys)]

    def _given(self, q, k, v, valid) -> tuple[FlashSizes, list[torch.Tensor]]:
        """Return the sizes of what a device computes, and its part of these."""
        batch, tokens, _ = q.shape
        keys = k.shape[1]
        parts = self._shards.parts(self._shards.images) if self._shards else 1
        given = [self._part(x, -1) for x in (q, k, v)]
        of_device = batch // parts, self._own_heads, tokens, keys, self._padded
        sizes = FlashSizes(*of_device, q.dtype, masked=valid is not None)
        if padding := sizes.valid_shape[2] - keys:
            sizes = replace(sizes, masked=True)
            if valid is None:
                valid = torch.ones((batch, keys), dtype=torch.int32, device=q.device)
            valid = F.pad(valid, (0, padding))
        if valid is not None:
            # Made outside of the parts: made inside the manual region, the partitioner aborts.
            given.append(self._part(valid[:, None], None))
        return sizes, given

    def _part(self, x: torch.Tensor, heads: int | None) -> torch.Tensor:
        return self._shards.part(x, heads) if self._shards else x

    def _whole(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return self._shards.whole(x, heads) if self._shards else x


# ------------------------------------------------------------------------------------------------
# In a model.


def use_flash(module: nn.Module, shards: Shards | None) -> None:
    """Let all of timm's attention in ``module``, a block, compute its product by the kernels.

    ``shards`` is None where the program is one device's. See ``use_product``.
    """
    for part in attentions(module):
        use_product(part, functools.partial(attention, shards=shards))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shards: Shards | None = None
) -> torch.Tensor:
    """Compute softmax(q k' / sqrt(width)) v in autocast's dtype: (batch, heads, tokens, width)."""
    _, heads, _, width = q.shape
    dtype, how = autocast_dtype(v), Flash(heads, width, width**-0.5, shards)
    return how.apart(_FlashAttention.apply(how, *(how.merged(x.to(dtype)) for x in (q, k, v))))


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, how: Flash, q, k, v):
        output, statistics = how.forward(q, k, v, None)
        ctx.save_for_backward(q, k, v, output, statistics)
        ctx.how = how
        return output

    @staticmethod
    def backward(ctx, grad):
        q, k, v, output, statistics = ctx.saved_tensors
        how, grad = ctx.how, grad.to(q.dtype)
        return None, *how.backward(q, k, v, None, statistics, how.inner(output, grad), grad)
