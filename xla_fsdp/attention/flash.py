"""Flash attention in place of PyTorch's product, on TPUs: no N x N matrix in HBM.

The model stays timm's: what it asks of ``scaled_dot_product_attention`` is computed by kernels.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from models.attention_product import attentions, use_product
from xla_fsdp.attention.kernels import (
    forward_kernel,
    key_gradients_kernel,
    query_gradient_kernel,
)
from xla_fsdp.attention.sizes import LANES, SUBLANES, Shape, padded_tokens, padded_width

if TYPE_CHECKING:  # parts.py, and plain products with it, can do without
    import torch_xla.distributed.spmd as xs

_HEADS_APART = 4
"""Dimensions of (batch, heads, tokens, width)."""
Along = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Shards:
    """How images and heads lie on the devices of an SPMD program: each calls the kernels on its
    own.

    ``images``, ``heads``: the mesh axis, or axes, that they are sharded along. Images are dimension
    0; which one heads are, if any, each call tells.
    """

    mesh: xs.Mesh
    images: Along
    heads: Along = None

    def part(self, x: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Return a device's part of the whole tensor."""
        import torch_xla.distributed.spmd as xs

        spec = self._spec(x, heads)
        return xs.enable_manual_sharding(x * 1, spec, mesh=self.mesh).global_tensor

    def whole(self, part: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Return the whole of which each device has a part."""
        import torch_xla.distributed.spmd as xs

        spec = self._spec(part, heads)
        shape = torch.Size(
            size * self._parts(along) for size, along in zip(part.shape, spec, strict=True)
        )
        return xs.disable_manual_sharding(part, spec, shape, mesh=self.mesh).global_tensor

    @property
    def heads_parts(self) -> int:
        """Return into how many parts heads are sharded."""
        return self._parts(self.heads)

    def _spec(self, x: torch.Tensor, heads: int | None) -> tuple[Along, ...]:
        spec: list[Along] = [self.images, *[None] * (x.dim() - 1)]
        if heads is not None:
            spec[heads] = self.heads
        return tuple(spec)

    def _parts(self, along: Along) -> int:
        axes = (along,) if isinstance(along, str) else along or ()
        return math.prod(self.mesh.shape()[axis] for axis in axes)


def use_flash(module: nn.Module, shards: Shards | None) -> None:
    """Let all attention of timm's in ``module``, a block, compute its product by the kernels.

    ``shards`` is None where the program is one device's. See ``use_product``.
    """
    for part in attentions(module):
        use_product(part, functools.partial(attention, shards=shards))


def padded(x: torch.Tensor) -> torch.Tensor:
    """Add zeros to (batch, heads, tokens, width), as the kernels want tokens and width to be."""
    tokens, width = x.shape[-2:]
    columns = padded_width(width)
    pad = (0, columns - width, 0, padded_tokens(tokens, columns, x.dtype) - tokens)
    return F.pad(x, pad) if any(pad) else x


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shards: Shards | None = None
) -> torch.Tensor:
    """Compute softmax(q k' / sqrt(width)) v in autocast's dtype: (batch, heads, tokens, width)."""
    tokens, width = q.shape[-2:]
    dtype = v.dtype
    if torch.is_autocast_enabled("xla"):
        dtype = torch.get_autocast_dtype("xla")
    q, k, v = (padded(x.to(dtype)) for x in (q, k, v))
    scale = width**-0.5
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        output = _WithGradient.apply(q, k, v, scale, tokens, shards)
    else:
        (output,) = _forward(q, k, v, scale, tokens, shards, for_backward=False)
    return output[..., :tokens, :width]


def _forward(q, k, v, scale: float, valid: int, shards: Shards | None, *, for_backward: bool):
    parts = [_part(x, shards) for x in (q, k, v, *ids(q, _valid(q, valid)))]
    kernel = forward_kernel(_shape(parts[0], valid), scale, for_backward)
    return [_whole(x, shards) for x in kernel(parts)]


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale: float, valid: int, shards: Shards | None):
        output, *rows = _forward(q, k, v, scale, valid, shards, for_backward=True)
        ctx.save_for_backward(q, k, v, output, *rows)
        ctx.scale, ctx.valid, ctx.shards = scale, valid, shards
        return output

    @staticmethod
    def backward(ctx, grad):
        q, k, v, output, sums, largest = ctx.saved_tensors
        inner = (output.float() * grad.float()).sum(-1, keepdim=True).expand(sums.shape)
        arguments = (q, k, v, *ids(q, _valid(q, ctx.valid)), sums, largest, grad.to(q.dtype), inner)
        parts = [_part(x, ctx.shards) for x in arguments]
        shape = _shape(parts[0], ctx.valid)
        grads = [
            *query_gradient_kernel(shape, ctx.scale)(parts),
            *key_gradients_kernel(shape, ctx.scale)(parts),
        ]
        return *(_whole(x, ctx.shards) for x in grads), None, None, None


def _part(x: torch.Tensor, shards: Shards | None) -> torch.Tensor:
    return shards.part(x, _heads_of(x)) if shards else x


def _whole(part: torch.Tensor, shards: Shards | None) -> torch.Tensor:
    return shards.whole(part, _heads_of(part)) if shards else part


def _heads_of(x: torch.Tensor) -> int | None:
    """Return which dimension heads are; tokens' numbers are the same for all."""
    return 1 if x.dim() == _HEADS_APART else None


def _shape(part: torch.Tensor, valid: int) -> Shape:
    batch, heads, tokens, width = part.shape
    return Shape(batch, heads, tokens, tokens, width, valid, part.dtype)


def _valid(q: torch.Tensor, count: int) -> torch.Tensor | None:
    """Tell which tokens, the first ``count``, are no padding: see ``ids``; None if all are none."""
    batch, _, tokens, _ = q.shape
    if count == tokens:
        return None
    return (torch.arange(tokens, device=q.device) < count).to(torch.int32).expand(batch, -1)


def ids(q: torch.Tensor, valid: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the numbers of queries and keys: queries take keys of their own, padding has another.

    ``valid`` has 1 for a key that is none, int32 (batch, keys); None, and nothing is returned, if
    there is no padding. What a padded query computes is finite, is dropped, and has no gradient.
    """
    if valid is None:
        return []
    batch, _, tokens, _ = q.shape
    ones = torch.ones((batch, tokens, LANES), dtype=torch.int32, device=q.device)
    return [ones, valid[:, None].expand(-1, SUBLANES, -1)]
