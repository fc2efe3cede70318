"""Join the processes that torchrun started, and run a function on a backend in each."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from gpu_fsdp import options
from gpu_fsdp.backend import GpuBackend
from training.backend import Backend

Run = Callable[[argparse.Namespace, Backend], None]


def launch(run: Run, args: argparse.Namespace) -> None:
    """Call ``run(args, backend)`` in this process, one of a process group's."""
    device = _device()
    # PyTorch's own default is TF32 in convolutions but not in matrix products.
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = args.tf32
    with _without_greetings():
        _join(device)
        backend = _backend(args, device)
    try:
        run(args, backend)
        dist.barrier()  # no process leaves while another still talks to it
    finally:
        # A gloo thread that lets go of a finished collective's tensors while Python shuts down
        # aborts the process. With all that uses its groups gone, its threads end here.
        backend.close()
        del backend
        gc.collect()
        dist.destroy_process_group()


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
    if options.device_type() == "cpu":
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
        dist.init_process_group(backends, device_id=bound)
    else:
        store = dist.HashStore()
        dist.init_process_group(backends, store=store, rank=0, world_size=1, device_id=bound)


def _backend(args: argparse.Namespace, device: torch.device) -> GpuBackend:
    if options.fsdp_form(args) == "megatron":
        from gpu_fsdp.megatron import MegatronBackend

        return MegatronBackend(args, device)
    from gpu_fsdp.fsdp2 import Fsdp2Backend

    return Fsdp2Backend(args, device)
