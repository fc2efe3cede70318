"""Runs as the command line resolves them, for tests of what is below it."""

from collections.abc import Sequence
from dataclasses import replace

from run_vit_training import read_flags
from training.resolve import Run


def on_xla(flags: str | Sequence[str] = ()) -> Run:
    """The run of these flags on XLA."""
    from xla_fsdp.resolve_xla import resolve

    asked = read_flags(flags.split() if isinstance(flags, str) else list(flags))
    return resolve(asked.run, asked.xla)


def on_gpus(flags: str | Sequence[str] = ()) -> Run:
    """The run of these flags on GPUs, or with gloo on the CPU."""
    from gpu_fsdp.resolve_gpu import resolve

    asked = read_flags(flags.split() if isinstance(flags, str) else list(flags))
    return resolve(replace(asked.run, backend="cuda"), asked.torch)
