"""A tensor in files: where its values lie, and reading it with no more memory than it needs."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

_BLOCK = 1 << 26
"""Bytes read at once where values are converted on the way."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, whose values lie together in a file."""

    file: Path
    offset: int
    """Of the first value in the file, in bytes."""
    begin: tuple[int, ...]
    """Where the box begins in the tensor."""
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """In values, where they do not lie in the order of the box's dimensions."""


@dataclass(frozen=True)
class Stored:
    """A tensor that has not been read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Piece]]
    """Finds the boxes that the tensor is made of."""

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values as ``dtype``, in memory of their own: theirs and a block's is all that
        this takes. Raises OSError, or ValueError if a file ends too early."""
        whole = torch.empty(self.shape, dtype=dtype)
        for piece in self.pieces():
            box = whole
            for dimension, (begin, size) in enumerate(zip(piece.begin, piece.shape, strict=True)):
                box = box.narrow(dimension, begin, size)
            if box.numel():
                with piece.file.open("rb", buffering=0) as file:
                    file.seek(piece.offset)
                    self._read_box(file, piece, box)
        return whole

    def _read_box(self, file: io.FileIO, piece: Piece, box: torch.Tensor) -> None:
        if piece.strides is not None:
            steps = zip(piece.shape, piece.strides, strict=True)
            values = torch.empty(1 + sum((n - 1) * step for n, step in steps), dtype=self.dtype)
            _fill(file, values)
            box.copy_(values.as_strided(piece.shape, piece.strides))
            return
        rows = box.view(-1) if box.is_contiguous() else box
        if box.is_contiguous() and box.dtype == self.dtype:
            _fill(file, rows)
            return
        at_once = max(1, _BLOCK // (rows[0].numel() * self.dtype.itemsize))
        for part in rows.split(at_once):
            values = torch.empty(part.shape, dtype=self.dtype)
            _fill(file, values)
            part.copy_(values)


def write_values(file: IO[bytes], tensor: torch.Tensor) -> None:
    """Write the values of a contiguous tensor on the CPU. Raises OSError."""
    file.write(_memory(tensor))


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which the caller has to keep as long."""
    # Not by NumPy: it would keep the memory from being given back before the tensor's end.
    return memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _fill(file: io.FileIO, tensor: torch.Tensor) -> None:
    left = _memory(tensor)
    while left:
        read = file.readinto(left)
        if not read:
            raise ValueError(f"{Path(str(file.name)).name} ends too early")
        left = left[read:]
