"""Starts XLA, and calls a function with a backend in every process."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from models import timm_private
from training.backend import Backend
from training.errors import StoppedBySignal, warn_of_others
from training.flags import PROGRAM
from training.processes.output import drop_unread_output
from training.processes.parent import end_with
from training.processes.stopping import ProcessSignals, process_signals
from xla_fsdp import jax_private, torch_xla_private, tpu
from xla_fsdp.environment import device_type
from xla_fsdp.resolve_xla import XlaRun
from xla_fsdp.starting import StartWatch, watch

Body = Callable[[XlaRun, Backend], None]


class forbid_autograd(TorchFunctionMode):
    """Refuse backward passes inside, for all that runs before XLA has started.

    Autograd makes a queue for each device when it first runs, even on meta; XLA's do not exist yet.
    The first backward pass on XLA then ends the process ("device_ready_queues_", torch 2.9.0).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            raise RuntimeError(
                "a backward pass before XLA has started: autograd would not know XLA's devices. "
                "Do it in another process, or without autograd (as models/spec.py counts)"
            )
        return func(*args, **(kwargs or {}))


_PORT = 12355
"""The default of MASTER_PORT, as torch_xla's."""


def launch(body: Body, run: XlaRun) -> None:
    """Call ``body(run, backend)`` in one process a host (SPMD), or one a device (nested FSDP)."""
    device = device_type()
    os.environ["PJRT_DEVICE"] = device
    cpu_devices = run.backend_config.cpu_devices
    os.environ["CPU_NUM_DEVICES"] = str(cpu_devices)
    # XLA on the CPU has a thread for each core; virtual devices wait for each other and need more.
    os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 8 * cpu_devices)))
    import torch_xla.runtime as xr

    if device == "TPU":
        tpu.set_for_this_tpu()
    elif version("torch_xla") == torch_xla_private.WRITTEN_FOR["torch_xla"]:
        # Unless XLA_FLAGS says otherwise, compile without XLA's newer code for fusions, with which
        # it takes twice as long (docs/evidence/benchmarks.md). Another version may lack the flag,
        # and would end the process over it.
        flags = {"xla_cpu_use_fusion_emitters": "false"}
        os.environ["XLA_FLAGS"] = tpu.add_flags(os.environ.get("XLA_FLAGS", ""), flags)

    if run.backend_config.xla_fsdp == "nested":
        _launch_nested(body, run, device)
        return
    if device == "TPU":
        watch.begin(os.getpid())
    xr.use_spmd()
    _join()
    watch.end()
    from xla_fsdp.spmd import SpmdBackend

    run = run.on(xr.global_runtime_device_count())
    body(run, SpmdBackend(run))


def _launch_nested(body: Body, run: XlaRun, device: str) -> None:
    """Start a process a device; a single device runs in this one."""
    import torch_xla

    received: list[int] = []

    def pass_to_children(number: int, frame: FrameType | None) -> None:
        """Pass a signal on to the children: it may reach the parent alone, Ctrl-C reaches all."""
        received.append(number)
        for child in multiprocessing.active_children():
            if child.pid:
                os.kill(child.pid, number)

    single = device == "CPU"
    if not single:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, pass_to_children)
    arguments = (process_signals, watch, body, run, None if single else os.getpid())
    try:
        torch_xla.launch(_run_nested, args=arguments, debug_single_process=single)
    except BrokenProcessPool:
        if not received:
            raise
        raise StoppedBySignal(received[0]) from None  # before there was anything to write


def _join() -> None:
    """Make the group of all processes, in which they plan checkpoints together, and warn once of
    other versions.

    torch_xla lets process 0 hold its store, and looks for it at MASTER_ADDR; but the runtime may
    have given that number to any host. So where a launcher says which host MASTER_ADDR is, that one
    (NODE_RANK 0) holds the store, in SPMD, whose hosts have one process each.
    """
    import torch.distributed as dist
    import torch_xla.runtime as xr

    count, index = xr.process_count(), xr.process_index()
    address, rank = os.environ.get("MASTER_ADDR"), os.environ.get("NODE_RANK")
    if count > 1 and address and rank and xr.is_spmd():
        port = int(os.environ.get("MASTER_PORT", _PORT))
        store = dist.TCPStore(address, port, count, is_master=rank == "0")
        dist.init_process_group("gloo", store=store, rank=index, world_size=count)
    elif count > 1:
        import torch_xla.distributed.xla_backend  # noqa: F401 - registers xla://

        dist.init_process_group("gloo", init_method="xla://")
    if index == 0:
        used = (torch_xla_private, jax_private, timm_private)
        warn_of_others(*(module.WRITTEN_FOR for module in used))


def _run_nested(
    index: int,
    _installed: ProcessSignals,
    started_watch: StartWatch,
    body: Body,
    run: XlaRun,
    parent: int | None,
) -> None:
    """Call the body in one of the processes; ``parent`` starts them, None if it is the only one.

    Unpickling ``_installed`` and ``started_watch`` has installed signal handlers and the watch.
    """
    if parent is not None:
        end_with(parent)
    _join()
    started_watch.end()
    import torch_xla.runtime as xr

    from xla_fsdp.nested import NestedBackend

    run = run.on(xr.global_runtime_device_count())
    with drop_unread_output(PROGRAM):  # this process has streams of its own
        body(run, NestedBackend(run))
