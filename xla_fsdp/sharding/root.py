"""The parts of the model around its blocks, on a mesh of several axes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class _Forward(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self._forward = model, model.forward

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return self._forward(*args, **kwargs)


def compute_with_whole(
    model: nn.Module, whole: Callable[[str, torch.Tensor], torch.Tensor]
) -> None:
    """Let the model compute with all that is small outside of blocks as ``whole`` has it: vectors,
    and what is no weight of a layer, such as embeddings.

    Of a block: with its vectors.

    They are kept sharded along some axes of the mesh. Left to itself, the partitioner may shard
    the features of activations likewise, whose batch is sharded along other axes too, by way of the
    whole tensor ("Involuntary full rematerialization").
    """
    run = _Forward(model)
    layers = (nn.Linear, nn.Conv2d, nn.Conv3d)
    large = {f"{name}.weight" for name, part in model.named_modules() if isinstance(part, layers)}

    def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        small = {
            f"model.{name}": whole(name, parameter)
            for name, parameter in model.named_parameters()
            if not name.startswith("blocks.") and name not in large
        }
        return torch.func.functional_call(run, small, args, kwargs)

    model.forward = forward
