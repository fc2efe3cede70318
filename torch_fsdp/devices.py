"""The devices that this backend runs on; docs/contributing.md says how another one is added."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

# ------------------------------------------------------------------------------------------------
# Dense matrix FLOP/s of NVIDIA's GPUs, from NVIDIA's data sheets (without sparsity).


# By a part of the name that CUDA gives: FLOP/s in bf16 and fp16, in TF32, in fp32, in FP8.
_CHIPS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"bf16": 2250e12, "tf32": 1125e12, "fp32": 75e12, "fp8": 4500e12}),
    ("GH200", {"bf16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp8": 1979e12}),
    ("H200 NVL", {"bf16": 835e12, "tf32": 417e12, "fp32": 60e12, "fp8": 1671e12}),
    ("H200", {"bf16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp8": 1979e12}),
    ("H100 PCIe", {"bf16": 756e12, "tf32": 378e12, "fp32": 51e12, "fp8": 1513e12}),
    ("H100 NVL", {"bf16": 835e12, "tf32": 417e12, "fp32": 60e12, "fp8": 1671e12}),
    ("H100", {"bf16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp8": 1979e12}),
    ("L40S", {"bf16": 362e12, "tf32": 183e12, "fp32": 91.6e12, "fp8": 733e12}),
    ("L4", {"bf16": 121e12, "tf32": 60e12, "fp32": 30.3e12, "fp8": 242e12}),
    ("A100", {"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12}),
    ("A10", {"bf16": 125e12, "tf32": 62.5e12, "fp32": 31.2e12}),
)


def peak_of(name: str, kind: str) -> float | None:
    """Return the FLOP/s of a GPU in "bf16", "fp16", "tf32", "fp32" or "fp8"; None if unknown.

    ``name`` is the one that CUDA gives it.
    """
    for part, flops in _CHIPS:
        if part in name:
            return flops.get("bf16" if kind == "fp16" else kind)
    return None


# ------------------------------------------------------------------------------------------------
# What this backend asks of an accelerator beyond PyTorch's own interface to it.


class Device(Protocol):
    """One kind of device: a file beside this one, and a line in ``torch_fsdp.devices.KINDS``.

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


# ------------------------------------------------------------------------------------------------
# The CPU with gloo, any number of processes a host: for trying out and for tests.


class Cpu:
    """The host's processor as a ``torch_fsdp.devices.Device``: nothing has to be copied."""

    where = torch.device("cpu")
    is_host = True
    noun = "CPU"
    status_command = "lscpu"
    collectives = "gloo"
    collectives_name = "gloo"
    fused_adamw = True
    has_tf32 = False
    runs_megatron = False
    name = "CPU"
    bound_to = None

    @staticmethod
    def is_available() -> bool:
        return True

    def start(self) -> None:
        """Do nothing: a process computes where it runs."""

    def count(self) -> int | None:
        return None

    def lacks(self, precision: str) -> str | None:
        if precision == "fp16":
            return "--precision fp16 requires CUDA: on the CPU use bf16 or fp32"
        return None

    def set_tf32(self, allowed: bool) -> None:
        """Do nothing: no processor has TF32."""

    def put(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(tensors)

    def read(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        return lambda: list(tensors)

    def seed(self, seed: int) -> None:
        """Do nothing: its random numbers are those of the CPU."""

    def synchronize(self) -> None:
        """Do nothing: each operation has ended when its call returns."""

    def memory(self) -> dict[str, int]:
        return {}

    def peak_flops(self, kind: str) -> float | None:
        return None


# ------------------------------------------------------------------------------------------------
# NVIDIA GPUs: streams and events, pinned memory, NCCL, and what ``torch.cuda`` tells of them.


class Cuda:
    """A CUDA GPU as a ``torch_fsdp.devices.Device``."""

    is_host = False
    noun = "CUDA GPU"
    status_command = "nvidia-smi"
    collectives = "cpu:gloo,cuda:nccl"
    collectives_name = "NCCL"
    fused_adamw = True
    has_tf32 = True
    runs_megatron = True

    def __init__(self) -> None:
        self.where = torch.device("cuda")
        self._copies: torch.cuda.Stream

    @staticmethod
    def is_available() -> bool:
        return torch.cuda.is_available()

    def start(self) -> None:
        self.where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(self.where)
        self._copies = torch.cuda.Stream()

    @property
    def bound_to(self) -> torch.device | None:
        return self.where

    def count(self) -> int | None:
        return torch.cuda.device_count()

    def lacks(self, precision: str) -> str | None:
        if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            return f"{self.name} has no bf16: use --precision fp16 or fp32"
        return None

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name()

    def set_tf32(self, allowed: bool) -> None:
        """PyTorch's own default is TF32 in convolutions but not in matrix products.

        PyTorch 2.9 warns of this interface; its torch.compile still asks it, and refuses a mixture.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Please use the new API settings")
            torch.set_float32_matmul_precision("high" if allowed else "highest")
            torch.backends.cudnn.allow_tf32 = allowed

    def put(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # On a stream of their own, so that copies run beside the step; the device is set anew
        # because this may run in a thread.
        with torch.cuda.device(self.where), torch.cuda.stream(self._copies):
            moved = [each.pin_memory().to(self.where, non_blocking=True) for each in tensors]
            self._copies.synchronize()
            for tensor in moved:
                tensor.record_stream(torch.cuda.default_stream())
        return moved

    def read(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        copied = torch.cuda.Event(blocking=True)
        copied.record()

        def arrived() -> list[torch.Tensor]:
            copied.synchronize()
            return host

        return arrived

    def seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def memory(self) -> dict[str, int]:
        return {
            "used": torch.cuda.memory_allocated(),
            "peak": torch.cuda.max_memory_allocated(),
            "limit": torch.cuda.get_device_properties(self.where).total_memory,
        }

    def peak_flops(self, kind: str) -> float | None:
        return peak_of(self.name, kind)


# ------------------------------------------------------------------------------------------------


KINDS: list[type[Device]] = [Cuda, Cpu]
"""The first one that a host has is taken."""


def choose() -> Device:
    """Return the device that this process is to use, not yet started."""
    return next(kind for kind in KINDS if kind.is_available())()
