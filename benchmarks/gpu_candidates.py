"""Candidates for a faster step, applied to timm's blocks from outside. None is in the program: each
must first make the step 1 % shorter on a GPU (docs/evidence/benchmarks.md).

All are written with PyTorch's operations, so that torch.compile fuses them better.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_fsdp.parallel_plan import TimmBlocks

# -- Bias gradients in the kernel before -----------------------------------------------------------
#
# PyTorch sums gradients over all tokens at once. Inductor splits that sum its own way, which no
# other kernel's loops fit, so it reads the gradients again. A sum over the tokens of each image,
# then over images, is fused with the kernel that computes the gradients.


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, parts: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parts = parts
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, 1)
        sums = grad.unflatten(-1, ctx.parts).sum(1, dtype=torch.float32).sum(0)
        return (
            (rows @ weight).view(x.shape),
            rows.mT @ x.flatten(0, 1),
            sums.flatten().to(grad.dtype),
            None,
        )


class LinearWithFusedGradient(nn.Linear):
    parts: tuple[int, ...]
    """The sizes of the dimensions that the gradient is put together from."""

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _Linear.apply(input, self.weight, self.bias, self.parts)
        return output


def fuse_bias_gradients(block: Any) -> None:
    """Fuse those of ``attn.qkv`` and ``mlp.fc1``: torch.compile fuses the other two by itself."""
    block.attn.qkv.parts = (3, block.attn.num_heads, block.attn.head_dim)
    block.mlp.fc1.parts = (block.mlp.fc1.out_features,)
    for linear in (block.attn.qkv, block.mlp.fc1):
        linear.__class__ = LinearWithFusedGradient  # blocks that are alike share a graph
    torch._inductor.config.loop_ordering_after_fusion = True  # off by default in PyTorch 2.9


# -- GELU in fewer instructions --------------------------------------------------------------------
#
# On an H100, GELU's kernels are limited by instructions as much as by memory: compiled for it, 36
# per element forward and 47 backward, most of them for erf and exp. As polynomials 19 and 23.

_GELU = (
    4.5,
    "0.000819280082 -0.00225913547 0.00307935581 -0.00541330196 0.0111569288 -0.0189147956 "
    "0.0283721103 -0.0401344823 0.0546917483 -0.0771922817 0.156905088",
)
"""A bound, and a polynomial p: x times the normal distribution's cumulative function is nearly
x (1/2 + c p(2 c^2 / bound^2 - 1)), where c is x clamped to the bound. Its coefficients, from the
highest power, minimize the largest error, which is 4e-6 |x|."""
_DERIVATIVE = (
    5.0,
    "0.0102552099 -0.0246610959 0.0177286068 -0.0178747795 0.0513858877 -0.077304211 0.080636765 "
    "-0.08191423 0.0802134853 -0.0720790564 0.0665815611 -0.0750997927 0.142133657",
)
"""The same of GELU's derivative, with an error of 1.1e-5."""


def _half_plus_polynomial(x: Tensor, bound: float, coefficients: str) -> Tensor:
    x = x.clamp(-bound, bound)
    at = x * x * (2 / bound**2) - 1
    highest, *others = map(float, coefficients.split())
    total = highest * at + others[0]
    for coefficient in others[1:]:
        total = total * at + coefficient
    return x * total + 0.5


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        exact = x.float()
        return (exact * _half_plus_polynomial(exact, *_GELU)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (grad.float() * _half_plus_polynomial(x.float(), *_DERIVATIVE)).to(x.dtype)


class PolynomialGelu(nn.Module):
    """GELU with errors far below bf16's spacing."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Gelu.apply(x)
        return result


def use_polynomial_gelu(block: Any) -> None:
    assert "GELU" in type(block.mlp.act).__name__
    block.mlp.act = PolynomialGelu()
    # Of more operations than this, 30 by default, Inductor stores an intermediate result.
    torch._inductor.config.realize_opcount_threshold = 64


# -- One kernel for the backward pass of a norm and the residual -----------------------------------


def fuse_norm_gradients(block: Any) -> None:
    """Let Inductor fuse kernels that read more than 10 tensors, at the risk that registers do not
    suffice (pytorch #179423). PyTorch 2.9 has neither the limit nor this fusion."""
    settings = torch._inductor.config.triton
    if hasattr(settings, "mix_order_reduction_max_reads"):
        settings.mix_order_reduction_max_reads = 0


# -- How they are applied --------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Any], None]] = {
    "bias": fuse_bias_gradients,
    "gelu": use_polynomial_gelu,
    "norm": fuse_norm_gradients,
}
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class ChangedBlocks(TimmBlocks):
    """timm's blocks with some of ``CHANGES``."""

    changes: tuple[str, ...] = ()

    def replace(self, block: nn.Module, device: str) -> nn.Module:
        for change in self.changes:
            CHANGES[change](block)
        return block


@contextlib.contextmanager
def attention_by(kernel: str | None) -> Iterator[None]:
    """Let attention use one of ``KERNELS`` first; None: PyTorch's choice."""
    if kernel is None:
        yield
        return
    first = KERNELS[kernel]
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel([first, *(o for o in others if o != first)], set_priority=True):
        yield
