"""The parts of PyTorch that say where a file of torch.save has the values of its tensors.

FakeTensorMode, ``skip_data`` and ``_checkpoint_offset`` are described for this very use in PyTorch
2.9's notes on serialization, as prototypes; ``_create_file_view`` is what DCP's own reader uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.utils import _create_file_view


def load_without_values(path: Path, begin: int = 0, length: int | None = None) -> Any:
    """Return what torch.load does, with tensors that have no values.

    ``begin`` and ``length``, in bytes, are of the part of the file that torch.save wrote.
    """
    with FakeTensorMode(), path.open("rb") as file:
        part = file if length is None else _create_file_view(file, begin, length)
        return torch.load(part, map_location="cpu", weights_only=True)  # type: ignore[arg-type]


def offset_of(tensor: torch.Tensor) -> int:
    """Return where the first value of ``load_without_values``'s tensor is, in bytes from
    ``begin``."""
    begin = tensor.untyped_storage()._checkpoint_offset
    assert begin is not None
    return int(begin + tensor.storage_offset() * tensor.itemsize)


def save_without_values(content: Mapping[str, Any], path: Path) -> None:
    """Write a file as torch.save does, with room for the values of tensors on meta.

    The zip's checksums are those of nothing; torch.load compares none.
    """
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(_faked(content), path)


def _faked(content: Mapping[str, Any]) -> dict[str, Any]:
    faked: dict[str, Any] = {}
    with FakeTensorMode():
        for name, value in content.items():
            if isinstance(value, Mapping):
                faked[name] = _faked(value)
            else:
                faked[name] = torch.empty(value.shape, dtype=value.dtype)
    return faked
