"""Attention where each device gathers the keys and values of whole images, and keeps its queries.

One gathering in the place of a ring's many permutes, for the memory of all keys; gradients of keys
are scattered. Attention itself is computed by the same products as in a ring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from xla_fsdp.attention import kernels, whole
from xla_fsdp.attention.sizes import LANES, Shape
from xla_fsdp.sharding import Mark

# ------------------------------------------------------------------------------------------------
# The product of attention where heads are sharded over devices, in each form of ``--attention``.
#
# All take timm's module with queries, keys and values, (batch, tokens, heads x width) each, or in
# one tensor, (batch, tokens, 3, heads x width), and the table of a rotary embedding or None. They
# return (batch, tokens, heads x width).


HeadsAttention = Callable[[Any, whole.Qkv, torch.Tensor | None], torch.Tensor]


def choose(form: str, shards: kernels.Shards, how: whole.How) -> HeadsAttention:
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
    attn: Any, qkv: whole.Qkv, rope: torch.Tensor | None, *, shards: kernels.Shards
) -> torch.Tensor:
    """Compute by the kernels that hold a few scores at a time."""
    q, k, v = (x.transpose(1, 2) for x in whole.queries_keys_values(attn, qkv, rope))
    return kernels.attention(q, k, v, shards).transpose(1, 2).flatten(2)


# ------------------------------------------------------------------------------------------------
# Attention to a part of the keys, with what puts such parts together: by kernels, or plainly.
#
# All tensors are (rows of a batch, heads, tokens, width); dimension 0 is sharded over devices.
# ``valid`` tells which keys are no padding, int32 (rows, keys), or is None. Statistics are
# log(sum(exp(scores))) of each query, fp32 (rows, heads, tokens).


_LOWEST = -1e30
"""The score of a key that is padding: finite, so that a row of nothing else is no NaN."""


class PartProducts(Protocol):
    """What ring attention asks of the products of one part of the keys."""

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Add zeros as these products want tokens and widths to be."""

    def forward(self, q, k, v, valid, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return softmax(scale q k') v over these keys alone, and statistics."""

    def backward(
        self, q, k, v, statistics, grad, inner, valid, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return these keys' share of the gradients of q, k and v.

        ``statistics`` are over all keys; ``inner``, of the same shape, is the sum over each row of
        the whole output times its gradient ``grad``.
        """


class PlainProducts:
    """Plain products, with the scores of all tokens of a part for each other in memory.

    By einsum, which is one product to XLA: PyTorch's folds rows and heads into one dimension, by
    which the partitioner may lose how they are sharded.
    """

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, q, k, v, valid, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        scores = _scores(q, k, valid, scale)
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        sums = weights.sum(-1, keepdim=True)
        output = torch.einsum("bhqk,bhkd->bhqd", (weights / sums).to(v.dtype), v)
        return output, (largest + sums.log())[..., 0]

    def backward(self, q, k, v, statistics, grad, inner, valid, scale: float):
        weights = (_scores(q, k, valid, scale) - statistics[..., None]).exp()
        of_weights = torch.einsum("bhqd,bhkd->bhqk", grad, v).float()
        of_scores = (weights * (of_weights - inner[..., None]) * scale).to(q.dtype)
        return (
            torch.einsum("bhqk,bhkd->bhqd", of_scores, k),
            torch.einsum("bhqk,bhqd->bhkd", of_scores, q),
            torch.einsum("bhqk,bhqd->bhkd", weights.to(v.dtype), grad),
        )


def _scores(q, k, valid, scale: float) -> torch.Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).float() * scale
    if valid is None:
        return scores
    return torch.where(valid[:, None, None, :] > 0, scores, _LOWEST)


@dataclass(frozen=True)
class FlashProducts:
    """Pallas kernels, which hold a few scores at a time."""

    shards: kernels.Shards

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.padded(x)

    def forward(self, q, k, v, valid, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self._parts(q, k, v, *kernels.ids(q, valid))
        kernel = kernels.forward_kernel(_shape(parts[0], parts[1], valid), scale, True)
        output, sums, largest = (self.shards.whole(x) for x in kernel(parts))
        return output, largest[..., 0] + sums[..., 0].log()

    def backward(self, q, k, v, statistics, grad, inner, valid, scale: float):
        rows = (*statistics.shape, LANES)
        largest, inner = (x[..., None].expand(rows) for x in (statistics, inner))
        # exp(score - statistics) / 1: the kernels divide by the sum of exponentials.
        sums = torch.ones_like(largest)
        parts = self._parts(q, k, v, *kernels.ids(q, valid), sums, largest, grad, inner)
        shape = _shape(parts[0], parts[1], valid)
        grads = [
            *kernels.query_gradient_kernel(shape, scale)(parts),
            *kernels.key_gradients_kernel(shape, scale)(parts),
        ]
        grad_q, grad_k, grad_v = (self.shards.whole(x) for x in grads)
        return grad_q, grad_k, grad_v

    def _parts(self, *arguments: torch.Tensor) -> list[torch.Tensor]:
        return [self.shards.part(x) for x in arguments]


def _shape(q: torch.Tensor, k: torch.Tensor, valid: torch.Tensor | None) -> Shape:
    rows, heads, tokens, width = q.shape
    # Whether there is padding is all that matters of how many keys are none.
    keys = k.shape[2]
    return Shape(rows, heads, tokens, keys, width, keys - (valid is not None), q.dtype)


# ------------------------------------------------------------------------------------------------
# Ring attention inside the graph: an image's tokens over devices, keys going round among them.
#
# Tokens are sharded along "domain". For the partitioner, that is made one more dimension of the
# batch: (domain x batch, heads, tokens of a device, width), so that attention to the keys that
# are here needs no other device. Then keys and values are rotated by one place of "domain", which
# becomes a collective permute beside the products, and the outputs are put together by their
# statistics (Liu, Zaharia, Abbeel, arXiv 2310.01889). No device ever has the keys of a whole
# image.


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


# ------------------------------------------------------------------------------------------------


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
