"""Attention where each device gathers the keys and values of whole images, and keeps its queries.

One gathering in the place of a ring's many permutes, for the memory of all keys; gradients of keys
are scattered. Attention itself is computed by the same products as in a ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from xla_fsdp.attention.ring import Ring
from xla_fsdp.sharding.marks import Mark


@dataclass(frozen=True)
class Gathered(Ring):
    """How tokens lie, as for a ring, and how whole images do."""

    mark_images: Mark
    """Mark (batch, ...), sharded along dimension 0: whole on every device of "domain"."""

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _GatheredAttention.apply(*self.in_autocasts_dtype(q, k, v), self)

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Make of (domain x batch, ..., part, width) the same with all parts, on each device."""
        x = x.unflatten(0, (self.devices, -1)).movedim(0, -3).flatten(-3, -2)
        x = self.mark_images(x * 1)
        return self.mark_parts(x[None].expand(self.devices, *x.shape).flatten(0, 1) * 1)

    def scattered(self, x: torch.Tensor) -> torch.Tensor:
        """Add up what each device has found for all tokens; return (domain x batch, ..., part,
        width), those of its own."""
        total = self.mark_tokens(x.float().unflatten(0, (self.devices, -1)).sum(0))
        parts = total.unflatten(2, (self.devices, -1)).permute(2, 0, 1, 3, 4)
        return self.mark_parts(parts.flatten(0, 1) * 1)


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, how: Gathered):
        ctx.shapes, ctx.how, ctx.scale = (q.shape, v.shape), how, q.shape[-1] ** -0.5
        q, k, v = (how.apart(x) for x in (q, k, v))
        given = (how.whole(k), how.whole(v), _valid(how, ctx.shapes[0][2], k), ctx.scale)
        output, statistics = how.products.forward(q, *given)
        ctx.save_for_backward(q, k, v, output, statistics)
        return how.together(output, ctx.shapes[1])

    @staticmethod
    def backward(ctx, grad):
        q, k, v, output, statistics = ctx.saved_tensors
        how, (shape, value_shape) = ctx.how, ctx.shapes
        grad = how.apart(grad.to(v.dtype))
        inner = (output.float() * grad.float()).sum(-1)
        valid = _valid(how, shape[2], k)
        given = (statistics, grad, inner, valid, ctx.scale)
        grad_q, grad_k, grad_v = how.products.backward(q, how.whole(k), how.whole(v), *given)
        return (
            how.together(grad_q, shape),
            how.together(how.scattered(grad_k).to(k.dtype), shape),
            how.together(how.scattered(grad_v).to(v.dtype), value_shape),
            None,
        )


def _valid(how: Gathered, tokens: int, k: torch.Tensor) -> torch.Tensor | None:
    valid = how.valid(tokens, k)
    return None if valid is None else how.whole(valid[..., None])[..., 0]
