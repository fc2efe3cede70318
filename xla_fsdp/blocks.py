"""What is laid around each transformer block: recomputation, sharding marks, graph cuts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch_xla
from torch import nn


def after_forward(module: nn.Module, apply: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Pass the module's output through ``apply``; the module itself stays as it is."""
    forward = module.forward

    def forward_and_apply(*args, **kwargs):
        return apply(forward(*args, **kwargs))

    module.forward = forward_and_apply


def compute_in_bf16(model: nn.Module) -> None:
    """Run the forward pass, and so the backward, with matrix products in bf16."""
    forward = model.forward

    def forward_in_bf16(*args, **kwargs):
        with torch.autocast("xla", dtype=torch.bfloat16):
            return forward(*args, **kwargs)

    model.forward = forward_in_bf16


class _Cut(torch.autograd.Function):
    """Ends the graph here, on the way forward and on the way back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        torch_xla.sync()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor) -> torch.Tensor:
        torch_xla.sync()
        return grads[0]


def cut_every(blocks: list[nn.Module], n: int) -> None:
    """End the graph after every ``n`` blocks, for graphs too large for the compiler."""
    for block in blocks[n - 1 : -1 : n]:
        after_forward(block, _Cut.apply)
