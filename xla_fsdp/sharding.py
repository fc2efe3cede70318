"""Marks for the partitioner that hold in the backward pass too: on a value and on its gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch

from training.mesh import Spec

Mark = Callable[[torch.Tensor], torch.Tensor]
"""A function that marks for the partitioner how a tensor is sharded, and returns it."""
MarkAs = Callable[[torch.Tensor, Spec], torch.Tensor]
"""The same by a spec."""


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
    """Casts a sharded weight and gathers it; scatters its gradient and casts that back.

    Left to itself, the partitioner may compute with the shards and exchange activations, or reduce
    whole gradients.
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
    """Scatters a sum over devices, and gathers its gradient: the inverse of ``Gather``."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, shard: Mark, whole: Mark) -> torch.Tensor:
        ctx.shard, ctx.whole = shard, whole
        return shard(x * 1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.whole(ctx.shard(grad * 1) * 1), None, None


# ------------------------------------------------------------------------------------------------
# ``--gather_dtype fp8``: a number is a byte, and there is a factor for each index along a sharded
# dimension. Where that is the only one, each device finds the factors of its part by itself.


_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_LEAST = 1e-30
"""The least factor: a row of zeros has one, too."""


class GatherInFp8(torch.autograd.Function):
    """As ``Gather``, by specs, with numbers rounded to fp8; the gradient is not rounded."""

    @staticmethod
    def forward(
        ctx, weight: torch.Tensor, used: torch.dtype, shard: Spec, whole: Spec, mark: MarkAs
    ) -> torch.Tensor:
        ctx.dtype, ctx.shard, ctx.mark = weight.dtype, shard, mark
        along = next((d for d, axes in enumerate(shard) if axes), 0)
        others = [d for d in range(weight.dim()) if d != along]
        factors = (weight.abs().amax(others, keepdim=True) / _LARGEST).clamp(min=_LEAST)
        rounded = _gathered((weight / factors).to(_FP8), shard, whole, mark)
        factors = _gathered(factors, _only(along, shard), _only(along, whole), mark)
        return (rounded.to(weight.dtype) * factors).to(used)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.mark(grad * 1, ctx.shard).to(ctx.dtype), None, None, None, None


def _gathered(x: torch.Tensor, shard: Spec, whole: Spec, mark: MarkAs) -> torch.Tensor:
    return mark(mark(x * 1, shard) * 1, whole)


def _only(dimension: int, spec: Spec) -> Spec:
    return tuple(axes if d == dimension else () for d, axes in enumerate(spec))
