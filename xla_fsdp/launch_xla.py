"""Starts XLA and calls a function with a backend in every process."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from models import timm_private
from tpu_machines import add_flags
from training.backend import Backend
from training.command_line import PROGRAM
from training.errors import StoppedBySignal, warn_of_others
from training.processes.output import drop_unread_output
from training.processes.parent import end_with
from training.processes.rendezvous import listen
from training.processes.stopping import ProcessSignals, process_signals
from xla_fsdp import jax_private, torch_xla_private, tpu
from xla_fsdp.environment import device_type
from xla_fsdp.parallel_plan import XlaRun

Body = Callable[[XlaRun, Backend], None]


class forbid_autograd(TorchFunctionMode):
    """Context manager that forbids backward passes, for code that runs before XLA has started.

    Autograd creates its device queues on its first run, even on meta tensors. XLA devices that do
    not exist by then have none, and the first backward pass on XLA aborts the process
    ("device_ready_queues_", torch 2.9.0).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            raise RuntimeError(
                "backward pass before XLA has started: autograd would not see XLA's devices; run "
                "it in another process, or compute without autograd (as models/spec.py does)"
            )
        return func(*args, **(kwargs or {}))


_PORT = 12355
"""The default of MASTER_PORT, as in torch_xla."""


def launch(body: Body, run: XlaRun) -> None:
    """Call ``body(run, backend)`` in one process per host (SPMD) or per device (nested FSDP)."""
    device = device_type()
    os.environ["PJRT_DEVICE"] = device
    cpu_devices = run.backend_config.cpu_devices
    os.environ["CPU_NUM_DEVICES"] = str(cpu_devices)
    # XLA on the CPU has one thread per core; virtual devices wait for each other and need more.
    os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 8 * cpu_devices)))
    import torch_xla.runtime as xr

    if device == "TPU":
        tpu.set_libtpu_flags()
    elif version("torch_xla") == torch_xla_private.WRITTEN_FOR["torch_xla"]:
        # Unless XLA_FLAGS sets it, disable XLA's newer fusion emitters, which double the compile
        # time (docs/evidence/benchmarks.md). Other versions may lack the flag and would abort.
        flags = {"xla_cpu_use_fusion_emitters": "false"}
        os.environ["XLA_FLAGS"] = add_flags(os.environ.get("XLA_FLAGS", ""), flags)

    if run.backend_config.xla_fsdp == "spmd":
        with _report_startup_wait() if device == "TPU" else contextlib.nullcontext():
            xr.use_spmd()
            _init_process_group()
        from xla_fsdp.spmd import SpmdBackend

        run = run.on(xr.global_runtime_device_count())
        body(run, SpmdBackend(run))
        return

    # Nested FSDP: one process per device; a single device runs in this process.
    import torch_xla

    received: list[int] = []

    def pass_to_children(number: int, frame: FrameType | None) -> None:
        """Forward a signal to the children: it may reach only the parent. Ctrl-C reaches all."""
        received.append(number)
        for child in multiprocessing.active_children():
            if child.pid:
                os.kill(child.pid, number)

    single = device == "CPU"
    for number in () if single else (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, pass_to_children)
    arguments = (process_signals, body, run, None if single else os.getpid())
    try:
        torch_xla.launch(_run_nested, args=arguments, debug_single_process=single)
    except BrokenProcessPool:
        if not received:
            raise
        raise StoppedBySignal(received[0]) from None  # before training had any state to save


FIRST_SECONDS, EVERY_SECONDS = 30.0, 60.0
_PRINT = """
import select, signal, sys, time
waited_for, pause, every = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
signal.signal(signal.SIGINT, signal.SIG_IGN)
start = time.monotonic()
while not select.select([0], [], [], pause)[0]:  # until stdin ends
    seconds = time.monotonic() - start
    text = f"waiting for the TPU runtime, {seconds:.0f} s so far: {waited_for}"
    print(text, file=sys.stderr, flush=True)
    pause = every
"""


@contextlib.contextmanager
def _report_startup_wait() -> Iterator[None]:
    """Print what the TPU runtime is waiting for while it starts inside this context.

    It starts in compiled code that holds the GIL, so a child process prints, and signals have their
    default action meanwhile.
    """
    waited_for = "it starts once this program runs on all hosts of the slice"
    try:
        hosts = torch_xla_private.host_tpu().get_worker_ips()
        this = torch_xla_private.host_tpu().worker_id()
    except Exception:  # noqa: BLE001 - used only for a message
        hosts, this = [], 0
    if len(hosts) == 1:
        waited_for = "another process may be using the chips"
    elif hosts:
        waited_for = (
            f"it starts once this program runs on all {len(hosts)} hosts of the slice; this is "
            f"host {this} (0: {hosts[0]}, ... {len(hosts) - 1}: {hosts[-1]}); see the log of any "
            "host that is missing"
        )
    command = [sys.executable, "-I", "-S", "-c", _PRINT]
    command += [waited_for, str(FIRST_SECONDS), str(EVERY_SECONDS)]
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    with subprocess.Popen(command, stdin=subprocess.PIPE):  # at the end stdin is closed
        for number, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _init_process_group() -> None:
    """Create the process group, which plans checkpoints, and warn once about untested versions.

    torch_xla's process 0 serves the store, at MASTER_ADDR, but the runtime may assign number 0 to
    any host. So with SPMD, which has one process per host, the host that the launcher has made
    MASTER_ADDR (NODE_RANK 0) serves the store.
    """
    import torch.distributed as dist
    import torch_xla.runtime as xr

    count, index = xr.process_count(), xr.process_index()
    address, rank = os.environ.get("MASTER_ADDR"), os.environ.get("NODE_RANK")
    if count > 1 and address and rank and xr.is_spmd():
        port = int(os.environ.get("MASTER_PORT", _PORT))
        is_server = rank == "0"
        listening = listen(address, port).detach() if is_server else None
        store = dist.TCPStore(address, port, count, is_master=is_server, master_listen_fd=listening)
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
    body: Body,
    run: XlaRun,
    parent: int | None,
) -> None:
    """Call the body in one of the processes. ``parent`` is the pid of the process that starts them,
    None for a single process. Unpickling ``_installed`` has installed the signal handlers."""
    if parent is not None:
        end_with(parent)
    _init_process_group()
    import torch_xla.runtime as xr

    from xla_fsdp.nested import NestedBackend

    run = run.on(xr.global_runtime_device_count())
    with drop_unread_output(PROGRAM):  # this process has streams of its own
        body(run, NestedBackend(run))
