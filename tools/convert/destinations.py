"""Writes weights in another form, one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_state_dict_into_shards_factory
from torch.distributed.checkpoint.planner import WriteItem

from tools.convert.sources import (
    SAFETENSORS_DTYPES,
    Source,
    Stored,
    load_without_values,
    offset_of,
    save_without_values,
    write_values,
)
from training.checkpoints.format import (
    METADATA,
    entries,
    named_files,
    quiet_dcp,
    training_tensors,
    write_manifest,
)
from training.weights import CONFIG_FILE, INDEX, ONE_FILE, run_as_metadata

_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_SHARDS = ONE_FILE.replace(".", "{suffix}.")


@dataclass(frozen=True)
class Job:
    """What is to be written."""

    source: Source
    dtype: torch.dtype | None
    """What floating-point values become; None: they stay as they are."""
    config: Mapping[str, Any] | None
    """The content of ``config.json``, in the form of timm's on Hugging Face."""
    moved: Callable[[int], object]
    """Is told the bytes of each tensor that was written."""

    def dtype_of(self, stored: Stored) -> torch.dtype:
        return self.dtype if self.dtype and stored.dtype.is_floating_point else stored.dtype

    def size_of(self, stored: Stored) -> int:
        """Return the bytes that a tensor will have."""
        return torch.Size(stored.shape).numel() * self.dtype_of(stored).itemsize

    def read(self, stored: Stored) -> torch.Tensor:
        tensor = stored.read(self.dtype_of(stored))
        self.moved(tensor.nbytes)
        return tensor

    def on_meta(self) -> dict[str, torch.Tensor]:
        """Return the tensors that will be written, without values."""
        return {
            name: torch.empty(stored.shape, dtype=self.dtype_of(stored), device="meta")
            for name, stored in self.source.tensors.items()
        }

    def about_the_run(self) -> dict[str, torch.Tensor]:
        """Return the ``training.*`` entries; none if nothing is known of the run."""
        run = self.source.run
        return training_tensors(run.position, run.arguments, run.classes) if run else {}


# -- safetensors ----------------------------------------------------------------------


def write_safetensors(job: Job, path: Path) -> None:
    """Write one file. Raises OSError."""
    _write_shard(job, path, job.source.tensors)


def write_safetensors_folder(job: Job, path: Path, max_shard_size: str) -> None:
    """Write Hugging Face's layout: one file, or shards and their index. Raises OSError."""
    path.mkdir()
    tensors = job.source.tensors
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=job.size_of,
        filename_pattern=_SHARDS,
        max_shard_size=max_shard_size,
    )
    for file, names in split.filename_to_tensors.items():
        _write_shard(job, path / file, {name: tensors[name] for name in names})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    _write_config(job, path)


def _write_shard(job: Job, path: Path, tensors: Mapping[str, Stored]) -> None:
    """Write the format: length of the header, header, values; the widest first: all are aligned."""
    order = sorted(tensors, key=lambda name: -job.dtype_of(tensors[name]).itemsize)
    metadata = {"format": "pt"} | (run_as_metadata(job.source.run) if job.source.run else {})
    if job.config and "pretrained_cfg" in job.config:
        metadata["pretrained_cfg"] = json.dumps(job.config["pretrained_cfg"])
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in order:
        stored, begin = tensors[name], end
        end += job.size_of(stored)
        dtype = job.dtype_of(stored)
        if dtype not in _NAMES:
            raise ValueError(f"{name} is of {dtype}, which safetensors files do not have here")
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            write_values(file, job.read(tensors[name]))


# -- torch.save -----------------------------------------------------------------------


def write_torch(job: Job, path: Path) -> None:
    """Write a file of torch.save: first with room for the values, then these. Raises OSError.

    With what is known of the run it has the form of PyTorch's ``dcp_to_torch``, else it is a plain
    state dict.
    """
    about, weights = job.about_the_run(), job.on_meta()
    content = {"model": weights, "training": about} if about else weights
    save_without_values(content, path)
    places = load_without_values(path)
    with path.open("r+b") as file:

        def put(place: torch.Tensor, tensor: torch.Tensor) -> None:
            file.seek(offset_of(place))
            write_values(file, tensor)

        for name, stored in job.source.tensors.items():
            put((places["model"] if about else places)[name], job.read(stored))
        for name, tensor in about.items():
            put(places["training"][name], tensor)


# -- DCP ------------------------------------------------------------------------------


class _OneAtATime(dcp.DefaultSavePlanner):
    """Gives DCP each tensor when it is to be written, and takes the last one's memory back.

    DCP itself keeps what it has written until the file's end (PyTorch 2.9, filesystem.py:
    ``tensor_dict``).
    """

    def __init__(self, read: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        super().__init__()
        self._read, self._last = read, torch.empty(0)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        self.release()
        self._last = self._read[write_item.index.fqn]()
        return self._last

    def release(self) -> None:
        """Take back the memory of the tensor that was given last."""
        self._last.untyped_storage().resize_(0)


def write_dcp(job: Job, path: Path) -> None:
    """Write a checkpoint's folder without AdamW's state. Raises OSError or DCP's error."""
    path.mkdir()
    about = job.about_the_run()
    read = {f"model.{name}": _reading(job, stored) for name, stored in job.source.tensors.items()}
    read |= {f"training.{name}": tensor.clone for name, tensor in about.items()}
    state: dict[str, Any] = {"model": job.on_meta()} | ({"training": about} if about else {})
    planner, writer = _OneAtATime(read), dcp.FileSystemWriter(path)
    with quiet_dcp():
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)
    planner.release()
    write_manifest(path, entries(path, _sorted(named_files(path), METADATA)))
    _write_config(job, path)


def _reading(job: Job, stored: Stored) -> Callable[[], torch.Tensor]:
    return lambda: job.read(stored)


def _sorted(names: Iterable[str], *more: str) -> list[str]:
    return sorted([*names, *more])


def _write_config(job: Job, folder: Path) -> None:
    if job.config:
        (folder / CONFIG_FILE).write_text(json.dumps(job.config, indent=2) + "\n")
