"""The checkpoint format: entries, files and manifest, and how to read them safely.

A checkpoint is a folder ``step_<n>`` in PyTorch's distributed checkpoint format (DCP), where n is
the number of optimizer steps of the run so far:

    model.<name>                                    weights
    ema.<name>                                      their EMA, with --model_ema
    optimizer.state.<name>.{step,exp_avg,exp_avg_sq}  AdamW
    training.{step,epoch,images_in_epoch}           position; the schedule follows from it
    training.rng                                    state of PyTorch's CPU generator
    training.arguments                              the flags, as UTF-8 JSON
    training.classes                                class names as JSON, for image folders
    training.order                                  what determines the images' order, as JSON
    training.format                                 format version; 2 has a manifest

All entries are tensors, so loading them runs no code. Randomness on the device is derived in each
step from the seed and the step number.

``manifest.json`` contains the size and the checksum of each file (XXH3, 128 bits: faster than any
disk) and is written last. A checkpoint is therefore complete if it has one, even on storage without
atomic renames of folders (buckets). Sizes are compared whenever checkpoints are listed, checksums
before one is resumed.
"""

import contextlib
import dataclasses
import io
import json
import os
import pickle
import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import EnumMeta
from pathlib import Path, PosixPath
from typing import IO, Any, cast, get_type_hints

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from config_fields import is_of
from data.config import RANDOM_SPLIT, DataConfig
from data.files import TEXT, SizeLimit, TooLarge, printable, without_secrets
from models.config import ModelConfig
from training.backend import State
from training.config import RunConfig, flags_of_model
from training.errors import UsageError
from training.files import (
    folder_at,
    is_unreachable,
    is_url,
    open_regular,
    read_object,
    read_whole,
    replace_file,
    sync_folder,
)
from training.flags import by_field, check_values, from_values, values_without_secrets
from training.objectives.config import flags_of_weights
from training.schedule import Position

NAME = re.compile(r"step_(0|[1-9][0-9]*)")
"""The name of a checkpoint's folder; its number is the step."""

# -- entries ---------------------------------------------------------------------------------------

FORMAT = 2
WEIGHTS, EMA, GRAM = "model", "ema", "gram"
"""Name prefixes of weights, of their EMA, and of a Gram teacher."""
TRAINING = "training"
"""The prefix of everything that describes the run."""
_OPTIONAL = ("classes", "order")
RNG = "rng"


