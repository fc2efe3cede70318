"""Attention to a part of the keys, with what puts such parts together: by kernels, or plainly.

All tensors are (rows of a batch, heads, tokens, width); dimension 0 is sharded over devices.
``valid`` tells which keys are no padding, int32 (rows, keys), or is None. Statistics are
log(sum(exp(scores))) of each query, fp32 (rows, heads, tokens).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from xla_fsdp.attention import flash
from xla_fsdp.attention.sizes import LANES, Shape

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

    shards: flash.Shards

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        return flash.padded(x)

    def forward(self, q, k, v, valid, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self._parts(q, k, v, *flash.ids(q, valid))
        kernel = flash.forward_kernel(_shape(parts[0], parts[1], valid), scale, True)
        output, sums, largest = (self.shards.whole(x) for x in kernel(parts))
        return output, largest[..., 0] + sums[..., 0].log()

    def backward(self, q, k, v, statistics, grad, inner, valid, scale: float):
        rows = (*statistics.shape, LANES)
        largest, inner = (x[..., None].expand(rows) for x in (statistics, inner))
        # exp(score - statistics) / 1: the kernels divide by the sum of exponentials.
        sums = torch.ones_like(largest)
        parts = self._parts(q, k, v, *flash.ids(q, valid), sums, largest, grad, inner)
        shape = _shape(parts[0], parts[1], valid)
        grads = [
            *flash.query_gradient_kernel(shape, scale)(parts),
            *flash.key_gradients_kernel(shape, scale)(parts),
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
