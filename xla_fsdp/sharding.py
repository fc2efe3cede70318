"""Marks that hold in the backward pass too, and modules that compute with sharded tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from timm.layers import PatchDropout, PatchDropoutWithIndices
from torch import nn

from training.mesh import Spec

# ------------------------------------------------------------------------------------------------
# Sharding marks that hold in the backward pass, too: on a value and on its gradient.


Mark = Callable[[torch.Tensor], torch.Tensor]


class MarkBoth(torch.autograd.Function):
    """The same mark on a value and on its gradient."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, mark: Mark) -> torch.Tensor:
        ctx.mark = mark
        return mark(x * 1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.mark(grad * 1), None


class Gather(torch.autograd.Function):
    """A sharded weight made whole after its dtype is changed; its gradient sharded, then cast back.

    It tells the partitioner where to gather and where to scatter. Left to itself, that may compute
    with the shards and exchange activations, or reduce whole gradients.
    """

    @staticmethod
    def forward(
        ctx, weight: torch.Tensor, dtype: torch.dtype, shard: Mark, whole: Mark
    ) -> torch.Tensor:
        ctx.dtype, ctx.shard = weight.dtype, shard
        return whole(shard(weight.to(dtype) * 1) * 1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.shard(grad * 1).to(ctx.dtype), None, None, None


class Scatter(torch.autograd.Function):
    """A sum over devices sharded as it is made, its gradient made whole: the inverse of Gather."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, shard: Mark, whole: Mark) -> torch.Tensor:
        ctx.shard, ctx.whole = shard, whole
        return shard(x * 1)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.whole(ctx.shard(grad * 1) * 1), None, None


# ------------------------------------------------------------------------------------------------
# Weights of blocks made whole in the format that ``--gather_dtype`` says.
#
# In fp8 a number is a byte, and there is a factor for each index along a sharded dimension: where
# that is the only one, each device finds the factors of its part by itself.


_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_LEAST = 1e-30
"""Of a factor: a row of zeros has one, too."""


class MarkAs(Protocol):
    """Marks how a tensor lies, and returns it."""

    def __call__(self, x: torch.Tensor, spec: Spec) -> torch.Tensor: ...


class GatherInFp8(torch.autograd.Function):
    """As ``Gather``, by specs, with numbers rounded to fp8; the gradient is not rounded."""

    @staticmethod
    def forward(
        ctx, weight: torch.Tensor, used: torch.dtype, shard: Spec, whole: Spec, mark: MarkAs
    ) -> torch.Tensor:
        ctx.dtype, ctx.shard, ctx.mark = weight.dtype, shard, mark
        along = next((d for d, axes in enumerate(shard) if axes), 0)
        others = [d for d in range(weight.dim()) if d != along]
        factors = (weight.abs().amax(others, keepdim=True) / _LARGEST).clamp(min=_LEAST)
        rounded = _gathered((weight / factors).to(_FP8), shard, whole, mark)
        factors = _gathered(factors, _only(along, shard), _only(along, whole), mark)
        return (rounded.to(weight.dtype) * factors).to(used)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.mark(grad * 1, ctx.shard).to(ctx.dtype), None, None, None, None


def _gathered(x: torch.Tensor, shard: Spec, whole: Spec, mark: MarkAs) -> torch.Tensor:
    return mark(mark(x * 1, shard) * 1, whole)


def _only(dimension: int, spec: Spec) -> Spec:
    return tuple(axes if d == dimension else () for d, axes in enumerate(spec))


# ------------------------------------------------------------------------------------------------
# The convolution that makes patches into tokens, as a matrix product.


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


# ------------------------------------------------------------------------------------------------


def drop_patches_of_whole_images(model: nn.Module, mark_images: Mark) -> None:
    """Let patches be dropped from whole images, though blocks shard their tokens.

    Where devices have unequal parts of them, XLA ends the process.
    """
    drop = getattr(model, "patch_drop", None)
    if not isinstance(drop, PatchDropout | PatchDropoutWithIndices):
        return
    forward = drop.forward

    def forward_with_whole_images(x: torch.Tensor):
        found = forward(MarkBoth.apply(x, mark_images))
        if isinstance(found, torch.Tensor):
            return MarkBoth.apply(found, mark_images)
        left, indices = found
        return MarkBoth.apply(left, mark_images), indices

    drop.forward = forward_with_whole_images


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
