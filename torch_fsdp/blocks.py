"""What one transformer block becomes: its kind, recomputation of activations, torch.compile.

Recomputation and torch.compile replace ``block.forward`` and leave the module as it is. So
parameter names stay those of the plain model, and FSDP's hooks stay outside of what is compiled.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

if TYPE_CHECKING:
    from torch_fsdp.resolve_torch import TorchRecipe, TorchRun

_aten: Any = torch.ops.aten
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
_MATRIX_PRODUCTS = {_aten.mm.default, _aten.addmm.default}


class TimmBlocks:
    """timm's own blocks. A subclass replaces them by others that hold the same weights."""

    def check(self, run: TorchRun) -> None:
        """Raises UsageError if such blocks cannot run here, or not with this model and batch."""

    def replace(self, block: nn.Module, device: str) -> nn.Module:
        """Return the block that takes the place of timm's ``block``."""
        return block

    def checkpoint(self, block: nn.Module, mode: str) -> None:
        """Recompute activations of the block in the backward pass: "full" or "selective"."""
        options: dict[str, Any] = {}
        if mode == "selective":
            options["context_fn"] = _selective_contexts
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)

    def wrap_model(self, model: nn.Module) -> None:
        """Change how the whole sharded model computes."""

    def timm_name(self, name: str) -> str:
        """Return a parameter's name in timm's model, given its name in one with these blocks."""
        return name


def parallelize_block(
    model: nn.Module, name: str, block: nn.Module, recipe: TorchRecipe, device: torch.device
) -> nn.Module:
    """Return the block that is to be sharded instead of timm's ``block``.

    ``name`` is its name in ``model``.
    """
    if recipe.compile == "around attention":
        # Inside of the recomputation: one that has graph breaks would not be compiled at all.
        block.forward = torch.compile(block.forward)
    block = recipe.blocks.replace(block, str(device))
    model.set_submodule(name, block)
    if recipe.grad_ckpt != "none":
        recipe.blocks.checkpoint(block, recipe.grad_ckpt)
    if recipe.compile == "block":
        block.forward = torch.compile(block.forward, fullgraph=True)
    return block


def _selective_contexts() -> Any:
    """Save the results of attention and of every second matrix product, as torchtitan does: they
    take the most time for their memory."""
    products = {True: 0, False: 0}  # in the recomputation, in the forward pass

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in _ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op in _MATRIX_PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
