"""Patches of images, embedded by a matrix product."""

import functools
from collections.abc import Callable

import torch
from torch import nn


def embed_by_product(
    model: nn.Module, mark: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> None:
    """Compute convolutions of ``model`` that use each pixel once, in patches, as matrix products.

    TPU compilers lay out a few images anew for the weight's gradient of such a convolution, or need
    many minutes for it. ``mark`` is applied to the patches of images, (images, rows, ...).
    """

    def embed(part: nn.Conv2d | nn.Conv3d, images: torch.Tensor) -> torch.Tensor:
        """Return (batch, width, *grid) for (batch, channels, *size), as the convolution does."""
        sizes, grid, x = part.kernel_size, list[int](), images
        for dimension, size in reversed(list(enumerate(sizes, 2))):
            grid.insert(0, images.shape[dimension] // size)
            x = x.narrow(dimension, 0, grid[0] * size).unflatten(dimension, (grid[0], size))
        # (batch, channels, rows, in a patch, columns, in a patch) to (batch, *grid, in a patch)
        count = len(sizes)
        places = range(2, 2 + 2 * count, 2)
        x = x.permute(0, *places, 1, *(place + 1 for place in places)).flatten(1 + count)
        x = x if mark is None else mark(x)
        tokens = torch.einsum("bnp,ep->bne", x.flatten(1, count), part.weight.flatten(1))
        if part.bias is not None:
            tokens = tokens + part.bias.to(tokens.dtype)
        return tokens.transpose(1, 2).unflatten(2, grid)

    for part in model.modules():
        if type(part) not in (nn.Conv2d, nn.Conv3d):  # timm's kinds change the weight before
            continue
        assert isinstance(part, nn.Conv2d | nn.Conv3d)
        plain = part.groups == 1 and not any(map(int, part.padding)) and set(part.dilation) == {1}
        if plain and part.stride == part.kernel_size and max(part.kernel_size) > 1:
            part.forward = functools.partial(embed, part)  # type: ignore[method-assign]
