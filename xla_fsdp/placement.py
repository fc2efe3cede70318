"""Which device stands where in the mesh, and which part of a batch a host's devices take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from training.errors import UsageError
from xla_fsdp.mesh import MeshShape, Spec


def partition_spec(spec: Spec) -> tuple:
    """As torch_xla writes it."""
    return tuple(axes if len(axes) > 1 else axes[0] if axes else None for axes in spec)


class Sharding(xs.ShardingSpec):
    """torch_xla's own takes a tensor cut along some axes of the mesh for one cut along all."""

    def __post_init__(self) -> None:
        (
            self._tile_assignment, self._group_assignment, self._replication_groups,
            self._sharding_type,
        ) = self.mesh._get_op_sharding_args(self.partition_spec)  # fmt: skip


def local_devices() -> set[int]:
    """The numbers of this host's devices."""
    return {_number(name) for name in torch_xla._XLAC._xla_get_runtime_devices()}


def device_order(mesh: MeshShape) -> list[int]:
    """The numbers of all devices in the mesh's order."""
    if mesh.devices in (mesh.fsdp, xr.addressable_runtime_device_count()):
        return list(range(mesh.devices))
    return by_slice_and_host(xr.global_runtime_device_attributes(), local_devices())


def by_slice_and_host(attributes: Sequence[dict[str, Any]], local: Collection[int]) -> list[int]:
    """All devices, slice by slice and host by host, so that "tensor" stays inside a host.

    (torch_xla's HybridMesh follows the torus, and puts neighbours of different hosts together;
    those would need the same images.) ``attributes`` are torch_xla's: "name" (TPU:5), "coords"
    (x, y, z), on several slices "slice_index". All hosts have as many chips each way as this
    one, whose devices are ``local``.
    """
    places = {_number(each["name"]): each for each in attributes}
    corners = list(zip(*(places[number]["coords"] for number in local), strict=True))
    sides = [max(along) - min(along) + 1 for along in corners]

    def key(number: int) -> tuple:
        place = places[number]
        host = [at // side for at, side in zip(place["coords"], sides, strict=True)]
        return place.get("slice_index", 0), host[::-1], number

    return sorted(places, key=key)


def local_groups(mesh: MeshShape, order: Sequence[int], local: Collection[int]) -> list[int]:
    """Which of the ``dcn * fsdp`` parts of a batch are this host's.

    Raises UsageError where devices along "tensor", which share a part, are on several hosts.
    """
    places = [place for place, number in enumerate(order) if number in local]
    groups = sorted({place // mesh.tensor for place in places})
    if len(groups) * mesh.tensor != len(places):
        raise UsageError(
            f"--mesh_tensor {mesh.tensor} must divide the {len(places)} devices of a host"
        )
    return groups


def in_global_batch(share: torch.Tensor, groups: Sequence[int], of: int) -> torch.Tensor:
    """A host's images where they stand in the global batch; nothing is written elsewhere.

    The batch has ``of`` parts, those of this host are ``groups``. Only they are sent; memory
    that is not written to is not taken.
    """
    size = len(share) // len(groups)
    whole = torch.empty((size * of, *share.shape[1:]), dtype=share.dtype)
    for part, group in zip(share.split(size), groups, strict=True):
        whole[group * size : (group + 1) * size] = part
    return whole


def _number(name: str) -> int:
    return int(name.rpartition(":")[2])
