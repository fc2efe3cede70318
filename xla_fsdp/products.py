"""Matrix products of a block as XLA computes them best: apart from what is around them.

PyTorch's linear layer folds images and tokens into one dimension, of which the partitioner cannot
shard the tokens alone: with several images on a device it gathers all of their tokens. Here they
stay two. The sum that a bias' gradient is would be computed with the product that makes what is
summed, which doubles the time of that product on a TPU (docs/tpu.md): here it is one of its own.
"""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
from torch import nn

from xla_fsdp.apart import apart
from xla_fsdp.int8 import Int8Marks, Int8Product
from xla_fsdp.kept import KeptInput

_NOTHING_ELSE = KeptInput()
_ROWS = 8
"""Rows of ones that a sum is multiplied from: of one row XLA would make a sum again."""


def multiply_unfolded(
    block: nn.Module,
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
    kept: KeptInput | None = None,
    *,
    parts: int,
    int8: Callable[[str], Int8Marks] | None = None,
) -> None:
    """Let the linear layers of ``block`` compute by ``product`` and ``add_bias``.

    The batch is sharded into ``parts``. ``int8`` tells of a weight, by its name, how it lies.

    ``gather`` makes a sharded weight whole, where nothing else does: else the partitioner may
    compute with the shards, and exchange tokens. ``kept`` may hold the results of layers that
    make more features of less.
    """

    def compute(name: str) -> Callable[[nn.Linear, torch.Tensor], torch.Tensor]:
        marks = int8(f"{name}.weight") if int8 else None

        def forward(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
            weight = gather(linear.weight) if gather else linear.weight
            widens = linear.out_features > linear.in_features
            rows = "abcdefgh"[: x.dim() - 1]
            y = product(f"{rows}y,zy->{rows}z", x, weight, kept, marks, widens=widens)
            return add_bias(y, linear.bias, parts)

        return forward

    for name, part in block.named_modules():
        if type(part) is nn.Linear:
            part.forward = types.MethodType(compute(name), part)  # type: ignore[method-assign]


def product(
    equation: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    kept: KeptInput | None = None,
    int8: Int8Marks | None = None,
    *,
    widens: bool = True,
) -> torch.Tensor:
    """Multiply in autocast's dtype, as ``torch.einsum`` does by the equation.

    With ``int8`` in that, and the weight is a sharded one. ``widens``: the result has more features
    than ``x``, and is kept if ``kept`` keeps such.
    """
    kept = kept or _NOTHING_ELSE
    results = kept if widens else _NOTHING_ELSE
    operand = x
    if torch.is_autocast_enabled("xla"):
        dtype = torch.get_autocast_dtype("xla")
        operand, weight = operand.to(dtype), weight if int8 else weight.to(dtype)
    if int8:
        return results.result(Int8Product.apply, equation, operand, weight, int8)
    operand = _Apart.apply(operand)
    kept.follow(operand, x)
    return results.result(_Product.apply, equation, operand, weight)


def add_bias(y: torch.Tensor, bias: torch.Tensor | None, parts: int) -> torch.Tensor:
    """Add to a product what its last dimensions are to have more, in the product's dtype.

    Dimension 0 of the product is sharded into ``parts``.
    """
    return y if bias is None else _AddBias.apply(y, bias, parts)


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return apart(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, equation: str, x, weight, known):
        ctx.save_for_backward(x, weight)
        ctx.equation = equation
        return torch.einsum(equation, x, weight) if known is None else known

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = apart(grad.to(x.dtype))
        given, result = ctx.equation.split("->")
        of_x, of_weight = given.split(",")
        return (
            None,
            torch.einsum(f"{result},{of_weight}->{of_x}", grad, weight),
            torch.einsum(f"{result},{of_x}->{of_weight}", grad, x),
            None,
        )


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, bias, parts: int):
        ctx.dtype, ctx.dimensions, ctx.parts = bias.dtype, bias.dim(), parts
        return y + bias.to(y.dtype)

    @staticmethod
    def backward(ctx, grad):
        # What each device finds for its own images is added up before it is exchanged.
        of_device = grad.unflatten(0, (ctx.parts, -1))
        names = "abcdefgh"[: of_device.dim()]
        summed, left = names[1 : -ctx.dimensions], names[0] + names[-ctx.dimensions :]
        rows = torch.full(
            (_ROWS, *of_device.shape[1 : 1 + len(summed)]),
            1 / _ROWS,
            dtype=grad.dtype,
            device=grad.device,
        )
        sums = torch.einsum(f"z{summed},{names}->z{left}", rows, of_device)
        return grad, sums.to(ctx.dtype).sum((0, 1)), None
