"""Sharding marks that hold on the way back, too: on a value, and on its gradient."""

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
    """A cut weight made whole, after the change of its dtype; its gradient cut, then changed back.

    Says to the partitioner where to gather and where to scatter. Left to itself it may
    compute with the shards and exchange activations, or reduce whole gradients.
    """

    @staticmethod
    def forward(
        ctx, weight: torch.Tensor, dtype: torch.dtype, cut: Mark, whole: Mark
    ) -> torch.Tensor:
        ctx.dtype, ctx.cut = weight.dtype, cut
        return whole(cut(weight.to(dtype) * 1) * 1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.cut(grad * 1).to(ctx.dtype), None, None, None


class Scatter(torch.autograd.Function):
    """A sum over devices cut as it is made; its gradient made whole: ``Gather`` the other way."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, cut: Mark, whole: Mark) -> torch.Tensor:
        ctx.cut, ctx.whole = cut, whole
        return cut(x * 1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.whole(ctx.cut(grad * 1) * 1), None, None
