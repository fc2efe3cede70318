"""Which form of FSDP and which devices; decided and checked before any device starts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from models.config import VitConfig
from training.errors import UsageError
from xla_fsdp import libtpu_flags
from xla_fsdp.sharding.mesh import check_mesh

_NESTED_FLAGS = {
    "--no_reshard_after_forward": lambda args: not args.reshard_after_forward,
    "--flatten_parameters": lambda args: args.flatten_parameters,
    "--shard_on_cpu": lambda args: args.shard_on_cpu,
}
_MESH_FLAGS = {
    "--mesh_dcn": lambda args: args.mesh_dcn > 1,
    "--mesh_fsdp": lambda args: args.mesh_fsdp is not None,
    "--mesh_tensor": lambda args: args.mesh_tensor > 1,
}

_GOOGLE = "0x1ae0"


def device_type() -> str:
    """ "TPU" or "CPU": what PJRT_DEVICE says, else TPU where chips are attached."""
    chosen = os.environ.get("PJRT_DEVICE")
    if chosen:
        return chosen
    return "TPU" if tpu_is_attached() else "CPU"


def tpu_is_attached() -> bool:
    """Whether this host has TPU chips (a look at PCI, starts nothing)."""
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    if all(vendor.read_text().strip() != _GOOGLE for vendor in vendors):
        return False  # without the seconds that importing torch_xla takes
    # Imported, torch_xla would choose the device by itself, and warn of it.
    os.environ.setdefault("PJRT_SELECT_DEFAULT_DEVICE", "0")
    from torch_xla._internal import tpu

    return tpu.num_available_chips() > 0


def fsdp_form(args: argparse.Namespace) -> str:
    """The form of ``--xla_fsdp``, with ``auto`` resolved: "spmd" or "nested"."""
    if args.xla_fsdp == "auto":
        return "nested" if any(used(args) for used in _NESTED_FLAGS.values()) else "spmd"
    return args.xla_fsdp


def why_this_form(args: argparse.Namespace) -> str:
    """What decided where ``--xla_fsdp`` is auto, to follow the form's description; else ""."""
    if args.xla_fsdp != "auto":
        return ""
    flag = next((flag for flag, used in _NESTED_FLAGS.items() if used(args)), None)
    reason = f"{flag} asks for it" if flag else "by the TPU compiler lighter than nested"
    return f" (--xla_fsdp auto: {reason})"


def scans_blocks(args: argparse.Namespace) -> bool:
    """Whether all blocks run as one loop in the graph: ``--scan_blocks``, with auto resolved."""
    if args.scan_blocks is None:
        return not _hinders_scan(args)
    return args.scan_blocks


def _hinders_scan(args: argparse.Namespace) -> str | None:
    if fsdp_form(args) == "nested":
        return "--xla_fsdp nested"
    if args.grad_ckpt != "full":
        return f"--grad_ckpt {args.grad_ckpt}"
    if args.mark_step_every_n_blocks:
        return "--mark_step_every_n_blocks"
    return None


def device_count(args: argparse.Namespace) -> int:
    """Devices the run will use, all hosts together, told without starting them."""
    if device_type() == "CPU":
        return args.cpu_devices
    from torch_xla._internal import tpu

    return tpu.num_expected_global_devices() * slice_count()  # it counts this slice's


def slice_count() -> int:
    """TPU slices of this run, as libtpu is told: by the environment or the TPU VM's metadata."""
    from torch_xla._internal import tpu

    told = os.environ.get("MEGASCALE_NUM_SLICES") or tpu.get_tpu_env().get("MEGASCALE_NUM_SLICES")
    return int(told or 1)


def check_devices(args: argparse.Namespace, config: VitConfig, devices: int) -> None:
    """Raises UsageError for a mesh that does not fit these devices or the model."""
    check_mesh(args, config, devices)
    if device_type() == "CPU":
        return
    slices = slice_count()
    if args.mesh_dcn % slices:
        raise UsageError(
            f"--mesh_dcn {args.mesh_dcn} is no multiple of the {slices} slices of this run "
            "(MEGASCALE_NUM_SLICES)"
        )
    from torch_xla._internal import tpu

    here = tpu.num_available_devices()
    if devices > here and here % args.mesh_tensor:
        raise UsageError(
            f"--mesh_tensor {args.mesh_tensor} must divide the {here} devices of a host"
        )


def check_libtpu() -> None:
    """Raises UsageError on a TPU if libtpu would end the run for what LIBTPU_INIT_ARGS says."""
    if device_type() == "TPU":
        libtpu_flags.set_for_this_tpu()
        libtpu_flags.check()


def check(args: argparse.Namespace) -> None:
    """Raises UsageError for XLA flags that cannot go together."""
    if args.grad_ckpt == "selective":
        raise UsageError("--grad_ckpt selective needs --backend cuda: here it is full or none")
    if args.precision == "fp16":
        raise UsageError("--precision fp16 needs --backend cuda: on XLA use bf16")
    if args.scan_blocks and _hinders_scan(args):
        raise UsageError(
            f"--scan_blocks does not go with {_hinders_scan(args)}: drop one of the two"
        )
    nested_flags = [flag for flag, used in _NESTED_FLAGS.items() if used(args)]
    if nested_flags and args.run_without_fsdp:
        raise UsageError(f"{nested_flags[0]} shapes FSDP: drop it or --run_without_fsdp")
    if nested_flags and fsdp_form(args) == "spmd":
        raise UsageError(f"{nested_flags[0]} needs --xla_fsdp nested, not spmd")
    for flag in (flag for flag, used in _MESH_FLAGS.items() if used(args)):
        if fsdp_form(args) == "nested":
            raise UsageError(f"{flag} needs --xla_fsdp spmd: nested FSDP cuts over all devices")
        if args.run_without_fsdp:
            raise UsageError(f"{flag} shapes FSDP: drop it or --run_without_fsdp")
    if device_type() == "CPU" and fsdp_form(args) == "nested" and args.cpu_devices > 1:
        raise UsageError(
            f"nested FSDP runs on 1 CPU device, not {args.cpu_devices} (XLA's CPU collectives "
            "hang between processes): use --cpu_devices 1 or --xla_fsdp spmd"
        )
    if args.compile_cache_dir and Path(args.compile_cache_dir).is_file():
        raise UsageError(f"--compile_cache_dir {args.compile_cache_dir} is a file, not a folder")
