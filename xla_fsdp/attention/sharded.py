"""Attention across devices that share the tokens of an image, along the mesh axis "domain"."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from models.blocks import attentions, combine_parts, use_product
from tpu_attention.flash import FlashProducts
from xla_fsdp.attention.kernel_calls import ONE_DEVICE

if TYPE_CHECKING:
    from xla_fsdp.layout import Mark, MeshLayout
    from xla_fsdp.parallel_plan import XlaPlan
    from xla_fsdp.scan import Scan

# ------------------------------------------------------------------------------------------------
# Attention to a part of the keys.
#
# All tensors are (rows of a batch, heads, tokens, width); dimension 0 is sharded over devices.
# ``valid`` is 1 for keys that are no padding, int32 (rows, keys), or None if there is no padding.
# Statistics are log(sum(exp(scores))) of each query, fp32 (rows, heads, tokens).


_LOWEST = -1e30
"""The score of a key that is padding, and the statistic of no keys.

It is finite, so that a row of nothing else is no NaN.
"""


class PlainProducts:
    """Products with all scores of a part in memory, by einsum: PyTorch's product folds rows and
    heads into one dimension, by which the partitioner may lose how they are sharded."""

    def forward(self, q, k, v, valid, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return softmax(scale q k') v over these keys alone, and statistics."""
        scores = self._scores(q, k, valid, scale)
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        sums = weights.sum(-1, keepdim=True)
        output = torch.einsum("bhqk,bhkd->bhqd", (weights / sums).to(v.dtype), v)
        return output, (largest + sums.log())[..., 0]

    def backward(self, q, k, v, statistics, grad, inner, valid, scale: float):
        """Return these keys' share of the gradients of q, k and v. ``statistics`` are over all
        keys; ``inner`` is the sum over each row of the whole output times its gradient ``grad``."""
        weights = (self._scores(q, k, valid, scale) - statistics[..., None]).exp()
        grad_weights = torch.einsum("bhqd,bhkd->bhqk", grad, v).float()
        grad_scores = (weights * (grad_weights - inner[..., None]) * scale).to(q.dtype)
        return (
            torch.einsum("bhqk,bhkd->bhqd", grad_scores, k),
            torch.einsum("bhqk,bhqd->bhkd", grad_scores, q),
            torch.einsum("bhqk,bhqd->bhkd", weights.to(v.dtype), grad),
        )

    def _scores(self, q, k, valid, scale: float) -> torch.Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k).float() * scale
        if valid is None:
            return scores
        return torch.where(valid[:, None, None, :] > 0, scores, _LOWEST)


# ------------------------------------------------------------------------------------------------
# Tokens over devices.
#
# Tokens are sharded along "domain". For the partitioner, that is made one more dimension of the
# batch: (domain x batch, heads, tokens of a device, width), "parts", so that attention to the keys
# that are here needs no other device. ``Ring`` and ``Gathered`` compute, of all parts,
#
# forward(q, k, v, valid, scale) -> the output, and statistics over all keys;
# backward(q, k, v, statistics, grad, inner, valid, scale) -> the gradients of q, k and v.


