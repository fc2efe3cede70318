"""Which devices belong to a host, and which part of a batch they need. Needs no torch_xla."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from training.errors import UsageError
from training.mesh import Mesh


def device_order(attributes: Sequence[dict[str, Any]], local: Collection[int] = ()) -> list[int]:
    """Return the ids of all devices, slice by slice, each slice in the order of a single slice.

    With ``local`` (this host's devices), the order is also host by host, so that "tensor" stays
    within a host. (torch_xla's HybridMesh groups neighbors from different hosts, which would then
    need the same images.) ``attributes`` come from torch_xla: "name" (TPU:5), "coords" (x, y, z)
    and, with several slices, "slice_index". All hosts must have the shape of this one.
    """
    places = {int(device["name"].rpartition(":")[2]): device for device in attributes}
    corners = list(zip(*(places[number]["coords"] for number in local), strict=True))
    sides = [max(along) - min(along) + 1 for along in corners]

    def key(number: int) -> tuple:
        place = places[number]
        host = [at // side for at, side in zip(place.get("coords", ()), sides, strict=False)]
        return place.get("slice_index", 0), host[::-1], number

    return sorted(places, key=key)


@dataclass(frozen=True)
class HostPart:
    """What a host's devices need of a global batch: some batch parts, some rows of each image."""

    groups: tuple[int, ...]
    """The indices of these parts, in order."""
    batch_shards: int
    """Number of parts of the whole batch."""
    rows: range
    """The rows of each image, as XLA shards them: the last devices may have fewer."""

    @property
    def shard(self) -> int:
        """Return the index of this host's share among ``shards`` equal shares of the images."""
        return self.groups[0] // len(self.groups)

    @property
    def shards(self) -> int:
        return self.batch_shards // len(self.groups)

    def in_global_batch(
        self, shard: torch.Tensor, dimension: int | None, height: int
    ) -> torch.Tensor:
        """Return a global batch with the host's samples in place and the rest uninitialized, which
        is neither sent nor allocated. ``shard`` has the host's ``rows``, of ``height`` rows of an
        image, in this ``dimension`` of a sample; None: it has all of each sample."""
        size, (_, *shape) = len(shard) // len(self.groups), shard.shape
        if dimension is not None:
            shape[dimension] = height
        whole = torch.empty((size * self.batch_shards, *shape), dtype=shard.dtype)
        for part, group in zip(shard.split(size), self.groups, strict=True):
            place = whole[group * size : (group + 1) * size]
            if dimension is not None:
                place = place.narrow(1 + dimension, self.rows.start, len(self.rows))
            place.copy_(part)
        return whole


def part_of_host(mesh: Mesh, order: Sequence[int], local: Collection[int], height: int) -> HostPart:
    """Return what the devices ``local`` need of a batch of images with ``height`` rows.

    ``order`` has the ids of all devices in mesh order. Raises UsageError if other hosts need the
    same rows of the same parts.
    """
    places = [place for place, number in enumerate(order) if number in local]
    groups = sorted({mesh.batch_shard(place) for place in places})
    along = sorted({place // mesh.tensor % mesh.domain for place in places})
    if len(groups) * len(along) * mesh.tensor != len(places):
        domain = f"--mesh_domain {mesh.domain} x " if mesh.domain > 1 else ""
        raise UsageError(
            f"{domain}--mesh_tensor {mesh.tensor} must divide {len(places)}, the number of devices "
            "per host" + (", or be a multiple of it" if domain else "")
        )
    share = -(-height // mesh.domain)
    rows = range(min(along[0] * share, height), min((along[-1] + 1) * share, height))
    return HostPart(tuple(groups), mesh.batch_shards, rows)
