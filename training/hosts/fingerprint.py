"""Checks what all processes of a run must have in common, and says in what they differ."""

from __future__ import annotations

import platform
import socket
from pathlib import Path
from typing import Any

import xxhash

from data.source import DataSource
from training.errors import UsageError
from training.hosts import processes
from training.options.flag_rules import by_field
from training.options.resolve import Run
from training.versions import installed_version

_PACKAGES = (
    "torch",
    "torch_xla",
    "megatron-fsdp",
    "transformer-engine",
    "timm",
    "torchvision",
    "numpy",
)
_FREE_FLAGS = {"num_workers", "index_dir", "rebuild_index", "step_timeout_s"}
"""The flags that may differ from host to host: they change no result."""
_CODE = (
    "run_vit_training.py",
    "config_fields.py",
    "training",
    "models",
    "data",
    "xla_fsdp",
    "gpu_fsdp",
)


def versions() -> dict[str, str | None]:
    """Return the versions of the packages that compute; None for one that is not installed."""
    return {name: installed_version(name) for name in _PACKAGES}


def code_digest() -> str:
    """Return a checksum of the program's own files."""
    root = Path(__file__).resolve().parents[2]
    digest = xxhash.xxh3_64()
    for name in _CODE:
        path = root / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def check_alike(run: Run, data: DataSource) -> None:
    """Raise UsageError in all processes if two are about to train differently."""
    names = by_field(type(run.config), type(run.own))
    mine: dict[str, Any] = {
        names[field].names[0]: value
        for field, value in run.values.items()
        if field not in _FREE_FLAGS
    }
    mine |= {f"the version of {name}": value for name, value in versions().items()}
    mine["the version of Python"] = platform.python_version()
    mine["the program's code, by checksum"] = code_digest()
    mine |= data.fingerprint()
    found = processes.gather([socket.gethostname(), mine])
    (first_host, first), *others = found
    for number, (host, other) in enumerate(others, 1):
        for what in [*first, *(other.keys() - first.keys())]:
            if first.get(what) != other.get(what):
                there, here = _short(first.get(what), other.get(what))
                raise UsageError(
                    f"the processes of this run differ in {what}: {there} for "
                    f"{processes.name(0, first_host)}, {here} for {processes.name(number, host)}: "
                    "start all with the same command, code, packages and data",
                    agreed=True,
                )


def _short(first: Any, other: Any) -> tuple[str, str]:
    """Return two values that differ as text; of long lists the first elements that do."""
    if isinstance(first, list) and isinstance(other, list) and max(len(first), len(other)) > 4:
        length = max(len(first), len(other))
        padded = [each + [None] * (length - len(each)) for each in (first, other)]
        at = next(i for i in range(length) if padded[0][i] != padded[1][i])
        return tuple(f"number {at} is {each[at]!r}" for each in padded)  # type: ignore[return-value]
    return repr(first), repr(other)
