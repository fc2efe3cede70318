"""NVIDIA GPUs: streams and events, pinned memory, NCCL, and what ``torch.cuda`` tells of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence

import torch

from gpu_fsdp import nvidia_gpus


class Cuda:
    """A CUDA GPU as a ``gpu_fsdp.devices.device.Device``."""

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
        return nvidia_gpus.peak_of(self.name, kind)
