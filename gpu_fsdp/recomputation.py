"""Wrappers around each transformer block: recomputation of activations, torch.compile.

Both replace ``block.forward`` and leave the module as it is, so parameter names stay
those of the plain model and FSDP's hooks stay outside of what is compiled.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_aten: Any = torch.ops.aten
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
_MATRIX_PRODUCTS = {_aten.mm.default, _aten.addmm.default}


def checkpoint_activations(block: nn.Module, mode: str) -> None:
    """Recompute the block in the backward pass: all of it ("full"), or "selective".

    Selective keeps the results of attention and of every second matrix product (the
    choice of torchtitan): they cost the most time for the memory they take.
    """
    options: dict[str, Any] = {}
    if mode == "selective":
        options["context_fn"] = _selective_contexts
    forward = block.forward
    block.forward = functools.partial(checkpoint, forward, use_reentrant=False, **options)


def _selective_contexts() -> Any:
    products = {True: 0, False: 0}  # in the forward pass, in the recomputation

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op in _MATRIX_PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compile_block(block: nn.Module, *, whole: bool) -> None:
    """Let torch.compile make one graph of the block's forward pass, and one of its backward.

    Not ``whole``: of what is before and after its attention, which talks with other processes.
    """
    block.forward = torch.compile(block.forward, fullgraph=whole)