def tree(state: State, training: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what DCP writes or reads into: nested dictionaries whose paths are the entry names.

    ``training``: the ``training.*`` entries; omitted if empty.
    """
    content: dict[str, Any] = {WEIGHTS: state.model}
    if state.ema is not None:
        content[EMA] = state.ema
    if state.gram is not None:
        content[GRAM] = state.gram
    if state.optimizer is not None:
        content["optimizer"] = {"state": state.optimizer}
    return content | ({TRAINING: dict(training)} if training else {})


@dataclass(frozen=True)
class SavedRun:
    """What a checkpoint records about the run that wrote it, read without any device."""

    path: Path
    position: Position
    arguments: dict[str, Any]
    classes: list[str] | None = None
    """The class names by label; None if the data had none or an earlier version wrote this."""
    order: dict[str, Any] | None = None
    """What determines the order of the training images besides ``arguments``
    (``DataSource.order``); None if an earlier version wrote the checkpoint."""
    is_part: bool = False
    """Whether ``path`` contains only this process's part of the state (``--local_ckpt_dir``)."""

    def __post_init__(self) -> None:
        """Raise ValueError for values that no run records: a file may say anything of itself. Drop
        the secrets in URLs, which earlier versions saved."""
        if min(dataclasses.astuple(self.position)) < 0:
            raise ValueError(f"its position in the data is invalid: {self.position}")
        for name, hint in get_type_hints(SavedRun).items():
            if name in ("arguments", *_OPTIONAL) and not is_of(getattr(self, name), hint):
                raise ValueError(f"its {TRAINING}.{name} is damaged")
        for flags in (*flags_of_model(), *flags_of_weights()):
            check_values(flags, self.arguments)
        check_values(DataConfig, {n: self.arguments[n] for n in _OF_DATA if n in self.arguments})
        object.__setattr__(self, "arguments", values_without_secrets(self.arguments))

    @property
    def model(self) -> ModelConfig:
        """The flags of its model, without those of features."""
        return from_values(ModelConfig, self.arguments)

    @property
    def config(self) -> RunConfig:
        """The flags of its model and of what it is trained for; all others have their defaults."""
        known = by_field(*flags_of_model(), *flags_of_weights())
        values = {name: value for name, value in self.arguments.items() if name in known}
        return from_values(RunConfig, values)


_OF_DATA = ("data_source", "class_order", *RANDOM_SPLIT)
"""The flags of the data that the program reads back. Preprocessing is checked where it is used."""


def training_tensors(
    position: Position,
    arguments: dict[str, Any],
    classes: list[str] | None,
    order: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the ``training.*`` entries of a checkpoint, except the random state."""
    numbers = {**dataclasses.asdict(position), "format": FORMAT}
    tensors = {name: torch.tensor(number) for name, number in numbers.items()}
    for name, value in (("arguments", arguments), ("classes", classes), ("order", order)):
        if value is not None:
            text = bytearray(json.dumps(value).encode())
            tensors[name] = torch.frombuffer(text, dtype=torch.uint8)
    return tensors


def saved_run(path: Path, training: Mapping[str, torch.Tensor]) -> SavedRun:
    """The inverse of ``training_tensors``. Raises any exception for other tensors or values."""
    position = Position(*(int(training[field.name]) for field in dataclasses.fields(Position)))
    texts = {
        name: json.loads(bytes(training[name].tolist()))
        for name in ("arguments", *_OPTIONAL)
        if name in training
    }
    return SavedRun(path, position, **texts)


# -- files, in local folders and at URLs ----------------------------------------------------------

_TRAINING_PREFIX = "__training_"
TRAINING_FILE = f"{_TRAINING_PREFIX}0.distcp"
"""The file of the ``training.*`` entries, if each host has a folder of its own: all have it."""
METADATA = ".metadata"
"""The file that DCP writes when all parts of a checkpoint are written: names, shapes, locations."""
_LONGEST_METADATA = SizeLimit("the metadata of a checkpoint", 2**30)
"""Several million parts of tensors."""
Name = str | os.PathLike
"""The type of DCP's file names: a string at URLs, like the folder's name in its metadata."""
Entry = tuple[int, str]
"""A file's size in bytes and its checksum, XXH3 of 128 bits in hexadecimal digits."""


Elsewhere = Mapping[str, Callable[[], contextlib.AbstractContextManager[io.IOBase]]]
"""Files of a checkpoint that are not in its folder, by name: functions that open them."""


class _Files(FileSystem):
    """DCP's access to the files of a folder or URL; computes checksums of what is written."""

    def __init__(self, elsewhere: Elsewhere | None = None) -> None:
        self.sums: dict[str, Entry] = {}
        """The size and checksum of each file written so far, by name."""
        self._elsewhere = elsewhere or {}

    @contextlib.contextmanager
    def create_stream(self, path: Name, mode: str) -> Iterator[io.IOBase]:
        if open_ := self._elsewhere.get(os.path.basename(path)):
            with open_() as remote:
                yield remote
            return
        file = folder_at(str(path))
        with open_regular(file) if mode == "rb" else file.open(mode) as stream:
            if "w" not in mode:
                yield cast(io.IOBase, stream)
                return
            summed = _Summed(stream)
            with _Buffered(summed, _BUFFER) as buffered:
                yield buffered
        self.sums[os.path.basename(path)] = (summed.size, summed.digest.hexdigest())

    def concat_path(self, path: Name, suffix: str) -> Name:
        return str(folder_at(str(path)) / suffix)

    def mkdir(self, path: Name) -> None:
        folder_at(str(path)).mkdir(parents=True, exist_ok=True)

    def exists(self, path: Name) -> bool:
        return folder_at(str(path)).exists()


_BUFFER = 1 << 20
"""Size of a buffered write in bytes: torch.save writes each tensor in dozens of small pieces, and
each one would take Python's GIL."""


class _Summed(io.RawIOBase):
    """A write-only sequential stream that tracks the size and checksum of what is written."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.size, self.digest = stream, 0, xxhash.xxh3_128()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def fileno(self) -> int:
        self._stream.flush()
        return self._stream.fileno()

    def write(self, content: Any) -> int:
        self.digest.update(content)
        self._stream.write(content)
        written = memoryview(content).nbytes
        self.size += written
        return written


class _Buffered(io.BufferedWriter):
    def fileno(self) -> int:
        self.flush()  # DCP syncs the file
        return super().fileno()


class FolderWriter(dcp.FileSystemWriter):
    """Writes the files and the metadata of a checkpoint, and computes their checksums."""

    def __init__(self, folder: Path, *, from_cuda: bool, training_apart: bool = False) -> None:
        """``from_cuda``: tensors of the checkpoint are on a GPU. ``training_apart``: write the
        ``training.*`` entries into ``TRAINING_FILE``."""
        super().__init__(str(folder), sync_files=not is_url(folder))
        self._training_apart = training_apart
        # Copying ahead would use CUDA device 0 from a thread of every process, and not every other
        # device can copy to the host asynchronously.
        if not from_cuda:
            self.per_thread_copy_ahead = 0
        files = _Files()
        self.fs, self.folder = files, folder
        self.path = str(folder) if is_url(folder) else folder
        self.sums = files.sums
        """The sizes and checksums of the files that this process has written, by name."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if not self._training_apart:
            return super().write_data(plan, planner)
        written: list[WriteResult] = []
        own = plan.storage_data  # the beginning of its files' names
        apart = dataclasses.replace(own, prefix=_TRAINING_PREFIX)
        for is_training, prefix in ((False, own), (True, apart)):
            items = [
                item
                for item in plan.items
                if item.index.fqn.startswith(f"{TRAINING}.") == is_training
            ]
            if items:
                part = dataclasses.replace(plan, items=items, storage_data=prefix)
                written += super().write_data(part, planner).wait()
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata under its final name. DCP would write another file and rename it; in a
        bucket that is a copy and a removal, which may not be permitted."""
        content = pickle.dumps(
            dataclasses.replace(
                metadata,
                version=CURRENT_DCP_VERSION,
                storage_data={
                    entry.index: entry.storage_data for part in results for entry in part
                },
                storage_meta=self.storage_meta(),
            )
        )
        replace_file(self.folder / METADATA, content)
        self.sums[METADATA] = len(content), xxhash.xxh3_128(content).hexdigest()


# -- reading without running code from a checkpoint ------------------------------------------------

_METADATA_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "ChunkStorageMetadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    # Where PyTorch up to 2.2 had them.
    "torch.distributed._shard.sharded_tensor.metadata": {
        "TensorProperties",
        "MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"}
    | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "pathlib": {"PosixPath"},
}


def _memory_format(encoding: Any, name: Any) -> Any:
    """Return the member ``name`` of DCP's enum of memory formats; no other kind of enum can be
    loaded. It replaces ``getattr``, as calls of which early releases of Python 3.11, such as
    3.11.2, pickle members of an Enum."""
    if isinstance(encoding, EnumMeta) and isinstance(name, str) and name in encoding.__members__:
        return encoding[name]
    raise pickle.UnpicklingError("builtins.getattr is not allowed in a checkpoint")


_REPLACED = {
    ("builtins", "getattr"): _memory_format,
    ("pathlib._local", "PosixPath"): PosixPath,  # its module in Python 3.13
}


class _MetadataUnpickler(pickle.Unpickler):
    """Builds DCP's own metadata classes and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if replacement := _REPLACED.get((module, name)):
            return replacement
        if name in _METADATA_NAMES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and not hasattr(torch, name):  # a dtype of a later version
            raise pickle.UnpicklingError(f"PyTorch {torch.__version__} has no torch.{name}")
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")


def read_metadata(path: Path) -> Metadata:
    """Return the metadata of a folder's tensors. Raises like ``tensors_and_others``."""
    return tensors_and_others(path)[0]


def tensors_and_others(path: Path) -> tuple[Metadata, list[str]]:
    """Return the metadata of a folder's tensors, which are in its own files, and the names of its
    other entries. Raises any exception if it is damaged or anything else.

    DCP unpickles other entries without restriction, so it must not know of them.
    """
    metadata = _MetadataUnpickler(io.BytesIO(read_whole(path / METADATA, _LONGEST_METADATA))).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError("not the metadata of a checkpoint")
    tensors: dict[str, Any] = {}
    others = []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors[name] = entry
        elif isinstance(entry, BytesStorageMetadata):
            others.append(name)
        else:
            raise pickle.UnpicklingError(f"{name} is not an entry of a checkpoint")
    stored = {index: info for index, info in metadata.storage_data.items() if index.fqn in tensors}
    for info in stored.values():
        if Path(info.relative_path).name != info.relative_path:
            raise pickle.UnpicklingError(f"{info.relative_path} is not a file of the checkpoint")
    metadata = dataclasses.replace(metadata, state_dict_metadata=tensors, storage_data=stored)
    return metadata, others


def entries_of(path: Path) -> dict[str, TensorStorageMetadata]:
    """Return shape, dtype and chunks of each entry by name. Raises like ``read_metadata``."""
    return tensors_in(read_metadata(path))


def tensors_in(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return the entries of metadata that ``read_metadata`` returned, all of which are tensors."""
    return cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)


def describes_run(metadata: Metadata) -> bool:
    """Return True for a checkpoint of this program, False for a DCP folder of another one."""
    return f"{TRAINING}.arguments" in metadata.state_dict_metadata


def named_files(path: Path) -> set[str]:
    """Return the files that a checkpoint's metadata names. Raises like ``read_metadata``."""
    return {info.relative_path for info in read_metadata(path).storage_data.values()}


class SafeReader(dcp.FileSystemReader):
    """DCP's file reader, but never unpickles metadata that runs code, as PyTorch 2.9 does."""

    def __init__(self, folder: Path, elsewhere: Elsewhere | None = None) -> None:
        super().__init__(str(folder))
        self.fs, self.path, self.folder = _Files(elsewhere), str(folder), folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_metadata(self.folder)
        storage = getattr(metadata, "storage_meta", None) or StorageMeta()
        storage.load_id = self.load_id
        metadata.storage_meta = storage
        return metadata


def load_into(
    content: dict[str, Any],
    path: Path,
    *,
    no_dist: bool = True,
    planner: dcp.DefaultLoadPlanner | None = None,
    elsewhere: Elsewhere | None = None,
) -> None:
    """Read entries of a checkpoint into the tensors of ``content``. Raises any exception.
    ``no_dist``: this process reads alone; otherwise all processes must call it. ``elsewhere``: its
    files that are not in the folder."""
    reader = SafeReader(path, elsewhere)
    with quiet_dcp():
        dcp.load(content, storage_reader=reader, planner=planner, no_dist=no_dist)


def silence_dcp() -> None:
    """Permanently silence DCP's warnings about ``no_dist=True`` and its own deprecated calls."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")


@contextlib.contextmanager
def quiet_dcp() -> Iterator[None]:
    """Silence these warnings inside. Not thread-safe: warning filters are global."""
    with warnings.catch_warnings():
        silence_dcp()
        yield


def read_saved_run(path: Path, elsewhere: Elsewhere | None = None) -> SavedRun:
    """Read position and arguments of a checkpoint. Raises UsageError if it cannot be read, or if it
    is named after another step. ``elsewhere``: its files that are not in the folder."""
    with readable(path):
        if not (path / METADATA).is_file():
            raise UsageError(f"checkpoint {path} is incomplete: it has no {METADATA} file")
        metadata, others = tensors_and_others(path)
        if not describes_run(metadata):
            raise UsageError(
                f"{path} is a DCP folder of another program, without a position in the data to "
                f"resume from: for its weights, use --init_from {path}"
            )
        if others:
            raise ValueError(f"{others[0]} is not a tensor")
        entries, wanted = tensors_in(metadata), {}
        position = (field.name for field in dataclasses.fields(Position))
        for name in (*position, "arguments", *_OPTIONAL):
            if name not in _OPTIONAL or f"{TRAINING}.{name}" in entries:
                entry = entries[f"{TRAINING}.{name}"]
                TEXT.check(entry.size.numel() * entry.properties.dtype.itemsize, name)
                wanted[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        load_into({TRAINING: wanted}, path, elsewhere=elsewhere)
        saved, named = saved_run(path, wanted), NAME.fullmatch(path.name)
        if named and int(named[1]) != (step := saved.position.step):
            raise ValueError(f"it contains step {step}, not step {named[1]}")
        return saved


class Unreachable(UsageError):
    """Raised for a checkpoint that this process cannot reach, and that may be undamaged."""


@contextlib.contextmanager
def readable(path: Path, what: str = "the checkpoint") -> Iterator[None]:
    """Turn any exception while reading a checkpoint inside into UsageError; into Unreachable if it
    says nothing about the checkpoint itself."""
    try:
        yield
    except UsageError:
        raise
    # A damaged file can raise any exception.
    except (Exception, dcp.CheckpointException) as error:  # noqa: BLE001
        kind = Unreachable if is_unreachable(_cause(error)) else UsageError
        reason = reason_of(error).removesuffix(f": {path}")
        raise kind(f"cannot read {what} {path}: {reason}") from None


def _cause(error: BaseException) -> BaseException:
    """Return the exception that DCP has wrapped, by rank, in its own."""
    if isinstance(error, dcp.CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


def reason_of(error: BaseException) -> str:
    """Return one line of what went wrong, also in DCP."""
    error = _cause(error)
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    text = without_secrets(str(error)).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


# -- the manifest ----------------------------------------------------------------------------------

MANIFEST = "manifest.json"
_CHUNK = 1 << 24


def checksum(path: Path) -> str:
    """Return XXH3 of a file's content, 128 bits in hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def entries(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """Return the entries of a manifest for these files of a folder."""
    return {name: ((folder / name).stat().st_size, checksum(folder / name)) for name in names}


def write_manifest(
    folder: Path, files: dict[str, Entry], writers: Mapping[str, str] | None = None
) -> None:
    """Complete a checkpoint that is written and synced to disk. Raises OSError if the manifest
    cannot be written, or if a file that the metadata names is missing because it was written to
    another disk.

    ``writers``: who has written each file, if each host has a folder of its own.
    """
    missing = named_files(folder) - files.keys()
    if writers is None:
        missing |= {name for name in files if not (folder / name).is_file()}
    if missing:
        raise FileNotFoundError(
            f"{sorted(missing)[0]} is not in the folder: do all processes see the same one?"
        )
    content = {"format": FORMAT, "files": {name: list(files[name]) for name in sorted(files)}}
    if writers is not None:
        content["writers"] = dict(sorted(writers.items()))
    replace_file(folder / MANIFEST, json.dumps(content, indent=1) + "\n")
    sync_folder(folder.parent)


def read_manifest(folder: Path) -> dict[str, Entry] | None:
    """Return sizes and checksums by file; None if there is no manifest. Raises ValueError if it is
    damaged, OSError if it cannot be reached."""
    try:
        return manifest_entries(read_object(folder / MANIFEST)["files"])
    except FileNotFoundError:
        return None
    except TooLarge:
        raise
    except (OSError, ValueError, KeyError) as error:
        if is_unreachable(error):
            raise
        raise ValueError(f"{MANIFEST} is damaged ({type(error).__name__})") from None


def writers_in(folder: Path) -> dict[str, str]:
    """Return which process has written each file of a checkpoint, if each host has a folder of its
    own; {} if that is not known."""
    try:
        writers = read_object(folder / MANIFEST)["writers"]
        return {str(name): printable(str(writer)) for name, writer in writers.items()}
    except (OSError, ValueError, KeyError, AttributeError):
        return {}


_FILE_NAME = re.compile(r"[\w.-]*\w[\w.-]*")
_SUM = re.compile(r"[0-9a-f]{32}")


def manifest_entries(files: Any) -> dict[str, Entry]:
    """Return the entries of a manifest from JSON. Raises ValueError for invalid ones."""
    if not isinstance(files, dict):
        raise ValueError("the files of the manifest are not a JSON object")
    for name, entry in files.items():
        match entry:
            case [int(), str(checksum)] if _FILE_NAME.fullmatch(name) and _SUM.fullmatch(checksum):
                continue
        raise ValueError(f"{name[:100]!r} is not a valid entry of a manifest")
    return {name: (size, checksum) for name, (size, checksum) in files.items()}


def is_complete(folder: Path) -> bool:
    """Return True if a checkpoint was completed; it may have been damaged since. Raises OSError if
    it cannot be reached."""
    if (folder / MANIFEST).exists():
        return True
    if not (folder / METADATA).is_file():
        return False
    try:
        return f"{TRAINING}.format" not in entries_of(folder)
    except Exception as error:  # a damaged file can fail in any way
        if is_unreachable(error):
            raise
        return True  # probably of an earlier version: reading it will tell


def quick_problem(folder: Path, *, per_host: bool = False) -> str | None:
    """Return what is wrong with a complete checkpoint, judging by file names and sizes; None if
    nothing. Raises OSError if it cannot be reached, in which case it may be undamaged.
    ``per_host``: other hosts may have files that are missing here."""
    try:
        files = read_manifest(folder)
        if files is None:  # of an earlier version
            files = dict.fromkeys(named_files(folder), (-1, ""))
    except Exception as error:  # a damaged file can fail in any way
        if is_unreachable(error):
            raise
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    for name, (size, _) in {} if per_host else files.items():
        try:
            size_there = (folder / name).stat().st_size
        except OSError as error:
            if is_unreachable(error):
                raise
            several = ": copy this checkpoint from all hosts into one folder"
            return f"{name} is missing{several if TRAINING_FILE in files else ''}"
        if size not in (size_there, -1):
            return f"{name} has {size_there:,} bytes, not {size:,}"
    return None


def damage(
    folder: Path, part: int = 0, parts: int = 1, *, of: Container[str] | None = None
) -> str | None:
    """Return what is wrong with the content of every ``parts``-th file, starting with number
    ``part``; None if nothing, or if there are no checksums. Raises OSError if the checkpoint cannot
    be reached, ValueError for a damaged manifest. ``of``: only these files; None: all."""
    files = sorted((read_manifest(folder) or {}).items())
    files = [(name, entry) for name, entry in files if of is None or name in of]
    for name, (_, expected) in files[part::parts]:
        try:
            is_undamaged = checksum(folder / name) == expected
        except OSError as error:
            if is_unreachable(error):
                raise
            return f"{name} cannot be read ({error.strerror})"
        if not is_undamaged:
            return f"{name} has changed since it was written (its checksum differs)"
    return None
