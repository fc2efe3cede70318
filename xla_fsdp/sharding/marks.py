"""Sharding marks that hold in the backward pass, too: on a value and on its gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

Mark = Callable[[torch.Tensor], torch.Tensor]


class MarkBoth(torch.autograd.Function):
    """The same mark on a value and on its gradient."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, mark: Mark) -> torch.Tensor:
        ctx.mark = mark
        return mark(x * 1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.mark(grad * 1), None


class Gather(torch.autograd.Function):
    """A sharded weight made whole after its dtype is changed; its gradient sharded, then cast back.

    It tells the partitioner where to gather and where to scatter. Left to itself, that may compute
    with the shards and exchange activations, or reduce whole gradients.
    """

    @staticmethod
    def forward(
        ctx, weight: torch.Tensor, dtype: torch.dtype, shard: Mark, whole: Mark
    ) -> torch.Tensor:
        ctx.dtype, ctx.shard = weight.dtype, shard
        return whole(shard(weight.to(dtype) * 1) * 1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.shard(grad * 1).to(ctx.dtype), None, None, None


class Scatter(torch.autograd.Function):
    """A sum over devices sharded as it is made, its gradient made whole: the inverse of Gather."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, shard: Mark, whole: Mark) -> torch.Tensor:
        ctx.shard, ctx.whole = shard, whole
        return shard(x * 1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.whole(ctx.shard(grad * 1) * 1), None, None
