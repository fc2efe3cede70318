"""Forward products of the blocks' linear layers in numbers of one byte (``--matmul``).

Each token's row of the input and each row of the weight are rounded (``models/rounding.py``), and
the sums are scaled. Gradients are those of a product with the rounded weight, in the dtype of
activations; rounding itself has the gradient of doing nothing (Bengio et al., arXiv:1308.3432).
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


def multiply_rounded(block: nn.Module) -> None:
    """Let the linear layers of ``block`` multiply by ``ROUNDED``."""
    for part in block.modules():
        if type(part) is nn.Linear:
            for name in ROUNDED:
                part.register_buffer(name, None, persistent=False)
            part.forward = types.MethodType(_forward, part)  # type: ignore[method-assign]


def _forward(linear: Any, x: torch.Tensor) -> torch.Tensor:
    y = product(linear, x)
    return y if linear.bias is None else y + linear.bias


def product(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what a linear layer computes of ``x`` before it adds its bias."""
    if not hasattr(linear, "numbers"):
        return F.linear(x, linear.weight)
    return RoundedProduct.apply(x, linear.weight, linear.numbers, linear.factors)


class RoundedProduct(torch.autograd.Function):
    """The product of x (..., in) and a weight (out, in), by the weight's numbers and factors. The
    weight itself gets the gradient; a graph does not compute its values, which nothing uses."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        numbers: torch.Tensor,
        factors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, numbers, factors)
        x_numbers, x_factors = round_to_bytes(x, numbers.dtype, (-1,))
        sums = multiply_bytes(x_numbers, numbers)
        return (sums.float() * x_factors * factors.flatten()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, numbers, factors = ctx.saved_tensors
        # With the weight's factors in the gradient, its numbers are converted within the product:
        # a weight that is put together first would be written to memory and read again.
        scaled = (grad * factors.flatten()).to(x.dtype)
        grad_weight = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        return scaled @ numbers.to(x.dtype), grad_weight, None, None


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
