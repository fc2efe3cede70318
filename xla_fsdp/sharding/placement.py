"""The mesh as torch_xla wants it: shardings, and the numbers of devices."""

from __future__ import annotations

import math

import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from training.checkpoints.shards import Chunk, ShardedTensor
from training.mesh import Mesh, Spec
from xla_fsdp.sharding.hosts import by_slice_and_host, number_of
from xla_fsdp.torch_xla_private import (
    REPLICATED,
    local_device_names,
    local_shard_indices,
    op_sharding_arguments,
)


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
