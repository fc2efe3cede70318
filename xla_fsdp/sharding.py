"""The parts of the model around its blocks, on a mesh of several axes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

from training.checkpoints.state import Chunk, ShardedTensor
from training.errors import UsageError
from training.mesh import Mesh, Spec
from xla_fsdp.torch_xla_private import (
    REPLICATED,
    local_device_names,
    local_shard_indices,
    op_sharding_arguments,
)

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
# Which devices belong to a host, and which part of a batch they take.


def number_of(device: str) -> int:
    """Return a device's number: 5 for torch_xla's "TPU:5"."""
    return int(device.rpartition(":")[2])


def by_slice_and_host(attributes: Sequence[dict[str, Any]], local: Collection[int]) -> list[int]:
    """Return all devices, slice by slice and host by host, so that "tensor" stays inside a host.

    (torch_xla's HybridMesh follows the torus, and puts neighbours of different hosts together;
    those would need the same images.) ``attributes`` are torch_xla's: "name" (TPU:5), "coords"
    (x, y, z), on several slices "slice_index". All hosts have as many chips each way as this
    one, whose devices are ``local``.
    """
    places = {number_of(each["name"]): each for each in attributes}
    corners = list(zip(*(places[number]["coords"] for number in local), strict=True))
    sides = [max(along) - min(along) + 1 for along in corners]

    def key(number: int) -> tuple:
        place = places[number]
        host = [at // side for at, side in zip(place["coords"], sides, strict=True)]
        return place.get("slice_index", 0), host[::-1], number

    return sorted(places, key=key)


@dataclass(frozen=True)
class HostPart:
    """What a host's devices take of a global batch: some of its parts, of each image some rows."""

    groups: tuple[int, ...]
    """The parts of the batch, of ``batch_parts``, in order."""
    batch_parts: int
    rows: range
    """The rows of each image; those that XLA gives the devices, the last ones may have fewer."""

    @property
    def rank(self) -> int:
        """Return the number of this share of the images, of ``world_size`` equal ones."""
        return self.groups[0] // len(self.groups)

    @property
    def world_size(self) -> int:
        return self.batch_parts // len(self.groups)

    def in_global_batch(self, share: torch.Tensor, height: int | None = None) -> torch.Tensor:
        """Return the host's images where they stand in the global batch; nothing is elsewhere.

        Of images with ``height`` rows the host has ``rows``; None: of what has none, labels. Only
        what the devices take is sent; memory that is not written to is not taken.
        """
        if height == len(self.rows):  # they are whole, and may have any height
            height = None
        size, (_, *shape) = len(share) // len(self.groups), share.shape
        if height is not None:
            shape[1] = height
        whole = torch.empty((size * self.batch_parts, *shape), dtype=share.dtype)
        for part, group in zip(share.split(size), self.groups, strict=True):
            place = whole[group * size : (group + 1) * size]
            if height is not None:
                place = place[:, :, self.rows.start : self.rows.stop]
            place.copy_(part)
        return whole


def part_of_host(mesh: Mesh, order: Sequence[int], local: Collection[int], height: int) -> HostPart:
    """Return what the devices ``local`` take of a batch of images with ``height`` rows.

    ``order`` has the numbers of all devices in the mesh's order. Raises UsageError where they are
    not all those of some rows of some parts.
    """
    places = [place for place, number in enumerate(order) if number in local]
    groups = sorted({mesh.batch_part(place) for place in places})
    along = sorted({place // mesh.tensor % mesh.domain for place in places})
    if len(groups) * len(along) * mesh.tensor != len(places):
        domain = f"--mesh_domain {mesh.domain} x " if mesh.domain > 1 else ""
        raise UsageError(
            f"{domain}--mesh_tensor {mesh.tensor} must divide the {len(places)} devices of a host"
            + (", or be a multiple of them" if domain else "")
        )
    each = -(-height // mesh.domain)
    rows = range(min(along[0] * each, height), min((along[-1] + 1) * each, height))
    return HostPart(tuple(groups), mesh.batch_parts, rows)


# ------------------------------------------------------------------------------------------------
# The mesh as torch_xla wants it: shardings, and the numbers of devices.


def partition_spec(spec: Spec) -> tuple:
    """Return a spec as torch_xla writes it: an axis, a tuple of axes or None for each dimension."""
    return tuple(axes if len(axes) > 1 else axes[0] if axes else None for axes in spec)


class Sharding(xs.ShardingSpec):
    """torch_xla's own takes a tensor sharded along some axes of the mesh for one along all."""

    def __post_init__(self) -> None:
        (
            self._tile_assignment,
            self._group_assignment,
            self._replication_groups,
            self._sharding_type,
        ) = op_sharding_arguments(self.mesh, self.partition_spec)


def local_devices() -> set[int]:
    """Return the numbers of this host's devices."""
    return {number_of(name) for name in local_device_names()}


def local_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes of a tensor this host's first device has."""
    indices = local_shard_indices(tensor)[0]
    if indices is REPLICATED:
        return tensor.nbytes
    return math.prod(i.stop - i.start for i in indices) * tensor.element_size()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor from this host's devices: whole, or a ShardedTensor of what they have."""
    chunks: dict[tuple[int, ...], Chunk] = {}
    for shard in xs.XLAShardedTensor(tensor).local_shards:
        if shard.indices is REPLICATED:
            return shard.data
        offsets = tuple(index.start for index in shard.indices)
        chunks[offsets] = Chunk(offsets, shard.data)  # unpadded: sharded evenly
    return ShardedTensor(tensor.shape, tensor.dtype, list(chunks.values()))


def device_order(mesh: Mesh) -> list[int]:
    """Return the numbers of all devices in the mesh's order."""
    if not mesh.counts_by_host or mesh.devices == xr.addressable_runtime_device_count():
        return list(range(mesh.devices))
    return by_slice_and_host(xr.global_runtime_device_attributes(), local_devices())


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


def gather(
    weight: torch.Tensor, used: torch.dtype, shard: Spec, whole: Spec, mark: MarkAs
) -> torch.Tensor:
    """Return a weight made whole, from ``shard`` to ``whole``, in the dtype that products take."""
    marks = (functools.partial(mark, spec=each) for each in (shard, whole))
    return Gather.apply(weight, used, *marks)


def gather_in_fp8(
    weight: torch.Tensor, used: torch.dtype, shard: Spec, whole: Spec, mark: MarkAs
) -> torch.Tensor:
    """Do the same as ``gather`` with numbers rounded to fp8."""
    return _GatherInFp8.apply(weight, used, shard, whole, mark)


class _GatherInFp8(torch.autograd.Function):
    """The gradient is that of the whole weight, as if it had not been rounded; it is sharded."""

    @staticmethod
    def forward(
        ctx, weight: torch.Tensor, used: torch.dtype, shard: Spec, whole: Spec, mark: MarkAs
    ) -> torch.Tensor:
        ctx.dtype, ctx.shard, ctx.mark = weight.dtype, shard, mark
        along = next((d for d, axes in enumerate(shard) if axes), 0)
        others = [d for d in range(weight.dim()) if d != along]
        factors = (weight.abs().amax(others, keepdim=True) / _LARGEST).clamp(min=_LEAST)
        rounded = _send((weight / factors).to(_FP8), shard, whole, mark)
        factors = _send(factors, _only(along, shard), _only(along, whole), mark)
        return (rounded.to(weight.dtype) * factors).to(used)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.mark(grad * 1, ctx.shard).to(ctx.dtype), None, None, None, None


def _send(x: torch.Tensor, shard: Spec, whole: Spec, mark: MarkAs) -> torch.Tensor:
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
