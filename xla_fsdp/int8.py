"""Matrix products of linear layers in int8, forward: ``--matmul int8``.

Each row of what a layer is given and each row of its weight, along what the product sums over, is
divided by its largest magnitude and rounded to 127 steps on either side; the int32 sums are scaled.
A weight is rounded before it is gathered, so that half as much is gathered as in bf16. Gradients
are those of a product with the rounded weight, in autocast's dtype; rounding itself has the
gradient of doing nothing (Bengio et al., arXiv:1308.3432).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from training.mesh import Spec
from xla_fsdp.apart import apart
from xla_fsdp.sharding.gathering import MarkAs
from xla_fsdp.torch_xla_private import dot_general_int8

Mark = Callable[[torch.Tensor, torch.Size], torch.Tensor]
"""Marks how a weight of a size lies, or numbers of it: 1 in place of some of its sizes."""
_STEPS = 127


@dataclass(frozen=True)
class Int8Marks:
    """How a weight lies on the devices."""

    sharded: Mark
    """As it is kept, and its gradient."""
    whole: Mark
    """As a product with it takes it."""

    def gather(self, x: torch.Tensor, size: torch.Size) -> torch.Tensor:
        return self.whole(self.sharded(x, size), size)


def int8_marks(
    sharded: Callable[[torch.Size], Spec], whole: Callable[[torch.Size], Spec], mark: MarkAs
) -> Int8Marks:
    """Return marks made of the specs of a weight of a size, as it is kept and as it is used."""

    def mark_numbers(x: torch.Tensor, spec: Spec) -> torch.Tensor:
        kept = (axes if n > 1 else () for n, axes in zip(x.shape, spec, strict=True))
        return mark(x * 1, tuple(kept))

    return Int8Marks(
        sharded=lambda x, size: mark_numbers(x, sharded(size)),
        whole=lambda x, size: mark_numbers(x, whole(size)),
    )


def linear_weights(block: nn.Module) -> set[str]:
    """Return the names in a block of its linear layers' weights."""
    return {f"{name}.weight" for name, part in block.named_modules() if type(part) is nn.Linear}


def rounded(x: torch.Tensor, along: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x`` as int8 and fp32 factors that give it back, one for all ``along`` dimensions."""
    x = x.float()
    largest = x.abs().amax(along, keepdim=True)
    factors = torch.where(largest > 0, largest, torch.ones_like(largest)) / _STEPS
    return torch.round(x / factors).to(torch.int8), factors


class Int8Product(torch.autograd.Function):
    """The product of ``products.product``, computed in int8, with a sharded weight."""

    @staticmethod
    def forward(ctx, equation: str, x, weight, marks: Int8Marks, known):
        given, _ = equation.split("->")
        of_x, of_weight = given.split(",")
        summed = [name for name in of_weight if name in of_x]
        x = apart(x)
        along_x = tuple(of_x.index(name) for name in summed)
        along_weight = tuple(of_weight.index(name) for name in summed)
        parts = rounded(weight, along_weight)
        numbers, factors = (marks.gather(part, weight.shape) for part in parts)
        ctx.save_for_backward(x, numbers, factors)
        ctx.equation, ctx.marks, ctx.dtype = equation, marks, weight.dtype
        if known is not None:
            return known
        of_rows, scales = rounded(x, along_x)
        sums = dot_general_int8(of_rows, numbers, along_x, along_weight)
        left = [size for at, size in enumerate(numbers.shape) if at not in along_weight]
        rows = x.dim() - len(along_x)
        scales = scales.flatten(rows).view(*sums.shape[:rows], *(1,) * len(left))
        return (sums.float() * scales * factors.view(left)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, numbers, factors = ctx.saved_tensors
        grad = apart(grad.to(x.dtype))
        given, result = ctx.equation.split("->")
        of_x, of_weight = given.split(",")
        weight = apart((numbers * factors).to(x.dtype))
        of_x_found = torch.einsum(f"{result},{of_weight}->{of_x}", grad, weight)
        of_weight_found = torch.einsum(f"{result},{of_x}->{of_weight}", grad, x)
        of_weight_found = ctx.marks.sharded(of_weight_found, weight.shape).to(ctx.dtype)
        return None, of_x_found, of_weight_found, None, None
