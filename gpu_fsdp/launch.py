"""Join the processes that torchrun started, and run a function on a backend in each."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from gpu_fsdp.backend import GpuBackend
from gpu_fsdp.resolve_gpu import GpuRun, device_type
from training import joining
from training.backend import Backend
from training.errors import UsageError

Body = Callable[[GpuRun, Backend], None]


def launch(body: Body, run: GpuRun) -> None:
    """Call ``body(run, backend)`` in this process, one of a process group's."""
    device = _device()
    if device.type == "cuda":
        _choose_tf32(run.own.tf32)
    with _without_greetings():
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


def _choose_tf32(allowed: bool) -> None:
    """PyTorch's own default is TF32 in convolutions but not in matrix products.

    PyTorch 2.9 warns of this interface; its torch.compile still asks it, and refuses a mixture.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings")
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed


@contextlib.contextmanager
def _without_greetings() -> Iterator[None]:
    """gloo prints a line on stdout for every group that is made (PyTorch 2.9)."""
    sys.stdout.flush()
    stdout = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _device() -> torch.device:
    if device_type() == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _join(device: torch.device) -> None:
    """torchrun tells rank and meeting point; a process started without it is alone."""
    # gloo beside NCCL: checkpoints are planned, and offloaded gradients summed, on the CPU.
    backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    bound = device if device.type == "cuda" else None
    if "RANK" in os.environ:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store: dist.Store = joining.join(rank, world_size)
        _check_devices_alike(store, world_size, device)
    else:
        rank, world_size, store = 0, 1, dist.HashStore()
    dist.init_process_group(
        backends, store=store, rank=rank, world_size=world_size, device_id=bound
    )


def _check_devices_alike(store: dist.Store, world_size: int, device: torch.device) -> None:
    """Raises UsageError in all processes if some have a GPU and some not: NCCL would wait for all,
    and without ``--fsdp`` they would even choose different forms of it."""
    store.add(f"on_{device.type}", 1)
    if device.type == "cpu":
        store.set("without_gpu", socket.gethostname())
    if store.add("told_device", 1) == world_size:
        store.set("all_told_device", "")
    store.wait(["all_told_device"])
    if 0 < store.add("on_cuda", 0) < world_size:
        host = store.get("without_gpu").decode()
        raise UsageError(
            f"PyTorch finds no CUDA GPU on {host}, but on other nodes: see what nvidia-smi says "
            "there, or start without that node",
            agreed=True,
        )


def _backend(run: GpuRun, device: torch.device) -> GpuBackend:
    if run.own.fsdp == "megatron":
        from gpu_fsdp.megatron import MegatronBackend

        return MegatronBackend(run, device)
    from gpu_fsdp.fsdp2 import Fsdp2Backend

    return Fsdp2Backend(run, device)
