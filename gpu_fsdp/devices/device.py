"""What this backend asks of an accelerator beyond PyTorch's own interface to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Device(Protocol):
    """One kind of device: a file beside this one, and a line in ``gpu_fsdp.devices.KINDS``.

    Making one starts nothing. Until ``start`` only the attributes, ``is_available``, ``count`` and
    ``lacks`` may be used; afterwards it is the one device of this process.
    """

    where: torch.device
    """Where tensors of this process lie; before ``start`` its type alone counts."""
    is_host: bool
    """Whether its memory is the host's own, so that nothing needs to be copied there."""
    noun: str
    """What messages call one: "CUDA GPU"."""
    status_command: str
    """The command that shows a user which of them a host has."""
    collectives: str
    """What ``init_process_group`` is to take as its backend: gloo for tensors on the CPU, in which
    checkpoints are planned and offloaded gradients summed, and the device's own for its tensors."""
    collectives_name: str
    """The device's own collectives, as the line that describes a run calls them."""
    fused_adamw: bool
    """Whether PyTorch has a fused AdamW for it, which takes ``found_inf``."""
    has_tf32: bool
    """Whether its fp32 matrix products can be computed in TF32."""
    runs_megatron: bool
    """Whether Megatron-FSDP, which calls CUDA by name, can run on it."""

    @staticmethod
    def is_available() -> bool:
        """Tell whether this host has one that PyTorch can use; starts nothing."""

    def start(self) -> None:
        """Take the device of this process: the one whose number on this host is LOCAL_RANK."""

    @property
    def bound_to(self) -> torch.device | None:
        """What ``init_process_group`` is to bind the collectives to as they are made, if to any."""

    def count(self) -> int | None:
        """Return how many this host has; None if any number of processes can share it."""

    def lacks(self, precision: str) -> str | None:
        """Return the reason, for the user, why it cannot compute in "fp32", "bf16" or "fp16"."""

    @property
    def name(self) -> str:
        """The model of the device, as its maker calls it."""

    def set_tf32(self, allowed: bool) -> None:
        """Let fp32 matrix products and convolutions be computed in TF32, or forbid it."""

    def put(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors from the host, from any thread and beside the running step.

        When it returns, the copies can be used by the step that is issued next.
        """

    def read(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Begin to copy small tensors to the host, without waiting for what computes them.

        The returned function waits and gives the copies; another thread may call it.
        """

    def seed(self, seed: int) -> None:
        """Seed the device's own random numbers; those of the CPU are seeded by the caller."""

    def synchronize(self) -> None:
        """Wait until everything that was issued to the device is done."""

    def memory(self) -> dict[str, int]:
        """Return the bytes of its memory: "used" now, "peak" so far, and "limit"; {} if unknown."""

    def peak_flops(self, kind: str) -> float | None:
        """Return its dense matrix FLOP/s in "bf16", "fp16", "tf32", "fp32" or "fp8", or None."""
