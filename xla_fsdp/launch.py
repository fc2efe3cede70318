"""Start XLA as the arguments say, and run a function on a backend in every process."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from types import FrameType

from training.backend import Backend
from training.errors import StoppedBySignal
from training.parent import end_with
from training.stopping import ProcessSignals, process_signals
from xla_fsdp import libtpu_flags
from xla_fsdp.options import device_type, fsdp_form
from xla_fsdp.starting import StartWatch, watch

Run = Callable[[argparse.Namespace, Backend], None]


def launch(run: Run, args: argparse.Namespace) -> None:
    """Call ``run(args, backend)``: once a host for SPMD, once a device for nested FSDP."""
    os.environ.setdefault("PJRT_DEVICE", device_type())
    os.environ["CPU_NUM_DEVICES"] = str(args.cpu_devices)
    # XLA on the CPU has a thread a core; virtual devices that wait for each other need more.
    os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 8 * args.cpu_devices)))
    import torch_xla

    if device_type() == "TPU":
        libtpu_flags.set_for_this_tpu()
    if fsdp_form(args) == "spmd":
        _run_spmd(run, args)
    else:
        single = device_type() == "CPU"
        if not single:
            signal.signal(signal.SIGTERM, _tell_children)
        parent = None if single else os.getpid()
        given_to_all = (process_signals, watch, run, args, parent)
        try:
            torch_xla.launch(_run_nested, args=given_to_all, debug_single_process=single)
        except BrokenProcessPool:
            if not _told:
                raise
            raise StoppedBySignal(_told[0]) from None  # before there was anything to write


_told: list[int] = []


def _tell_children(number: int, frame: FrameType | None) -> None:
    """Who is told to end is the parent (of Ctrl-C, all are): it ends with its children."""
    _told.append(number)
    for child in multiprocessing.active_children():
        child.terminate()


def _prepare(args: argparse.Namespace) -> None:
    import torch.distributed as dist
    import torch_xla.runtime as xr

    if args.compile_cache_dir:
        xr.initialize_cache(args.compile_cache_dir)
    if xr.process_count() > 1:  # checkpoints are planned together
        import torch_xla.distributed.xla_backend  # noqa: F401 - registers xla://

        dist.init_process_group("gloo", init_method="xla://")


def _run_spmd(run: Run, args: argparse.Namespace) -> None:
    import torch_xla.runtime as xr

    if device_type() == "TPU":
        watch.begin(os.getpid())
    xr.use_spmd()
    _prepare(args)
    watch.end()
    from xla_fsdp.spmd import SpmdBackend

    run(args, SpmdBackend(args))


def _run_nested(
    index: int,
    _installed: ProcessSignals,
    begun: StartWatch,
    run: Run,
    args: argparse.Namespace,
    parent: int | None,
) -> None:
    """``_installed`` and ``begun`` come along to be unpickled, see there; ``parent`` is the process
    that starts the others, None if there are no others."""
    if parent is not None:
        end_with(parent)
    _prepare(args)
    begun.end()
    from xla_fsdp.nested import NestedBackend

    run(args, NestedBackend(args))
