"""The blocks' linear layers as a TPU computes them fastest, also in numbers of one byte
(``--matmul``).

A bias's gradient is a product with rows of ones: XLA would make the sum a reduction of its own,
which reads the gradient of the layer's output once more (docs/evidence/torchtpu.md).

In numbers of one byte, each token's row of the input and each row of the weight are rounded
(``models/rounding.py``), and the sums are scaled. Gradients are those of a product with the rounded
weight, in the dtype of activations; rounding itself has the gradient of doing nothing (Bengio et
al., arXiv:1308.3432).
"""

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models.rounding import round_to_bytes
from torch_fsdp import torch_tpu_private

ROUNDED = ("numbers", "factors")
"""Buffers of a linear layer: its rounded weight (out, in), and fp32 factors (out, 1). They are
there while its block computes, as its gathered weight is."""

_SUMS = {torch.int8: torch.int32, torch.float8_e4m3fn: torch.float32}


_SUM_ROWS = 8
"""Rows of ones that a gradient is multiplied by: of one row XLA would make a sum again."""


def compute_linear_layers(block: nn.Module, *, rounded: bool) -> None:
    """Let the linear layers of ``block`` compute so; if ``rounded``, multiply by ``ROUNDED``."""
    forward = _multiply_rounded if rounded else _multiply
    for part in block.modules():
        if type(part) is nn.Linear:
            for name in ROUNDED if rounded else ():
                part.register_buffer(name, None, persistent=False)
            part.forward = types.MethodType(forward, part)  # type: ignore[method-assign]


def _multiply(linear: Any, x: torch.Tensor) -> torch.Tensor:
    return _add_bias(F.linear(x, linear.weight), linear.bias)


def _multiply_rounded(linear: Any, x: torch.Tensor) -> torch.Tensor:
    y = RoundedProduct.apply(x, linear.weight, linear.numbers, linear.factors)
    return _add_bias(y, linear.bias)


def _add_bias(y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return y if bias is None else AddBias.apply(y, bias)


class AddBias(torch.autograd.Function):
    """The sum of y (..., out) and a bias (out)."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return y + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = grad.flatten(0, -2)
        return grad, (rows.new_ones((_SUM_ROWS, rows.shape[0])) @ rows)[0]


class RoundedProduct(torch.autograd.Function):
    """The product of x (..., in) and a weight (out, in), forward by its numbers and factors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        numbers: torch.Tensor,
        factors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        x_numbers, x_factors = round_to_bytes(x, numbers.dtype, (-1,))
        sums = multiply_bytes(x_numbers, numbers)
        return (sums.float() * x_factors * factors.flatten()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2), None, None


@torch.library.custom_op("vit::multiply_bytes", mutates_args=())
def multiply_bytes(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight.T`` for x (..., in) and weight (out, in): of int8 in int32, of fp8 in
    fp32. torch_tpu 0.2.0 has no integer product, so this is a module of one operation."""
    sums = _SUMS[x.dtype]
    if x.device.type == "cpu":
        return x.to(sums) @ weight.to(sums).t()
    shape = [*x.shape[:-1], weight.shape[0]]
    left, right = (torch_tpu_private.tensor_type(each.shape, each.dtype) for each in (x, weight))
    result = torch_tpu_private.tensor_type(shape, sums)
    module = f"""
        func.func @main(%x: {left}, %weight: {right}) -> {result} {{
          %y = stablehlo.dot_general %x, %weight, contracting_dims = [{x.dim() - 1}] x [1]
            : ({left}, {right}) -> {result}
          return %y : {result}
        }}
    """
    return torch_tpu_private.call_kernel(module, [x, weight], [(shape, sums)])[0]


@multiply_bytes.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=_SUMS[x.dtype])
