"""How much work a training step is, counted on a model without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_FACTORS = {
    _aten.mm: (0, 1),
    _aten.bmm: (0, 1),
    _aten.addmm: (1, 2),
    _aten.baddbmm: (1, 2),
    _aten.convolution: (0, 1),
}
"""Which arguments of a product are its two factors."""


def train_flops_per_image(model: nn.Module, input_shape: Sequence[int]) -> float:
    """Return the floating-point operations of forward and backward for one image.

    ``input_shape``: (channels, *spatial). Matrix products only, two operations a multiply-add.
    Recomputation under gradient checkpointing is not counted: the convention of MFU in PaLM
    (Chowdhery et al. 2022, appendix B). ``model`` is on meta, its blocks are ``model.blocks`` and
    cost the same each; it is of no use afterwards.
    """
    blocks = model.blocks
    assert isinstance(blocks, nn.Sequential | nn.ModuleList)
    model.train()  # dropped patches cost nothing
    counts = []
    for depth in range(1, min(len(blocks), 2) + 1):  # all others cost what the second one does
        model.blocks = blocks[:depth]
        with _TrainStepFlops() as counter:
            model(torch.empty(1, *input_shape, device="meta"))
        counts.append(counter.total)
    return float(counts[0] + (len(blocks) - 1) * (counts[-1] - counts[0]))


class _TrainStepFlops(TorchDispatchMode):
    """Counts the operations of a training step while only its forward pass runs.

    The gradient of each factor of a product is a product of the same size; a factor that needs no
    gradient, such as the images, has none. So no backward pass has to run: on a TPU these counts
    are needed before XLA starts, and autograd's engine knows only the devices that are there when
    it first runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = func.overloadpacket
        if operation in flop_registry:
            forward = flop_registry[operation](*args, **(kwargs or {}), out_val=result)
            backward = sum(args[factor].requires_grad for factor in _FACTORS[operation])
            self.total += forward * (1 + backward)
        return result
