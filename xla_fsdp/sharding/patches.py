"""The convolution that makes patches into tokens, as a matrix product."""

from __future__ import annotations

import functools

import torch
from torch import nn

from xla_fsdp.sharding.marks import Mark, MarkBoth


def convolve_by_product(model: nn.Module, mark: Mark) -> None:
    """Let convolutions of ``model`` that take each pixel once, in patches, be matrix products.

    Of the weight's gradient of such a convolution over large images libtpu 0.0.21 makes a program
    so long that it is compiled for many minutes (docs/findings.md). And where rows are sharded, the
    partitioner gathers whole images for it. ``mark`` marks (images, rows, ...).
    """
    for part in model.modules():
        if isinstance(part, nn.Conv2d | nn.Conv3d) and _takes_each_pixel_once(part):
            part.forward = functools.partial(_convolve, part, mark)  # type: ignore[method-assign]


def _takes_each_pixel_once(part: nn.Conv2d | nn.Conv3d) -> bool:
    plain = type(part) in (nn.Conv2d, nn.Conv3d)  # timm's kinds change the weight before
    plain &= part.groups == 1 and not any(map(int, part.padding)) and set(part.dilation) == {1}
    return plain and part.stride == part.kernel_size and max(part.kernel_size) > 1


def _convolve(part: nn.Conv2d | nn.Conv3d, mark: Mark, images: torch.Tensor) -> torch.Tensor:
    """Return (batch, width, *grid) for (batch, channels, *size), as the convolution does."""
    sizes, grid = part.kernel_size, list[int]()
    x = images
    for dimension, size in reversed(list(enumerate(sizes, 2))):
        grid.insert(0, images.shape[dimension] // size)
        x = x.narrow(dimension, 0, grid[0] * size).unflatten(dimension, (grid[0], size))
    # (batch, channels, rows, in a patch, columns, in a patch) to (batch, *grid, in a patch)
    count = len(sizes)
    places = range(2, 2 + 2 * count, 2)
    x = x.permute(0, *places, 1, *(place + 1 for place in places)).flatten(1 + count)
    x = MarkBoth.apply(x, mark)
    tokens = torch.einsum("bnp,ep->bne", x.flatten(1, count), part.weight.flatten(1))
    if part.bias is not None:
        tokens = tokens + part.bias.to(tokens.dtype)
    return tokens.transpose(1, 2).unflatten(2, grid)
