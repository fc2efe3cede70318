"""Reads a checkpoint without running anything that is in it."""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from training.checkpoints.content import OPTIONAL, POSITION, SavedRun, saved_run, training_entry
from training.checkpoints.storage import METADATA, FolderReader
from training.errors import UsageError
from training.url_path import is_unreachable

_METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "ChunkStorageMetadata",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"}
    | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "pathlib": {"PosixPath"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's own metadata classes and nothing else.

    ``BytesStorageMetadata`` is not among them: what it describes is unpickled by DCP as it is read.
    """

    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")


def read_metadata(path: Path) -> Metadata:
    """Return the metadata of a checkpoint folder, of which every entry is a tensor in its own file.

    Raises anything if it is damaged, or not such metadata.
    """
    metadata = _MetadataUnpickler(io.BytesIO((path / METADATA).read_bytes())).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError("not the metadata of a checkpoint")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise pickle.UnpicklingError(f"{name} is not a tensor")
    for info in metadata.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise pickle.UnpicklingError(f"{info.relative_path} is not a file of the checkpoint")
    return metadata


def named_files(path: Path) -> set[str]:
    """Return the files that a checkpoint's metadata names. Raises as ``read_metadata``."""
    return {info.relative_path for info in read_metadata(path).storage_data.values()}


class SafeReader(FolderReader):
    """Reads as DCP's file reader does, but no metadata that run code; PyTorch 2.9 unpickles any."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(self.folder)
        storage = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage.load_id = self.load_id
        metadata.storage_meta = storage
        return metadata


def silence_dcp() -> None:
    """Silence, from now on, DCP's warnings of what ``no_dist=True`` asks for, and of its own old
    calls."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")


@contextlib.contextmanager
def quiet_dcp() -> Iterator[None]:
    """Silence them inside; not for a thread beside others, as Python keeps one list for all."""
    with warnings.catch_warnings():
        silence_dcp()
        yield


def read_saved_run(path: Path) -> SavedRun:
    """Read position and arguments of a checkpoint. Raises UsageError if it cannot be read."""
    with readable(path):
        if not (path / METADATA).is_file():
            raise UsageError(f"{path} is no complete checkpoint: it has no {METADATA} file")
        reader = SafeReader(path)
        entries = reader.read_metadata().state_dict_metadata
        wanted: dict[str, Any] = {}
        for name in (*POSITION, "arguments", *OPTIONAL):
            if name in OPTIONAL and training_entry(name) not in entries:
                continue
            entry = entries[training_entry(name)]
            assert isinstance(entry, TensorStorageMetadata)
            wanted[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        state = {"training": wanted}
        with quiet_dcp():
            dcp.load(state, storage_reader=reader, no_dist=True)
        return saved_run(path, state["training"])


class Unreachable(UsageError):
    """Raised for a checkpoint that may be whole, but that this process cannot reach."""


@contextlib.contextmanager
def readable(path: Path, what: str = "the checkpoint") -> Iterator[None]:
    """Raise UsageError for whatever goes wrong inside, where a checkpoint is read.

    It is Unreachable where the error says nothing of the checkpoint itself.
    """
    try:
        yield
    except UsageError:
        raise
    # A damaged file can fail in any way.
    except (Exception, dcp.CheckpointException) as error:  # noqa: BLE001
        kind = Unreachable if is_unreachable(_cause(error)) else UsageError
        reason = reason_of(error).removesuffix(f": {path}")
        raise kind(f"cannot read {what} {path}: {reason}") from None


def _cause(error: BaseException) -> BaseException:
    """Return what DCP has wrapped, by rank, in an error of its own."""
    if isinstance(error, dcp.CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


def reason_of(error: BaseException) -> str:
    """Return one line of what went wrong, also in DCP."""
    error = _cause(error)
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