@dataclass(frozen=True)
class TokensOverDevices:
    """How an image's tokens are sharded, and what computes attention to the keys of one device."""

    devices: int
    """How many the tokens of an image are sharded over."""
    products: PlainProducts | FlashProducts
    mark_tokens: Mark
    """Mark (batch, heads, tokens, ...), sharded along dimension 2."""
    mark_parts: Mark
    """Mark (domain x batch, ...), sharded along dimension 0."""

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute softmax(q k' / sqrt(width)) v in autocast's dtype: (batch, heads, tokens,
        width)."""
        dtype = ONE_DEVICE.dtype(v)
        return _AttentionToAll.apply(*(x.to(dtype) for x in (q, k, v)), self)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Make parts of (batch, heads, tokens, width): (domain x batch, heads, part, width)."""
        tokens = x.shape[2]
        part = -(-tokens // self.devices)
        x = self.mark_tokens(x * 1)
        if missing := part * self.devices - tokens:
            x = F.pad(x, (0, 0, 0, missing))
        x = x.unflatten(2, (self.devices, part)).permute(2, 0, 1, 3, 4).flatten(0, 1)
        return self.mark_parts(x * 1)

    def join(self, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Do the inverse of ``split``, for a result of this shape."""
        batch, _, tokens, _ = shape
        x = x.unflatten(0, (self.devices, batch)).permute(1, 2, 0, 3, 4)
        return self.mark_tokens(x.flatten(2, 3)[:, :, :tokens] * 1)

    def valid(self, tokens: int, x: torch.Tensor) -> torch.Tensor | None:
        """Return which tokens of ``x``, which ``split`` made of so many, are no padding."""
        part, batch = x.shape[2], x.shape[0] // self.devices
        if part * self.devices == tokens:
            return None
        first = torch.arange(self.devices, device=x.device)[:, None] * part
        here = first + torch.arange(part, device=x.device) < tokens
        rows = here.to(torch.int32)[:, None].expand(-1, batch, -1)
        return self.mark_parts(rows.flatten(0, 1) * 1)


class _AttentionToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sharded: Ring | Gathered):
        ctx.shape, ctx.value_shape, ctx.sharded = q.shape, v.shape, sharded
        ctx.scale = q.shape[-1] ** -0.5
        q, k, v = (sharded.split(x) for x in (q, k, v))
        valid = sharded.valid(ctx.shape[2], k)
        output, statistics = sharded.forward(q, k, v, valid, ctx.scale)
        output = output.to(v.dtype)
        ctx.save_for_backward(q, k, v, output, statistics)
        return sharded.join(output, ctx.value_shape)

    @staticmethod
    def backward(ctx, grad):
        q, k, v, output, statistics = ctx.saved_tensors
        sharded, shapes = ctx.sharded, (ctx.shape, ctx.shape, ctx.value_shape)
        valid = sharded.valid(ctx.shape[2], k)
        grad = sharded.split(grad.to(v.dtype))
        inner = (output.float() * grad.float()).sum(-1)
        grads = sharded.backward(q, k, v, statistics, grad, inner, valid, ctx.scale)
        grads = [x.to(q.dtype) for x in grads]
        return *(sharded.join(x, shape) for x, shape in zip(grads, shapes, strict=True)), None


@dataclass(frozen=True)
class Ring(TokensOverDevices):
    """Ring attention inside the graph (Liu, Zaharia, Abbeel, arXiv 2310.01889): no device ever has
    the keys of a whole image.

    Keys and values are rotated by one place of "domain", a collective permute beside the products;
    outputs are combined by their statistics. The rounds are a loop of the graph: compilation does
    not grow with the devices, and a part is sent one round ahead, never further.
    """

    _loops: dict[tuple, Scan] = field(default_factory=dict, init=False, compare=False)

    def forward(self, q, k, v, valid, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        def one_round(q, output, statistics, *keys):
            k, v, valid = (*keys, None)[:3]
            part, part_statistics = self.products.forward(q, k, v, valid, scale)
            combined = combine_parts(output, statistics, part.float(), part_statistics)
            return q, *combined, *map(self._rotate, keys)

        keys = [k, v] if valid is None else [k, v, valid]
        output = torch.zeros((*q.shape[:3], v.shape[3]), device=q.device)
        statistics = torch.full(q.shape[:3], _LOWEST, device=q.device)
        _, output, statistics, *_ = self._all_rounds(one_round, scale, q, output, statistics, *keys)
        return output, statistics

    def backward(self, q, k, v, statistics, grad, inner, valid, scale: float):
        """Rotate queries, not keys: so one gradient is rotated, not two; and the rotations of a
        recomputed forward pass, which the compiler would keep until now, are not needed."""

        def one_round(q, statistics, grad, inner, grad_q, grad_k, grad_v, *keys):
            k, v, valid = (*keys, None)[:3]
            # What other devices have added follows its queries.
            grad_q = self._rotate(grad_q)
            added = self.products.backward(q, k, v, statistics, grad, inner, valid, scale)
            pairs = zip((grad_q, grad_k, grad_v), added, strict=True)
            grads = [total + x.float() for total, x in pairs]
            return *map(self._rotate, (q, statistics, grad, inner)), *grads, *keys

        keys = [k, v] if valid is None else [k, v, valid]
        grads = [torch.zeros(x.shape, device=x.device) for x in (q, k, v)]
        state = (q, statistics, grad, inner, *grads, *keys)
        grad_q, grad_k, grad_v = self._all_rounds(one_round, scale, *state)[4:7]
        return self._rotate(grad_q), grad_k, grad_v

    def _all_rounds(self, one_round, scale: float, *state: torch.Tensor) -> Sequence[torch.Tensor]:
        """Compute a round for each device; the last comes after the loop and sends nothing on."""
        from xla_fsdp.scan import Scan  # imports torch_xla

        def body(state, _):
            return list(one_round(*map(self.mark_parts, state))), []

        key = (one_round.__qualname__, scale, *((x.shape, x.dtype) for x in state))
        if key not in self._loops:
            rounds = self.devices - 1
            self._loops[key] = Scan(body, state, [], rounds=rounds, inner=True)
        before_last, _ = self._loops[key](state, [])
        return body(before_last, [])[0]

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Send each device's part to the next one along "domain"."""
        batch = x.shape[0] // self.devices
        # In this form the partitioner knows a rotation; what torch.roll becomes it does not.
        return self.mark_parts(torch.cat([x[-batch:], x[:-batch]]))


@dataclass(frozen=True)
class Gathered(TokensOverDevices):
    """Each device gathers the keys and values of whole images; their gradients are scattered."""

    mark_images: Mark
    """Mark (batch, ...), sharded along dimension 0: whole on every device of "domain"."""

    def forward(self, q, k, v, valid, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return self.products.forward(q, *self._gather(k, v, valid), scale)

    def backward(self, q, k, v, statistics, grad, inner, valid, scale: float):
        k, v, valid = self._gather(k, v, valid)
        grad_q, *grads_kv = self.products.backward(q, k, v, statistics, grad, inner, valid, scale)
        # Sum the gradients of all tokens over the devices; each keeps those of its own tokens.
        scattered = []
        for x in grads_kv:
            total = self.mark_tokens(x.float().unflatten(0, (self.devices, -1)).sum(0))
            parts = total.unflatten(2, (self.devices, -1)).permute(2, 0, 1, 3, 4)
            scattered.append(self.mark_parts(parts.flatten(0, 1) * 1))
        return grad_q, *scattered

    def _gather(self, k, v, valid) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Make keys and values, and which of them are valid, whole on each device."""
        gathered = []
        for x in (k, v) if valid is None else (k, v, valid[..., None]):
            # From (domain x batch, ..., part, width) to the same with all parts.
            x = x.unflatten(0, (self.devices, -1)).movedim(0, -3).flatten(-3, -2)
            x = self.mark_images(x * 1)
            x = x[None].expand(self.devices, *x.shape).flatten(0, 1)
            gathered.append(self.mark_parts(x * 1))
        return gathered[0], gathered[1], None if valid is None else gathered[2][..., 0]


def use_over_domain(block: nn.Module, plan: XlaPlan, layout: MeshLayout) -> None:
    """Let queries of timm's attention stay with their tokens, while keys go round the devices or
    are gathered."""
    mesh = layout.mesh

    def mark_parts(x: torch.Tensor) -> torch.Tensor:
        return layout.mark(x, (mesh.domain_batch_axes, *((),) * (x.dim() - 1)))

    spec = mesh.logical_spec("batch", "width", "tokens", "width")
    mark_tokens = functools.partial(layout.mark, spec=spec)
    products: PlainProducts | FlashProducts = PlainProducts()
    if plan.attention == "flash":
        products = FlashProducts(layout.shards(mesh.domain_batch_axes))
    sharded: Ring | Gathered
    if plan.domain_attention == "gather":
        sharded = Gathered(mesh.domain, products, mark_tokens, mark_parts, layout.mark_images)
    else:
        sharded = Ring(mesh.domain, products, mark_tokens, mark_parts)
    for attention in attentions(block):
        use_product(attention, sharded.attention)
