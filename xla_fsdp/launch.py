"""Start XLA as the arguments say, and run a function on a backend in every process."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
from collections.abc import Callable
from types import FrameType

from training.backend import Backend
from training.stopping import ProcessSignals, process_signals
from xla_fsdp.options import device_type, fsdp_form, tpu_compiler_options

Run = Callable[[argparse.Namespace, Backend], None]


def launch(run: Run, args: argparse.Namespace) -> None:
    """Call ``run(args, backend)``: once a host for SPMD, once a device for nested FSDP."""
    os.environ.setdefault("PJRT_DEVICE", device_type())
    os.environ["CPU_NUM_DEVICES"] = str(args.cpu_devices)
    # XLA on the CPU has a thread a core; virtual devices that wait for each other need more.
    os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 8 * args.cpu_devices)))
    import torch_xla

    if device_type() == "TPU":  # after the import, which adds torch_xla's own
        given = os.environ.get("LIBTPU_INIT_ARGS", "")
        os.environ["LIBTPU_INIT_ARGS"] = _compiler_options(given)
    if fsdp_form(args) == "spmd":
        _run_spmd(run, args)
    else:
        single = device_type() == "CPU"
        if not single:
            signal.signal(signal.SIGTERM, _tell_children)
        torch_xla.launch(
            _run_nested, args=(process_signals, run, args), debug_single_process=single
        )


def _tell_children(number: int, frame: FrameType | None) -> None:
    """Who is told to end is the parent (of Ctrl-C, all are): it ends with its children."""
    for child in multiprocessing.active_children():
        child.terminate()


def _compiler_options(given: str) -> str:
    """What the user gives the TPU compiler, and our own where he does not."""
    from torch_xla._internal import tpu

    ours = [f"--{name}={value}" for name, value in tpu_compiler_options(tpu.version()).items()
            if name not in given]  # fmt: skip
    return " ".join([*given.split(), *ours])


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

    xr.use_spmd()
    _prepare(args)
    from xla_fsdp.spmd import SpmdBackend

    run(args, SpmdBackend(args))


def _run_nested(index: int, _installed: ProcessSignals, run: Run, args: argparse.Namespace) -> None:
    """``_installed`` comes along to be unpickled, see there."""
    _prepare(args)
    from xla_fsdp.nested import NestedBackend

    run(args, NestedBackend(args))
