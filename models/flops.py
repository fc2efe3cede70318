"""How much work a training step is, counted on a model without memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def train_flops_per_image(model: nn.Module, input_shape: Sequence[int]) -> float:
    """Floating-point operations of forward and backward for one image of ``input_shape``.

    Matrix products only, two operations a multiply-add; of the backward pass what it needs: the
    first layer's input wants no gradient. Recomputation under gradient checkpointing is not
    counted: the convention of MFU in PaLM (Chowdhery et al. 2022, appendix B). ``model`` is on
    meta, its blocks are ``model.blocks`` and cost the same each; it is of no use afterwards.
    """
    blocks = model.blocks
    assert isinstance(blocks, nn.Sequential | nn.ModuleList)
    model.train()  # dropped patches cost nothing
    counts = []
    for depth in range(1, min(len(blocks), 2) + 1):  # all others cost what the second one does
        model.blocks = blocks[:depth]
        counts.append(_count(model, input_shape))
    return float(counts[0] + (len(blocks) - 1) * (counts[-1] - counts[0]))


def _count(model: nn.Module, input_shape: Sequence[int]) -> int:
    images = torch.empty(1, *input_shape, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(images).sum().backward()
    return counter.get_total_flops()
