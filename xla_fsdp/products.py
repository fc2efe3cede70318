"""A block's matrix products in the form that XLA shards correctly and computes fastest.

PyTorch's linear layer folds images and tokens into one dimension, in which the partitioner cannot
shard only the tokens: it gathers them, or computes wrong results (docs/evidence/findings.md). Here,
and in norms, they remain two dimensions. XLA also sums a bias gradient within the product beside
it, which doubles the product's time (docs/evidence/tpu_speed.md): here it is a separate product.
"""

from __future__ import annotations

import functools
import types

import timm.layers
import torch
import torch_xla.core.xla_model as xm
from torch import nn

from models.rounding import from_bytes, round_to_bytes
from xla_fsdp.layout import Marked, MeshLayout, NumberMarks, mark_numbers
from xla_fsdp.remat import SaveInput
from xla_fsdp.torch_xla_private import dot_general

_SUM_ROWS = 8
"""Rows of ones that a sum is multiplied from: of one row XLA would make a sum again."""


def multiply_unfolded(block: nn.Module, layout: MeshLayout, save: SaveInput | None = None) -> None:
    """Let the linear layers of ``block`` compute by ``product`` and ``add_bias``.

    ``save`` may save the results of layers that have more outputs than inputs. Without it, nothing
    else gathers weights: done here, or the partitioner may compute with shards and exchange tokens.
    """

    def forward(name: str, linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        weight = linear.weight if save else layout.gather(linear.weight)
        int8 = layout.int8_marks(name, weight.shape) if save else None
        widens = linear.out_features > linear.in_features
        rows = "abcdefgh"[: x.dim() - 1]
        y = product(f"{rows}y,zy->{rows}z", x, weight, save, int8, widens=widens)
        return add_bias(y, linear.bias, layout.mesh.batch_shards)

    for name, part in block.named_modules():
        if type(part) is nn.Linear:
            compute = functools.partial(forward, f"{name}.weight")
            part.forward = types.MethodType(compute, part)  # type: ignore[method-assign]


class _UnfoldedLayerNorm(nn.LayerNorm):
    """A norm over the last dimension alone, in fp32 under autocast, as PyTorch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("xla"):
            x = x.float()
        y = _Normalize.apply(x, self.eps)
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) over the last dimension (Ba et al., arXiv:1607.06450)."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, eps: float) -> torch.Tensor:
        centered = x - x.mean(-1, keepdim=True)
        scale = (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
        y = centered * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, scale = ctx.saved_tensors
        along = (grad * y).mean(-1, keepdim=True)
        return (grad - grad.mean(-1, keepdim=True) - y * along) * scale, None


def normalize_unfolded(module: nn.Module) -> None:
    """Let the norms of ``module`` keep images and tokens apart. torch_xla's fold them: where a
    device has one image and an uneven part of its tokens, the partitioner then takes padding for
    tokens (docs/evidence/findings.md)."""
    for part in module.modules():
        if type(part).forward in (nn.LayerNorm.forward, timm.layers.LayerNorm.forward):
            assert isinstance(part, nn.LayerNorm)
            assert len(part.normalized_shape) == 1, part
            part.__class__ = _UnfoldedLayerNorm  # saved activations are found by it, too (remat)


def product(
    equation: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    save: SaveInput | None = None,
    int8: NumberMarks | None = None,
    *,
    widens: bool = True,
) -> torch.Tensor:
    """Multiply in autocast's dtype, as ``torch.einsum`` does; with ``int8`` in that, by a
    sharded weight. ``widens``: the result has more features than ``x``, and is saved if ``save``
    saves such."""
    save = save or SaveInput()
    results = save if widens else SaveInput()
    operand = x
    if torch.is_autocast_enabled("xla"):
        dtype = torch.get_autocast_dtype("xla")
        operand, weight = operand.to(dtype), weight if int8 else weight.to(dtype)
    if int8:
        return results.result(_Int8Product.apply, equation, operand, weight, int8)
    operand = apart(operand)
    save.follow(operand, x)
    return results.result(_Product.apply, equation, operand, weight)


def add_bias(y: torch.Tensor, bias: torch.Tensor | None, parts: int) -> torch.Tensor:
    """Add a bias of a product's last dimensions to it, in its dtype; dimension 0 is in
    ``parts``."""
    return y if bias is None else _AddBias.apply(y, bias, parts)


def apart(x: torch.Tensor) -> torch.Tensor:
    """Keep what computes ``x``, but not its gradient, out of the products with it, which would
    repeat it for each of their tiles."""

    def barrier(x: torch.Tensor) -> torch.Tensor:
        xm.optimization_barrier_([x])
        return x

    return Marked.apply(x, [barrier], [])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, equation: str, x, weight, saved_result):
        ctx.save_for_backward(x, weight)
        ctx.equation = equation
        return torch.einsum(equation, x, weight) if saved_result is None else saved_result

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return None, *_gradients(ctx.equation, apart(grad.to(x.dtype)), x, weight), None


def _gradients(
    equation: str, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    operands, y_axes = equation.split("->")
    x_axes, weight_axes = operands.split(",")
    grad_x = torch.einsum(f"{y_axes},{weight_axes}->{x_axes}", grad, weight)
    return grad_x, torch.einsum(f"{y_axes},{x_axes}->{weight_axes}", grad, x)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, bias, parts: int):
        ctx.dtype, ctx.dimensions, ctx.parts = bias.dtype, bias.dim(), parts
        return y + bias.to(y.dtype)

    @staticmethod
    def backward(ctx, grad):
        # Each device sums over its own images before sums are exchanged.
        by_device = grad.unflatten(0, (ctx.parts, -1))
        axes = "abcdefgh"[: by_device.dim()]
        summed, kept = axes[1 : -ctx.dimensions], axes[0] + axes[-ctx.dimensions :]
        rows = by_device.new_full((_SUM_ROWS, *by_device.shape[1 : 1 + len(summed)]), 1 / _SUM_ROWS)
        sums = torch.einsum(f"z{summed},{axes}->z{kept}", rows, by_device)
        return grad, sums.to(ctx.dtype).sum((0, 1)), None


# ------------------------------------------------------------------------------------------------
# Matrix products of linear layers in int8, forward: ``--matmul int8``.
#
# Each row of a layer's input and each row of its weight, along what the product sums over, is
# divided by its largest magnitude and rounded to 127 steps on either side; the int32 sums are
# scaled. A weight is rounded before it is gathered, so that half as much is gathered as in bf16.
# Gradients are those of a product with the rounded weight, in autocast's dtype; rounding itself
# has the gradient of doing nothing (Bengio et al., arXiv:1308.3432).


class _Int8Product(torch.autograd.Function):
    """The product of ``products.product``, computed in int8, with a sharded weight."""

    @staticmethod
    def forward(ctx, equation: str, x, weight, marks: NumberMarks, saved_result):
        x_axes, weight_axes = equation.partition("->")[0].split(",")
        summed = [axis for axis in weight_axes if axis in x_axes]
        x = apart(x)
        along_x = tuple(x_axes.index(axis) for axis in summed)
        along_weight = tuple(weight_axes.index(axis) for axis in summed)
        *specs, mark = marks
        numbers, factors = (
            mark_numbers(tensor, mark, *specs)
            for tensor in round_to_bytes(weight, torch.int8, along_weight)
        )
        ctx.save_for_backward(x, numbers, factors)
        ctx.equation, ctx.marks, ctx.dtype = equation, marks, weight.dtype
        if saved_result is not None:
            return saved_result
        x_numbers, x_factors = round_to_bytes(x, torch.int8, along_x)
        along: tuple = ((list(along_x), list(along_weight)), ([], []))
        sums = dot_general(x_numbers, numbers, along, preferred_element_type=torch.int32)
        rows = x.dim() - len(along_x)
        outputs = sums.shape[rows:]
        x_factors = x_factors.flatten(rows).view(*sums.shape[:rows], *(1,) * len(outputs))
        return (sums.float() * x_factors * factors.view(outputs)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, numbers, factors = ctx.saved_tensors
        grad = apart(grad.to(x.dtype))
        weight = apart(from_bytes(numbers, factors, x.dtype))
        grad_x, grad_weight = _gradients(ctx.equation, grad, x, weight)
        at_rest, _, mark = ctx.marks
        grad_weight = mark_numbers(grad_weight, mark, at_rest).to(ctx.dtype)
        return None, grad_x, grad_weight, None, None
