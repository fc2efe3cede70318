"""Opens what is to be converted: finds its tensors, without reading their values."""

from __future__ import annotations

import ctypes
import functools
import io
import json
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import safe_open
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from training.checkpoints.choose import find_resume
from training.checkpoints.format import (
    EMA,
    METADATA,
    WEIGHTS,
    SavedRun,
    damage,
    is_complete,
    read_metadata,
    read_saved_run,
    readable,
    training_entry,
)
from training.errors import UsageError
from training.weights import (
    CONFIG_FILE,
    ONE_FILE,
    ema_of,
    load_file_of_weights,
    metadata_of,
    no_ema,
    run_in_metadata,
    safetensors_files,
    state_dict_of,
)

# ------------------------------------------------------------------------------------------------
# The parts of PyTorch that say where a file of torch.save has the values of its tensors.
#
# FakeTensorMode, ``skip_data`` and ``_checkpoint_offset`` are described for this very use in
# PyTorch 2.9's notes on serialization, as prototypes; ``_create_file_view`` is what DCP's own
# reader uses.


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


# ------------------------------------------------------------------------------------------------
# A tensor in files: where its values lie, and reading it with no more memory than it needs.


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


# ------------------------------------------------------------------------------------------------


SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Source:
    """A model's weights in files, and what these say of the run that made them."""

    path: Path
    tensors: dict[str, Stored]
    """By the model's own names: timm's."""
    run: SavedRun | None
    config: Mapping[str, Any] | None
    """The content of a Hugging Face ``config.json`` beside the weights."""


def open_source(path: Path, *, verify: bool, use_ema: bool = False) -> Source:
    """Return what ``path`` holds; ``verify`` compares a checkpoint's checksums with its manifest.

    With ``use_ema`` it is the moving average of the weights. Raises UsageError if it is nothing
    that can be converted, or has no average.
    """
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or folder")
    with readable(path):
        files = safetensors_files(path)
        if files:
            if use_ema:
                raise no_ema(path)
            return _open_safetensors(path, files)
        return _open_folder(path, verify, use_ema) if path.is_dir() else _open_torch(path, use_ema)


# -- safetensors ----------------------------------------------------------------------


def _open_safetensors(path: Path, files: list[Path]) -> Source:
    tensors: dict[str, Stored] = {}
    for file in files:
        tensors |= _stored_in(file)
    return Source(
        path, tensors, run_in_metadata(path, metadata_of(files[0])), _config_beside(files[0])
    )


def _stored_in(file: Path) -> dict[str, Stored]:
    """Return the tensors of one file, whose format is: length of the header, header, values."""
    with safe_open(file, framework="pt"):  # checks that what is below is sound
        pass
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    stored = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in SAFETENSORS_DTYPES:
            raise ValueError(f"{name} is of {entry['dtype']}, which is not known here")
        at = 8 + length + entry["data_offsets"][0]
        stored[name] = _whole(SAFETENSORS_DTYPES[entry["dtype"]], entry["shape"], file, at)
    return stored


def _whole(
    dtype: torch.dtype,
    shape: Any,
    file: Path,
    offset: int,
    strides: tuple[int, ...] | None = None,
) -> Stored:
    size = tuple(shape)
    piece = Piece(file, offset, (0,) * len(size), size, strides)
    return Stored(dtype, size, lambda: [piece])


def _config_beside(path: Path) -> Mapping[str, Any] | None:
    file = path / CONFIG_FILE if path.is_dir() else path.with_name(CONFIG_FILE)
    if not file.is_file():
        return None
    content = json.loads(file.read_text())
    return content if isinstance(content, Mapping) else None


# -- torch.save -----------------------------------------------------------------------


def _open_torch(path: Path, use_ema: bool) -> Source:
    if not zipfile.is_zipfile(path):
        raise ValueError("it is no file of torch.save, or of one before PyTorch 1.6")
    run = load_file_of_weights(path).run  # mapped: no value is read but those that describe the run
    content, tensors = load_without_values(path), {}
    for name, tensor in state_dict_of(ema_of(path, content) if use_ema else content).items():
        strides = None if tensor.is_contiguous() else tensor.stride()
        tensors[name] = _whole(tensor.dtype, tensor.shape, path, offset_of(tensor), strides)
    return Source(path, tensors, run, _config_beside(path))


# -- DCP ------------------------------------------------------------------------------


def _open_folder(path: Path, verify: bool, use_ema: bool) -> Source:
    """Open a checkpoint, or of a run's folder the newest one."""
    if not (path / METADATA).is_file():
        found = find_resume(path, "auto", 0).paths
        if not found:
            raise UsageError(f"{path} holds no checkpoint and no {ONE_FILE}, or shards of one")
        path = found[0]
    elif not is_complete(path):
        raise UsageError(f"{path} is no complete checkpoint: it was not written to its end")
    if verify and (problem := damage(path)):
        raise UsageError(
            f"{path} is damaged ({problem}): convert another one, or take it as it is with "
            "--no_verify_checkpoint"
        )
    metadata = read_metadata(path)
    entries = metadata.state_dict_metadata
    run = read_saved_run(path) if training_entry("arguments") in entries else None
    prefix = f"{EMA if use_ema else WEIGHTS}."
    inside = [name for name in entries if name.startswith(prefix)]
    if use_ema and not inside:
        raise no_ema(path)
    tensors = {}
    for name in inside or entries:
        entry = entries[name]
        assert isinstance(entry, TensorStorageMetadata)
        find = functools.partial(_pieces_of, path, metadata, name)
        plain = name.removeprefix(prefix)
        tensors[plain] = Stored(entry.properties.dtype, tuple(entry.size), find)
    return Source(path, tensors, run, _config_beside(path))


def _pieces_of(folder: Path, metadata: Metadata, name: str) -> Iterator[Piece]:
    """Find the parts of a tensor, each a file of torch.save within one of DCP's files.

    ``dcp.load`` would hold a part beside the tensor that it is copied to: twice the memory for one
    that was saved whole.
    """
    for part in metadata.state_dict_metadata[name].chunks:  # type: ignore[union-attr]
        place = metadata.storage_data[MetadataIndex(name, part.offsets)]
        if place.transform_descriptors:
            raise ValueError(f"{name} is compressed ({place.transform_descriptors[0]})")
        file = folder / place.relative_path
        tensor = load_without_values(file, place.offset, place.length)
        if tensor.shape != part.sizes:
            raise ValueError(f"{name} has a part of another shape than its metadata says")
        strides = None if tensor.is_contiguous() else tensor.stride()
        yield Piece(
            file,
            place.offset + offset_of(tensor),
            tuple(part.offsets),
            tuple(part.sizes),
            strides,
        )
