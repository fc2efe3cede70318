"""Checkpoint folders: their names, when one is complete, which to resume, which to keep.

A checkpoint is a folder ``step_<n>`` in PyTorch's distributed checkpoint format.
It is written under a temporary name and renamed when complete, so a folder with
the final name always holds everything:

    model.<name>                                    weights
    optimizer.state.<name>.{step,exp_avg,exp_avg_sq}  AdamW
    training.{step,epoch,images_in_epoch}           position; the schedule follows from it
    training.rng                                    state of PyTorch's CPU generator
    training.arguments                              the flags, as UTF-8 JSON
    training.classes                                class names likewise, of an image folder

All entries are tensors: nothing in it is run by loading it. What is random on the
device is drawn anew each step from the seed and the step number.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from training.errors import UsageError
from training.metrics import evaluations

_COMPLETE = re.compile(r"step_(\d+)")
_TEMPORARY_SUFFIX = ".tmp"
BEST = {"best": ("val_top1", 1), "lowest_loss": ("val_loss", -1)}
"""What ``--resume`` can choose by: a value of the evaluations, and whether high is good."""
_POSITION = ("step", "epoch", "images_in_epoch")
_METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "ChunkStorageMetadata",
        "TensorStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {name for name, value in vars(torch).items()
                         if isinstance(value, torch.dtype)},
    "pathlib": {"PosixPath"},
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's own metadata classes and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")


class SafeReader(dcp.FileSystemReader):
    """DCP's file reader with metadata that cannot run code (PyTorch 2.9 unpickles any)."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        content = (Path(self.path) / ".metadata").read_bytes()
        metadata = _MetadataUnpickler(io.BytesIO(content)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("not the metadata of a checkpoint")
        storage = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage.load_id = self.load_id
        metadata.storage_meta = storage
        return metadata


@contextlib.contextmanager
def quiet_dcp() -> Iterator[None]:
    """Without DCP's warnings of what ``no_dist=True`` asks for, and of its own old calls."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        yield


@dataclass(frozen=True)
class Position:
    """Where a run stands: updates done, full epochs done, images into the current epoch."""

    step: int = 0
    epoch: int = 0
    images_in_epoch: int = 0


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint says of itself, read without any device."""

    path: Path
    position: Position
    arguments: dict[str, Any]
    classes: list[str] | None = None
    """Names by label; None where the data had none, or an earlier version wrote it."""


def training_tensors(
    position: Position, arguments: dict[str, Any], classes: list[str] | None
) -> dict[str, torch.Tensor]:
    """The ``training.*`` entries of a checkpoint, except the random state."""
    tensors = {
        "step": torch.tensor(position.step),
        "epoch": torch.tensor(position.epoch),
        "images_in_epoch": torch.tensor(position.images_in_epoch),
        "arguments": _json_tensor(arguments),
    }
    return tensors if classes is None else tensors | {"classes": _json_tensor(classes)}


def saved_run(path: Path, training: Mapping[str, torch.Tensor]) -> SavedRun:
    """What ``training_tensors`` were made of. Raises anything if they are not such tensors."""
    position = Position(*(int(training[name]) for name in _POSITION))
    classes = _from_json(training["classes"]) if "classes" in training else None
    return SavedRun(path, position, _from_json(training["arguments"]), classes)


def _json_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_json(tensor: torch.Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))


def read_saved_run(path: Path) -> SavedRun:
    """Read position and arguments of a checkpoint. Raises UsageError if it cannot be read."""
    if not (path / ".metadata").is_file():
        raise UsageError(f"{path} is no complete checkpoint: it has no .metadata file")
    with readable(path):
        reader = SafeReader(path)
        entries = reader.read_metadata().state_dict_metadata
        wanted: dict[str, Any] = {}
        for name in (*_POSITION, "arguments", "classes"):
            if name == "classes" and "training.classes" not in entries:
                continue
            entry = entries[f"training.{name}"]
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"training.{name} is not a tensor")
            wanted[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        state = {"training": wanted}
        with quiet_dcp():
            dcp.load(state, storage_reader=reader, no_dist=True)
        return saved_run(path, state["training"])


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Around reading a checkpoint: raises UsageError whatever goes wrong in it."""
    try:
        yield
    except UsageError:
        raise
    # A damaged file can fail in any way; DCP wraps some of them, by rank, in its own.
    except (Exception, dcp.CheckpointException) as error:  # noqa: BLE001
        cause: BaseException = error
        if isinstance(error, dcp.CheckpointException):
            cause = next(iter(error.failures.values()))[0]
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise UsageError(f"cannot read the checkpoint {path}: {reason[:200]}") from None


def complete_checkpoints(ckpt_dir: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    if not ckpt_dir.is_dir():
        return []
    found = [
        (int(match[1]), path)
        for path in ckpt_dir.iterdir()
        if (match := _COMPLETE.fullmatch(path.name)) and (path / ".metadata").is_file()
    ]
    return [path for _, path in sorted(found)]


def find_resume(ckpt_dir: Path, resume: str, resume_epoch: int) -> SavedRun | None:
    """The checkpoint that ``--resume`` and ``--resume_epoch`` name, or None to start anew."""
    if resume_epoch and resume != "auto":
        raise UsageError("--resume_epoch and --resume name two checkpoints: give one")
    existing = complete_checkpoints(ckpt_dir)
    if resume_epoch:
        for path in reversed(existing):
            saved = read_saved_run(path)
            if (saved.position.epoch, saved.position.images_in_epoch) == (resume_epoch, 0):
                return saved
        raise UsageError(
            f"--resume_epoch {resume_epoch}: {ckpt_dir} has no checkpoint of that epoch's end"
        )
    if resume == "none":
        if existing:
            raise UsageError(
                f"--resume none, but {ckpt_dir} holds {existing[-1].name} of an earlier run: "
                "choose another --ckpt_dir, or remove its step_* folders"
            )
        return None
    if resume == "auto":
        return read_saved_run(existing[-1]) if existing else None
    if resume in BEST:
        return read_saved_run(_best(ckpt_dir, existing, resume))
    path = Path(resume)
    if not path.is_dir():
        raise UsageError(f"--resume {resume}: there is no such checkpoint folder")
    inside = complete_checkpoints(path)  # the --ckpt_dir of another run: its newest
    return read_saved_run(inside[-1] if inside else path)


def _best(ckpt_dir: Path, existing: list[Path], resume: str) -> Path:
    by_step = evaluations(ckpt_dir)
    evaluated = [p for p in existing if _step(p) in by_step]
    if not evaluated:
        raise UsageError(f"--resume {resume}: {ckpt_dir} has no checkpoint that was evaluated")
    value, order = BEST[resume]
    return max(evaluated, key=lambda path: order * by_step[_step(path)][value])


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def begin(ckpt_dir: Path, step: int) -> tuple[Path, Path]:
    """Names for a checkpoint in the making and for the finished one."""
    final = ckpt_dir / f"step_{step}"
    return final.with_name(final.name + _TEMPORARY_SUFFIX), final


def finish(temporary: Path, final: Path, keep: int, spared: Path | None = None) -> None:
    """Give a written checkpoint its name and remove the oldest beyond ``keep`` (0: none).

    ``spared`` is not removed.
    """
    if final.exists():  # the same step, written again after a resume from before it
        shutil.rmtree(final)
    temporary.rename(final)
    existing = complete_checkpoints(final.parent)
    for path in existing[: len(existing) - keep] if keep else []:
        if path != spared:
            shutil.rmtree(path)


def clear(temporary: Path) -> None:
    """Make an empty folder for a checkpoint, over what an interrupted one left."""
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
