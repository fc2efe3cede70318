"""Which devices belong to a host, and which part of a batch they take."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from training.errors import UsageError
from training.mesh import Mesh


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


def local_groups(mesh: Mesh, order: Sequence[int], local: Collection[int]) -> list[int]:
    """Return which of the parts of a batch are this host's.

    Raises UsageError where devices that share a part are on several hosts.
    """
    places = [place for place, number in enumerate(order) if number in local]
    groups = sorted({mesh.batch_part(place) for place in places})
    if len(groups) * mesh.devices_a_part != len(places):
        raise UsageError(
            f"--mesh_tensor {mesh.tensor} must divide the {len(places)} devices of a host"
        )
    return groups


def in_global_batch(share: torch.Tensor, groups: Sequence[int], of: int) -> torch.Tensor:
    """Return a host's images where they stand in the global batch; nothing is written elsewhere.

    The batch has ``of`` parts, those of this host are ``groups``. Only they are sent; memory
    that is not written to is not taken.
    """
    size = len(share) // len(groups)
    whole = torch.empty((size * of, *share.shape[1:]), dtype=share.dtype)
    for part, group in zip(share.split(size), groups, strict=True):
        whole[group * size : (group + 1) * size] = part
    return whole
