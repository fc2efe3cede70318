"""What a program sees of the machine before any device starts."""

import glob
import importlib.abc
import importlib.machinery
import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from .slice_ import Slice

PCI = "/sys/bus/pci/devices/"
METADATA = "metadata.google.internal"
DEVICE = "REHEARSAL_PJRT_DEVICE"


class Here:
    """The slice and the worker of it that this process is on."""

    def __init__(self) -> None:
        told = json.loads(Path(os.environ["REHEARSAL"]).read_text())
        self.slice = Slice(
            **{k: tuple(v) if isinstance(v, list) else v for k, v in told["slice"].items()}
        )
        self.worker = int(os.environ["REHEARSAL_WORKER"])
        self.metadata_port = told["metadata_ports"][self.worker]
        if slices := os.environ.get("MEGASCALE_NUM_SLICES"):  # libtpu's, before the metadata's
            hosts = self.slice.hosts // self.slice.slices
            self.slice = replace(self.slice, slices=int(slices))
            first = hosts * int(os.environ["MEGASCALE_SLICE_ID"])
            self.worker = first + self.worker % hosts
        self.pci = told["pci"] + "/"
        self.notes = Path(told["pci"]).parent / f"programs_{os.environ['REHEARSAL_START']}"
        self.store_port = told["store_port"]


def stand_in() -> None:
    here = Here()
    _pci(here)
    _metadata_server(here)
    _environment(here)
    sys.meta_path.insert(0, _AfterTorchXla(here))


def _pci(here: Here) -> None:
    real_glob, real_path_glob = glob.glob, Path.glob

    def glob_(pattern: str, *args: Any, **how: Any) -> list[str]:
        if isinstance(pattern, str) and pattern.startswith(PCI):
            pattern = here.pci + pattern.removeprefix(PCI)
        return real_glob(pattern, *args, **how)

    def path_glob(self: Path, pattern: str) -> Any:
        return real_path_glob(Path(here.pci) if f"{self}/" == PCI else self, pattern)

    glob.glob, Path.glob = glob_, path_glob  # type: ignore[method-assign]


def _metadata_server(here: Here) -> None:
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *args: Any, **how: Any) -> Any:
        if host == METADATA:
            host, port = "127.0.0.1", here.metadata_port
        return real(host, port, *args, **how)

    socket.getaddrinfo = getaddrinfo


def _environment(here: Here) -> None:
    """The C++ runtime reads its own copy of the environment: there PJRT_DEVICE stays CPU, with as
    many virtual devices as the slice has chips."""
    real = os.putenv
    for_the_runtime = {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(here.slice.devices),
        "PJRT_NPROC": str(8 * here.slice.devices),
    }

    def putenv(name: Any, value: Any) -> None:
        key = os.fsdecode(name)
        if key == "PJRT_DEVICE":
            real(DEVICE, value)  # children get the runtime's copy
        real(name, for_the_runtime.get(key, value))

    os.putenv = putenv
    for name in ("RANK", "WORLD_SIZE"):  # no TPU VM has them
        os.environ.pop(name, None)
    chosen = os.environ.pop(DEVICE, None) or os.environ.get("PJRT_DEVICE")
    if chosen:
        os.environ["PJRT_DEVICE"] = chosen


class _AfterTorchXla(importlib.abc.MetaPathFinder):
    """Puts the stand-ins for functions of ``_XLAC`` in place once torch_xla is imported."""

    def __init__(self, here: Here) -> None:
        self._here = here

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != "torch_xla":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            sys.meta_path.remove(self)  # not before: who only asks for the spec imports nothing
            execute(module)
            from . import runtime

            runtime.stand_in(self._here)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
