"""Join the processes that torchrun started, and run a function on a backend in each."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable

import torch.distributed as dist

from gpu_fsdp import devices, megatron_private
from gpu_fsdp.devices import Device
from gpu_fsdp.gpu_backend import GpuBackend
from gpu_fsdp.resolve_gpu import GpuRun
from models import timm_private
from training import versions
from training.backend import Backend
from training.errors import UsageError, is_first_of_torchrun
from training.hosts import joining
from training.hosts.processes import without_greetings

Body = Callable[[GpuRun, Backend], None]


def launch(body: Body, run: GpuRun) -> None:
    """Call ``body(run, backend)`` in this process, one of a process group's."""
    device = devices.choose()
    device.start()
    if is_first_of_torchrun():
        used = [timm_private, *([megatron_private] if run.own.fsdp == "megatron" else [])]
        versions.warn_of_others(*(each.WRITTEN_FOR for each in used))
    device.set_tf32(run.own.tf32)
    with without_greetings():
        _join(device)
        backend = _backend(run, device)
    try:
        body(run, backend)
        dist.barrier()  # no process leaves while another still talks to it
    finally:
        # A gloo thread that lets go of a finished collective's tensors while Python shuts down
        # aborts the process. With all that uses its groups gone, its threads end here.
        backend.close()
        del backend
        gc.collect()
        dist.destroy_process_group()


def _join(device: Device) -> None:
    """Make the process group: torchrun tells rank and meeting point, a lone process needs none."""
    if "RANK" in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store: dist.Store = joining.join(rank, world_size)
        _check_devices_alike(store, world_size, device)
    else:
        rank, world_size, store = 0, 1, dist.HashStore()
    dist.init_process_group(
        device.collectives,
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device.bound_to,
    )


def _check_devices_alike(store: dist.Store, world_size: int, device: Device) -> None:
    """Compare the processes' kinds of device.

    Raises UsageError in all of them if some have an accelerator and some not: its collectives would
    wait for all, and without ``--fsdp`` they might even choose different forms of it.
    """
    if device.is_host:
        store.set("without", socket.gethostname())
    else:
        store.add("with", 1)
        store.set("accelerator", device.noun)
        store.set("status_command", device.status_command)
    if store.add("told_device", 1) == world_size:
        store.set("all_told_device", "")
    store.wait(["all_told_device"])
    if 0 < store.add("with", 0) < world_size:
        host, wanted, command = (
            store.get(key).decode() for key in ("without", "accelerator", "status_command")
        )
        raise UsageError(
            f"PyTorch finds no {wanted} on {host}, but on other nodes: see what {command} says "
            "there, or start without that node",
            agreed=True,
        )


def _backend(run: GpuRun, device: Device) -> GpuBackend:
    if run.own.fsdp == "megatron":
        from gpu_fsdp.megatron import MegatronBackend

        return MegatronBackend(run, device)
    from gpu_fsdp.fsdp2 import Fsdp2Backend

    return Fsdp2Backend(run, device)
