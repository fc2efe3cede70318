"""Ring attention inside the graph: an image's tokens over devices, keys going round among them.

Tokens are sharded along "domain". For the partitioner, that is made one more dimension of the
batch: (domain x batch, heads, tokens of a device, width), so that attention to the keys that are
here needs no other device. Then keys and values are rotated by one place of "domain", which becomes
a collective permute beside the products, and the outputs are put together by their statistics
(Liu, Zaharia, Abbeel, arXiv 2310.01889). No device ever has the keys of a whole image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from xla_fsdp.attention.parts import PartProducts
from xla_fsdp.sharding.marks import Mark


@dataclass(frozen=True)
class Ring:
    """How tokens lie, and what computes attention to the keys of one device."""

    devices: int
    """How many the tokens of an image are sharded over."""
    products: PartProducts
    mark_tokens: Mark
    """Mark (batch, heads, tokens, ...), sharded along dimension 2."""
    mark_parts: Mark
    """Mark (domain x batch, ...), sharded along dimension 0."""

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute softmax(q k' / sqrt(width)) v: (batch, heads, tokens, width)."""
        return _RingAttention.apply(*self.in_autocasts_dtype(q, k, v), self)

    def in_autocasts_dtype(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        if not torch.is_autocast_enabled("xla"):
            return list(tensors)
        return [x.to(torch.get_autocast_dtype("xla")) for x in tensors]

    # -- between tokens and parts -----------------------------------------------------

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """Make (domain x batch, heads, part, width) of (batch, heads, tokens, width), padded."""
        tokens = x.shape[2]
        each = -(-tokens // self.devices)
        x = _padded(self.mark_tokens(x * 1), 2, each * self.devices)
        x = x.unflatten(2, (self.devices, each)).permute(2, 0, 1, 3, 4).flatten(0, 1)
        return self.mark_parts(self.products.padded(x) * 1)

    def together(self, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Do the inverse of ``apart``, for a result of this shape."""
        batch, _, tokens, width = shape
        each = -(-tokens // self.devices)
        x = x[:, :, :each, :width].unflatten(0, (self.devices, batch)).permute(1, 2, 0, 3, 4)
        return self.mark_tokens(x.flatten(2, 3)[:, :, :tokens] * 1)

    def valid(self, tokens: int, x: torch.Tensor) -> torch.Tensor | None:
        """Tell which tokens of each part, of those that ``apart`` gave as ``x``, are no padding.

        Of int32, (domain x batch, part); None if there is no padding.
        """
        each, part = -(-tokens // self.devices), x.shape[2]
        if each * self.devices == tokens and part == each:
            return None
        place = torch.arange(part, device=x.device)
        first = torch.arange(self.devices, device=x.device)[:, None] * each
        here = (place < each) & (first + place < tokens)
        batch = x.shape[0] // self.devices
        rows = here.to(torch.int32)[:, None].expand(-1, batch, -1)
        return self.mark_parts(rows.flatten(0, 1) * 1)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Give what each device has to the next one along "domain"."""
        batch = x.shape[0] // self.devices
        # In this form the partitioner knows a rotation; what torch.roll becomes it does not.
        return self.mark_parts(torch.cat([x[-batch:], x[:-batch]]))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring: Ring):
        ctx.shapes, ctx.ring, ctx.scale = (q.shape, v.shape), ring, q.shape[-1] ** -0.5
        tokens = q.shape[2]
        q, k, v = (ring.apart(x) for x in (q, k, v))
        valid = ring.valid(tokens, k)
        output, statistics = _forward(ring, q, k, v, valid, ctx.scale)
        output = output.to(v.dtype)
        ctx.save_for_backward(q, k, v, output, statistics)
        ctx.valid = valid is not None
        return ring.together(output, ctx.shapes[1])

    @staticmethod
    def backward(ctx, grad):
        q, k, v, output, statistics = ctx.saved_tensors
        ring, (shape, value_shape) = ctx.ring, ctx.shapes
        valid = ring.valid(shape[2], k) if ctx.valid else None
        grad = ring.apart(grad.to(v.dtype))
        inner = (output.float() * grad.float()).sum(-1)
        given = (statistics, grad, inner, valid, ctx.scale)
        grad_q, grad_k, grad_v = _backward(ring, q, k, v, *given)
        return (
            ring.together(grad_q.to(q.dtype), shape),
            ring.together(grad_k.to(k.dtype), shape),
            ring.together(grad_v.to(v.dtype), value_shape),
            None,
        )


def _forward(ring: Ring, q, k, v, valid, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and log(sum(exp(scores))) of each row, both in fp32."""
    output: torch.Tensor | None = None
    statistics: torch.Tensor | None = None
    for step in range(ring.devices):
        before = statistics
        found, total = ring.products.forward(q, k, v, valid, scale)
        if output is None or statistics is None:
            output, statistics = found.float(), total
        else:
            largest = torch.maximum(statistics, total)  # logaddexp is not lowered by torch_xla 2.9
            sums = (statistics - largest).exp() + (total - largest).exp()
            together = largest + sums.log()
            output = output * (statistics - together).exp()[..., None]
            output = output + found.float() * (total - together).exp()[..., None]
            statistics = together
        if step + 1 < ring.devices:
            k, v = (ring.rotated(_after(before, x)) for x in (k, v))
            valid = None if valid is None else ring.rotated(valid)
    assert output is not None
    assert statistics is not None
    return output, statistics


def _backward(
    ring: Ring, q, k, v, statistics, grad, inner, valid, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v. Here queries go round, and keys stay.

    What goes round with them is one gradient, and not two. And where the forward pass is computed
    again for this one, its rotations are no use here: the compiler would keep all of them until
    now.
    """
    grad_q: torch.Tensor | None = None
    of_keys: list[torch.Tensor] = []
    for step in range(ring.devices):
        before = of_keys[0][..., 0] if of_keys else None
        own_q, *own = ring.products.backward(q, k, v, statistics, grad, inner, valid, scale)
        own = [each.float() for each in own]
        of_keys = [a + b for a, b in zip(of_keys, own, strict=True)] if of_keys else own
        # Other devices have added theirs; after the last step it is where it belongs.
        grad_q = own_q.float() if grad_q is None else grad_q + own_q.float()
        grad_q = ring.rotated(grad_q)
        if step + 1 < ring.devices:
            q, grad = (ring.rotated(_after(before, x)) for x in (q, grad))
            statistics, inner = ring.rotated(statistics), ring.rotated(inner)
    assert grad_q is not None
    return grad_q, of_keys[0], of_keys[1]


def _after(rows: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, which can only be known after ``rows``, one number for each row of it.

    What goes round is given on while it is computed with, but not before that with what was here
    before is done: else the compiler would let all of an image come at once, and keep it.
    """
    return x if rows is None else x + (rows * 0).to(x.dtype)[..., None]


def _padded(x: torch.Tensor, dimension: int, size: int) -> torch.Tensor:
    after = size - x.shape[dimension]
    if not after:
        return x
    return F.pad(x, (0, 0) * (x.dim() - 1 - dimension) + (0, after))
