"""Linear layers of a block, where tokens are sharded."""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
from torch import nn


def multiply_unfolded(
    block: nn.Module, gather: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> None:
    """Let the linear layers of ``block`` keep images and tokens as two dimensions.

    PyTorch's folds both into one, of which the partitioner cannot shard the tokens alone: with
    several images on a device it gathers all of their tokens. ``gather`` makes a sharded weight
    whole, where nothing else does: else the partitioner may compute with the shards, and exchange
    tokens.
    """

    def forward(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        weight = gather(linear.weight) if gather else linear.weight
        y = torch.einsum("...d,ed->...e", x, weight)
        return y if linear.bias is None else y + linear.bias.to(y.dtype)

    for part in block.modules():
        if type(part) is nn.Linear:
            part.forward = types.MethodType(forward, part)  # type: ignore[method-assign]
