"""Which images, and which rows of them, each process loads: alone, or for those it shares with."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from data.loading.loader import BatchLoader
from data.loading.share import Share
from gpu_fsdp.domain.images import SharedImages
from gpu_fsdp.resolve_gpu import GpuRun
from training.mesh import Mesh


def rows_of(run: GpuRun, place: int) -> range:
    """Return which rows of each image the process at this place of the mesh has."""
    sizes = run.model.sizes
    patch = sizes.input_shape[1] // sizes.grid[0]
    rows = run.mesh.rows_of(sizes.grid[0], place)
    return range(rows.start * patch, rows.stop * patch)


def places_of_part(mesh: Mesh, here: int) -> tuple[range, int]:
    """Return the places in the mesh of those that share images with the one at ``here``, and which
    of them that is."""
    part = mesh.batch_part(here)
    places = range(part * mesh.domain, (part + 1) * mesh.domain)
    return places, here - places.start


def open_loader(
    run: GpuRun, open_share: Callable[[Share], BatchLoader], images: int, *, reads_rows: bool
) -> BatchLoader:
    """Open this process's loader, as ``training.backend.Backend.loader`` says."""
    mesh, here = run.mesh, dist.get_rank()
    part, of_host = mesh.batch_part(here), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if mesh.domain == 1:
        return open_share(Share(part, mesh.batch_parts, of_host=of_host))
    if reads_rows:
        return open_share(Share(part, mesh.batch_parts, rows_of(run, here), of_host=of_host))
    of_part = images // mesh.batch_parts
    sources = math.gcd(mesh.domain, of_part)
    places, index = places_of_part(mesh, here)
    share = Share(
        part * sources + min(index, sources - 1),
        mesh.batch_parts * sources,
        loads=index < sources,
        of_host=of_host,
    )
    rows = [rows_of(run, place) for place in places]
    group, each = _group_of_hosts(mesh), of_part // sources
    return SharedImages(open_share(share), group, rows, sources, each)


def _group_of_hosts(mesh: Mesh) -> dist.ProcessGroup:
    """Make a new group of those that share images, for tensors on the CPU."""
    ranks = torch.arange(mesh.devices).view(-1, mesh.domain).tolist()
    group, _ = dist.new_subgroups_by_enumeration(ranks, backend="gloo")
    return group
