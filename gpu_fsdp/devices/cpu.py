"""The CPU with gloo, any number of processes a host: for trying out and for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Cpu:
    """The host's processor as a ``gpu_fsdp.devices.device.Device``: nothing has to be copied."""

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
            return "--precision fp16 needs CUDA: on the CPU use bf16 or fp32"
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
