"""The devices that this backend runs on; docs/contributing.md says how another one is added."""

from __future__ import annotations

from gpu_fsdp.devices.cpu import Cpu
from gpu_fsdp.devices.cuda import Cuda
from gpu_fsdp.devices.device import Device

KINDS: list[type[Device]] = [Cuda, Cpu]
"""The first one that a host has is taken."""


def choose() -> Device:
    """Return the device that this process is to use, not yet started."""
    return next(kind for kind in KINDS if kind.is_available())()
