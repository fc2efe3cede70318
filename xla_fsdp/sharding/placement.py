"""The mesh as torch_xla wants it: shardings, and the numbers of devices."""

from __future__ import annotations

import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from training.mesh import Mesh, Spec
from xla_fsdp.sharding.hosts import by_slice_and_host, number_of
from xla_fsdp.torch_xla_private import local_device_names, op_sharding_arguments


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


def device_order(mesh: Mesh) -> list[int]:
    """Return the numbers of all devices in the mesh's order."""
    if not mesh.counts_by_host or mesh.devices == xr.addressable_runtime_device_count():
        return list(range(mesh.devices))
    return by_slice_and_host(xr.global_runtime_device_attributes(), local_devices())
