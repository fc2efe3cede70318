"""Changes what a module computes from outside: its output, bf16, breaks of the graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

# -- attention under autocast ----------------------------------------------------------
#
# On other devices autocast lowers ``scaled_dot_product_attention`` as any product. For XLA it does
# not (torch_xla 2.9), so queries and keys that a norm has made fp32 would meet values in bf16,
# which is an error. Importing this file mends that.

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def _lowered(keys: torch._C.DispatchKeySet, *args, **kwargs) -> torch.Tensor:
    """Cast fp32 arguments as for other products; the operations inside stay under autocast."""
    dtype = torch.get_autocast_dtype("xla")
    lower = [
        x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in args
    ]
    return _ATTENTION.redispatch(keys.remove("AutocastXLA"), *lower, **kwargs)


_library = torch.library.Library("aten", "IMPL")
_library.impl("scaled_dot_product_attention", _lowered, "AutocastXLA", with_keyset=True)


# -- wrappers of ``forward`` -----------------------------------------------------------


def after_forward(module: nn.Module, apply: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Pass the module's output through ``apply``."""
    forward = module.forward

    def forward_and_apply(*args, **kwargs):
        return apply(forward(*args, **kwargs))

    module.forward = forward_and_apply


def compute_in_bf16(model: nn.Module) -> None:
    """Compute matrix products of the forward pass, and so of the backward pass, in bf16."""
    forward = model.forward

    def forward_in_bf16(*args, **kwargs):
        with torch.autocast("xla", dtype=torch.bfloat16):
            return forward(*args, **kwargs)

    model.forward = forward_in_bf16


def add_in_bf16(blocks: nn.Module) -> None:
    """Give the first block, or the loop over all of them, its input in bf16.

    Then residuals are added in bf16 too: products have that dtype.
    """
    forward = blocks.forward

    def forward_from_bf16(x: torch.Tensor, *args, **kwargs):
        return forward(x.to(torch.bfloat16), *args, **kwargs)

    blocks.forward = forward_from_bf16


def break_graph_every(n: int, blocks: list[nn.Module], break_graph: Callable[[], None]) -> None:
    """End the graph after every ``n`` blocks, for graphs too large for the compiler.

    The backward pass breaks at the same places.
    """

    def break_both_ways(x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:  # no autograd.Function: its result is one tensor more
            x.register_hook(lambda _: break_graph())
        break_graph()
        return x

    for block in blocks[n - 1 : -1 : n]:
        after_forward(block, break_both_ways)
