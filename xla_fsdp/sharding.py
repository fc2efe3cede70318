"""Marks for the partitioner that hold in the backward pass too: on a value and on its gradient."""

from collections.abc import Callable, Sequence

import torch

from training.mesh import Spec

Mark = Callable[[torch.Tensor], torch.Tensor]
"""A function that marks for the partitioner how a tensor is sharded, and returns it."""
MarkAs = Callable[[torch.Tensor, Spec], torch.Tensor]
"""The same by a spec."""


class Marked(torch.autograd.Function):
    """Some marks on a value, one after the other, and others on its gradient."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, marks: Sequence[Mark], of_gradient: Sequence[Mark]):
        ctx.marks = of_gradient
        for mark in marks:
            x = mark(x * 1)
        return x

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        for mark in ctx.marks:
            grad = mark(grad * 1)
        return grad, None, None


def mark_both(x: torch.Tensor, mark: Mark) -> torch.Tensor:
    """Mark a value and its gradient alike."""
    return Marked.apply(x, [mark], [mark])


def gather(x: torch.Tensor, shard: Mark, whole: Mark) -> torch.Tensor:
    """Gather a sharded tensor, and scatter its gradient.

    Left to itself, the partitioner may compute with the shards and exchange activations, or reduce
    whole gradients.
    """
    return Marked.apply(x, [shard, whole], [shard])


def scatter(x: torch.Tensor, shard: Mark, whole: Mark) -> torch.Tensor:
    """Scatter a sum over devices, and gather its gradient."""
    return Marked.apply(x, [shard], [shard, whole])


# ------------------------------------------------------------------------------------------------
# ``--gather_dtype fp8``: a number is a byte, and there is a factor for each index along a sharded
# dimension. Where that is the only one, each device finds the factors of its part by itself.


_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_LEAST = 1e-30
"""The least factor: a row of zeros has one, too."""


class GatherInFp8(torch.autograd.Function):
    """As ``gather``, by specs, with numbers rounded to fp8; the gradient is not rounded."""

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
