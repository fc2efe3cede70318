"""Weights of blocks made whole in the format that ``--gather_dtype`` says.

In fp8 a number is a byte, and there is a factor for each index along a sharded dimension: where
that is the only one, each device finds the factors of its part by itself.
"""

from __future__ import annotations

import functools
from typing import Protocol

import torch

from training.mesh import Spec
from xla_fsdp.sharding.marks import Gather

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_LEAST = 1e-30
"""Of a factor: a row of zeros has one, too."""


class MarkAs(Protocol):
    """Marks how a tensor lies, and returns it."""

    def __call__(self, x: torch.Tensor, spec: Spec) -> torch.Tensor: ...


def gather(
    weight: torch.Tensor, used: torch.dtype, shard: Spec, whole: Spec, mark: MarkAs
) -> torch.Tensor:
    """Return a weight made whole, from ``shard`` to ``whole``, in the dtype that products take."""
    marks = (functools.partial(mark, spec=each) for each in (shard, whole))
    return Gather.apply(weight, used, *marks)


def gather_in_fp8(
    weight: torch.Tensor, used: torch.dtype, shard: Spec, whole: Spec, mark: MarkAs
) -> torch.Tensor:
    """Do the same as ``gather`` with numbers rounded to fp8."""
    return _GatherInFp8.apply(weight, used, shard, whole, mark)


class _GatherInFp8(torch.autograd.Function):
    """The gradient is that of the whole weight, as if it had not been rounded; it is sharded."""

    @staticmethod
    def forward(
        ctx, weight: torch.Tensor, used: torch.dtype, shard: Spec, whole: Spec, mark: MarkAs
    ) -> torch.Tensor:
        ctx.dtype, ctx.shard, ctx.mark = weight.dtype, shard, mark
        along = next((d for d, axes in enumerate(shard) if axes), 0)
        others = [d for d in range(weight.dim()) if d != along]
        factors = (weight.abs().amax(others, keepdim=True) / _LARGEST).clamp(min=_LEAST)
        rounded = _send((weight / factors).to(_FP8), shard, whole, mark)
        factors = _send(factors, _only(along, shard), _only(along, whole), mark)
        return (rounded.to(weight.dtype) * factors).to(used)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.mark(grad * 1, ctx.shard).to(ctx.dtype), None, None, None, None


def _send(x: torch.Tensor, shard: Spec, whole: Spec, mark: MarkAs) -> torch.Tensor:
    return mark(mark(x * 1, shard) * 1, whole)


def _only(dimension: int, spec: Spec) -> Spec:
    return tuple(axes if d == dimension else () for d, axes in enumerate(spec))
