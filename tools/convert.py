"""Converts weights between DCP, torch.save and safetensors: ``python3 -m tools.convert SRC DST``.

docs/files.md says how. ``open_source`` finds the tensors of a file or folder without reading their
values; each ``write_`` function then reads and writes one at a time. So the memory needed is that
of the largest tensor. (DCP's ``format_utils`` and safetensors' ``save_file`` hold all of them.)
"""

from __future__ import annotations

import ctypes
import functools
import io
import json
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

import timm
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_state_dict_into_shards_factory
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.utils import _create_file_view
from tqdm import tqdm

from config_fields import local_path
from models.config import VitConfig
from models.timm_models import EVA_NAMES, TimmSpec
from training import weights
from training.checkpoints import format as saved
from training.checkpoints.choose import find_resume
from training.errors import UsageError
from training.flags import OneLineParser
from training.processes.output import exit_quietly_on_broken_pipe
from training.resolve import model_of
from training.weight_names import timm_names

PROGRAM = "tools.convert"
SUFFIXES = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHARD_SIZE = "5GB"
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
_BLOCK = 1 << 26
"""Bytes read at once where values are converted while reading."""


# -- Where a file of torch.save has the values of its tensors --------------------------------------
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
        return weights.load_tensors(part)


def offset_of(tensor: torch.Tensor) -> int:
    """Return the offset of the first value of a tensor of ``load_without_values``, in bytes."""
    begin = tensor.untyped_storage()._checkpoint_offset
    assert begin is not None
    return int(begin + tensor.storage_offset() * tensor.itemsize)


# -- A tensor in files -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, whose values are contiguous in a file."""

    file: Path
    offset: int
    """Of the first value in the file, in bytes."""
    begin: tuple[int, ...]
    """Index of the box's first value in the tensor."""
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """In values; None for the order of the box's dimensions."""


@dataclass(frozen=True)
class Stored:
    """A tensor that has not been read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Piece]]
    """Finds the boxes that the tensor is made of."""

    @classmethod
    def in_one_piece(
        cls,
        dtype: torch.dtype,
        shape: Sequence[int],
        file: Path,
        offset: int,
        strides: tuple[int, ...] | None = None,
    ) -> Stored:
        piece = Piece(file, offset, (0,) * len(shape), tuple(shape), strides)
        return cls(dtype, piece.shape, lambda: [piece])

    @classmethod
    def joined(cls, parts: Sequence[Stored]) -> Stored:
        """Return one tensor of several, one after the other along the first dimension. Raises
        ValueError if they do not fit each other."""
        first, *others = parts
        if any((each.dtype, each.shape[1:]) != (first.dtype, first.shape[1:]) for each in others):
            raise ValueError("query, key and value differ in their shapes or number formats")

        def pieces() -> Iterator[Piece]:
            row = 0
            for part in parts:
                for piece in part.pieces():
                    yield replace(piece, begin=(row + piece.begin[0], *piece.begin[1:]))
                row += part.shape[0]

        rows = sum(part.shape[0] for part in parts)
        return cls(first.dtype, (rows, *first.shape[1:]), pieces) if others else first

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values as ``dtype``, in memory of their own.

        The memory needed is theirs and a block's. Raises OSError, or ValueError if a file ends too
        early.
        """
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
        rows_a_block = max(1, _BLOCK // (rows[0].numel() * self.dtype.itemsize))
        for part in rows.split(rows_a_block):
            if part.is_contiguous() and part.dtype == self.dtype:
                _fill(file, part)
            else:
                values = torch.empty(part.shape, dtype=self.dtype)
                _fill(file, values)
                part.copy_(values)


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which the caller must keep alive as long."""
    # Not by NumPy: it would keep the memory from being freed before the tensor is.
    return memoryview((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _fill(file: io.FileIO, tensor: torch.Tensor) -> None:
    left = _memory(tensor)
    while left:
        read = file.readinto(left)
        if not read:
            raise ValueError(f"{Path(str(file.name)).name} ends too early")
        left = left[read:]


# -- Opening what is to be converted ---------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A model's weights in files, the run that made them, and how they are to be written."""

    path: Path
    tensors: dict[str, Stored]
    """By the model's own names: timm's."""
    run: saved.SavedRun | None
    config: Mapping[str, Any] | None
    """The content of ``config.json``, in the form of timm's on Hugging Face."""
    dtype: torch.dtype | None = None
    """Of floating-point values once written; None: as they are."""
    moved: Callable[[int], object] = lambda size: None
    """Called with the bytes of each tensor that was read."""

    def dtype_of(self, stored: Stored) -> torch.dtype:
        return self.dtype if self.dtype and stored.dtype.is_floating_point else stored.dtype

    def size_of(self, stored: Stored) -> int:
        """Return the bytes of a tensor once written."""
        return torch.Size(stored.shape).numel() * self.dtype_of(stored).itemsize

    def read(self, stored: Stored) -> torch.Tensor:
        tensor = stored.read(self.dtype_of(stored))
        self.moved(tensor.nbytes)
        return tensor

    def empty(self, device: str) -> dict[str, torch.Tensor]:
        """Return tensors like those that will be written, without their values."""
        return {
            name: torch.empty(stored.shape, dtype=self.dtype_of(stored), device=device)
            for name, stored in self.tensors.items()
        }

    def about_the_run(self) -> dict[str, torch.Tensor]:
        """Return the ``training.*`` entries; none if the run is unknown."""
        run = self.run
        return saved.training_tensors(run.position, run.arguments, run.classes) if run else {}


def open_source(path: Path, *, verify: bool, use_ema: bool) -> Source:
    """Return what ``path`` holds; ``verify`` compares a checkpoint's checksums with its manifest.

    ``use_ema``: the moving average of the weights. Raises UsageError if it is nothing that can be
    converted, or has no average.
    """
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or folder")
    tensors: dict[str, Stored] = {}
    with saved.readable(path):
        files = weights.safetensors_files(path)
        for file in files or ([] if path.is_dir() else [path]):
            weights.check_is_content(file)
        if files:
            if use_ema:
                raise weights.no_ema(path)
            # The format of each: length of the header, header, values.
            for file in files:
                weights.metadata_of(file)  # checks that header and length are sound
                with file.open("rb") as opened:
                    length = int.from_bytes(opened.read(8), "little")
                    header = json.loads(opened.read(length))
                header.pop("__metadata__", None)
                for name, entry in header.items():
                    if entry["dtype"] not in SAFETENSORS_DTYPES:
                        raise ValueError(f"{name} is of {entry['dtype']}, which is not known here")
                    offset = 8 + length + entry["data_offsets"][0]
                    dtype = SAFETENSORS_DTYPES[entry["dtype"]]
                    tensors[name] = Stored.in_one_piece(dtype, entry["shape"], file, offset)
            run = weights.run_in_metadata(path, weights.metadata_of(files[0]))
        elif path.is_dir():
            path, tensors, run = _open_dcp(path, verify, use_ema)
        elif zipfile.is_zipfile(path):
            run = weights.load_file_of_weights(path).run  # mapped: reads what describes the run
            content = load_without_values(path)
            content = weights.ema_of(path, content) if use_ema else content
            for name, tensor in weights.state_dict_of(content).items():
                strides = None if tensor.is_contiguous() else tensor.stride()
                tensors[name] = Stored.in_one_piece(
                    tensor.dtype, tensor.shape, path, offset_of(tensor), strides
                )
        else:
            raise ValueError("it is not a file of torch.save, or of one before PyTorch 1.6")
        names, note = timm_names(tensors)
        if note:
            print(f"{PROGRAM}: {path}: {note}", file=sys.stderr)
        tensors = {
            name: Stored.joined([tensors[part] for part in parts]) for name, parts in names.items()
        }
        beside = (path if path.is_dir() else path.parent) / weights.CONFIG_FILE
        config = json.loads(beside.read_text()) if beside.is_file() else None
        is_timms = isinstance(config, Mapping) and "architecture" in config
        return Source(path, tensors, run, config if is_timms else None)


def _open_dcp(
    path: Path, verify: bool, use_ema: bool
) -> tuple[Path, dict[str, Stored], saved.SavedRun | None]:
    """Open a checkpoint, or of a run's folder the newest one, whose path is returned."""
    if not (path / saved.METADATA).is_file():
        found = find_resume(path, "auto", 0).paths
        if not found:
            raise UsageError(
                f"{path} holds no checkpoint and no {weights.ONE_FILE}, or shards of one"
            )
        path = found[0]
    elif not saved.is_complete(path):
        raise UsageError(f"checkpoint {path} is incomplete")
    if verify and (problem := saved.damage(path)):
        raise UsageError(
            f"{path} is damaged ({problem}): convert another one, or this one as it is with "
            "--no_verify_checkpoint"
        )
    metadata = saved.read_metadata(path)
    described = metadata.state_dict_metadata
    run = saved.read_saved_run(path) if "training.arguments" in described else None
    prefix = f"{saved.EMA if use_ema else saved.WEIGHTS}."
    inside = [name for name in described if name.startswith(prefix)]
    if use_ema and not inside:
        raise weights.no_ema(path)
    tensors = {}
    for name in inside or described:
        entry = described[name]
        assert isinstance(entry, TensorStorageMetadata)
        pieces = functools.partial(_pieces_of, path, metadata, name)
        dtype, size = entry.properties.dtype, tuple(entry.size)
        tensors[name.removeprefix(prefix)] = Stored(dtype, size, pieces)
    return path, tensors, run


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
        yield Piece(
            file,
            place.offset + offset_of(tensor),
            tuple(part.offsets),
            tuple(part.sizes),
            None if tensor.is_contiguous() else tensor.stride(),
        )


# -- Writing ---------------------------------------------------------------------------------------


def write_safetensors(source: Source, path: Path) -> None:
    """Write one file: length of the header, header, values. Raises OSError."""
    tensors, run, config = source.tensors, source.run, source.config
    metadata = {"format": "pt"} | (weights.run_as_metadata(run) if run else {})
    if config and "pretrained_cfg" in config:
        metadata["pretrained_cfg"] = json.dumps(config["pretrained_cfg"])
    header: dict[str, Any] = {"__metadata__": metadata}
    names = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    # The widest first: so all are aligned.
    order = sorted(tensors, key=lambda name: -source.dtype_of(tensors[name]).itemsize)
    end = 0
    for name in order:
        stored, begin = tensors[name], end
        end += source.size_of(stored)
        dtype = source.dtype_of(stored)
        if dtype not in names:
            raise ValueError(f"{name} is of {dtype}, which safetensors files do not have here")
        header[name] = {
            "dtype": names[dtype],
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            _write_values(file, source.read(tensors[name]))


def _write_values(file: IO[bytes], tensor: torch.Tensor) -> None:
    """Write the values of a contiguous tensor on the CPU; the caller holds no other meanwhile."""
    file.write(_memory(tensor))


def write_safetensors_folder(source: Source, path: Path, max_shard_size: str) -> None:
    """Write Hugging Face's layout: one file, or shards and their index. Raises OSError."""
    path.mkdir()
    split = split_state_dict_into_shards_factory(
        source.tensors,
        get_storage_size=source.size_of,
        filename_pattern=weights.ONE_FILE.replace(".", "{suffix}."),
        max_shard_size=max_shard_size,
    )
    for file, names in split.filename_to_tensors.items():
        part = {name: source.tensors[name] for name in names}
        write_safetensors(replace(source, tensors=part), path / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (path / weights.INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_torch(source: Source, path: Path) -> None:
    """Write a file of torch.save: first with room for the values, then these. Raises OSError.

    With a known run it has the form of PyTorch's ``dcp_to_torch``, else it is a plain state dict.
    The zip's checksums are those of nothing; torch.load compares none.
    """
    about = source.about_the_run()
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        with FakeTensorMode():
            content: dict[str, Any] = source.empty("cpu")
            if about:
                room = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in about.items()}
                content = {"model": content, "training": room}
        torch.save(content, path)
    places = load_without_values(path)
    with path.open("r+b") as file:
        for name, stored in source.tensors.items():
            file.seek(offset_of((places["model"] if about else places)[name]))
            _write_values(file, source.read(stored))
        for name, tensor in about.items():
            file.seek(offset_of(places["training"][name]))
            _write_values(file, tensor)


class _OneAtATime(dcp.DefaultSavePlanner):
    """Reads each tensor when DCP writes it, and then frees it.

    DCP itself keeps what it has written until the file's end (PyTorch 2.9, filesystem.py:
    ``tensor_dict``).
    """

    def __init__(self, read: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        super().__init__()
        self._read, self._last = read, torch.empty(0)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        self._last.untyped_storage().resize_(0)  # frees the memory
        self._last = self._read[write_item.index.fqn]()
        return self._last


def write_dcp(source: Source, path: Path) -> None:
    """Write a checkpoint's folder without the optimizer's state. Raises OSError or DCP's error."""
    path.mkdir()
    about = source.about_the_run()
    read: dict[str, Callable[[], torch.Tensor]] = {
        f"model.{name}": functools.partial(source.read, stored)
        for name, stored in source.tensors.items()
    }
    read |= {f"training.{name}": tensor.clone for name, tensor in about.items()}
    state: dict[str, Any] = {"model": source.empty("meta")} | ({"training": about} if about else {})
    writer = dcp.FileSystemWriter(path)
    with saved.quiet_dcp():
        dcp.save(state, storage_writer=writer, planner=_OneAtATime(read), no_dist=True)
    files = sorted([*saved.named_files(path), saved.METADATA])
    saved.write_manifest(path, saved.entries(path, files))


def timm_config(run: saved.SavedRun) -> dict[str, Any] | None:
    """Return the ``config.json`` from which ``timm.create_model("local-dir:...")`` makes the model.

    As timm writes it for Hugging Face; None for a model that is not timm's. Raises UsageError.
    """
    spec = model_of(run.model)
    if not isinstance(spec, TimmSpec):
        return None
    if spec.name.startswith("timm/"):
        architecture = spec.name.removeprefix("timm/").partition(".")[0]
        names = [name if name in spec.settings else EVA_NAMES[name] for name in spec.overrides]
    else:  # a preset of ours: all arguments are given
        architecture = spec.name if timm.is_model(spec.name) else "vit_base_patch16_224"
        names = [field.name for field in fields(VitConfig) if field.name != "weight_init"]
    arguments = {name: spec.settings[name] for name in names if spec.settings[name] is not None}
    sizes, how = spec.sizes, weights.preprocessing_of(run.arguments, run.path)
    classes = sizes.num_classes if run.objective.objective == "classify" else 0  # without a head
    mean, std = how.of_channels(sizes.input_shape[0])
    config: dict[str, Any] = {
        "architecture": architecture,
        "num_classes": classes,
        "num_features": sizes.embed_dim,
        "model_args": arguments | {"num_classes": classes},
        "pretrained_cfg": {
            "input_size": list(sizes.input_shape),
            "fixed_input_size": True,
            "num_classes": classes,
            "mean": mean,
            "std": std,
            "crop_pct": how.crop_pct,
            "crop_mode": how.crop_mode,
            "interpolation": how.interpolation_of_val,
            "custom_load": False,
            "classifier": "head",
        },
    }
    if sizes.input_shape[0] == 3:  # else timm would sum its weights over the channels
        config["pretrained_cfg"]["first_conv"] = "patch_embed.proj"
    return config | ({"label_names": run.classes} if run.classes else {})


# -- The command line ------------------------------------------------------------------------------


def convert(source: Source, dst: Path, write: Callable[[Source, Path], None]) -> int:
    """Write the weights to ``dst``, by a temporary name beside it; return their bytes.

    Raises UsageError if they cannot be read or written, and then leaves nothing there.
    """

    def remove() -> None:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)

    temporary = dst.with_name(f".{dst.name}.partial")
    total = sum(map(source.size_of, source.tensors.values()))
    bar = tqdm(total=total, unit="B", unit_scale=True, dynamic_ncols=True, disable=None)
    remove()
    try:
        with bar:
            write(replace(source, moved=bar.update), temporary)
        if source.config and temporary.is_dir():
            text = json.dumps(source.config, indent=2) + "\n"
            (temporary / weights.CONFIG_FILE).write_text(text)
        temporary.rename(dst)
    # A full disk shows as OSError, as an error of the zip writer, or wrapped by DCP.
    except (Exception, dcp.CheckpointException) as error:  # noqa: BLE001
        raise UsageError(
            f"{source.path} cannot be converted to {dst}: {saved.reason_of(error)}"
        ) from None
    finally:
        remove()
    return total


def main(argv: Sequence[str] | None = None) -> int:
    """Convert as the command line says; return the exit code."""
    parser = OneLineParser(
        PROGRAM, "Convert a model's weights to another file format, one tensor at a time."
    )
    parser.add_argument(
        "src",
        type=local_path,
        help="a checkpoint step_N, a run's --ckpt_dir (its newest), another folder of DCP, a file "
        "of torch.save, a .safetensors file, or a folder of them in Hugging Face's layout",
    )
    parser.add_argument(
        "dst",
        type=local_path,
        help="what does not exist yet: a file .safetensors, .pt, .pth or .bin, or a folder",
    )
    parser.add_argument(
        "--to",
        choices=("dcp", "torch", "safetensors"),
        help="format of a DST without such a suffix; dcp: a checkpoint's folder; safetensors: a "
        "folder in Hugging Face's layout (default: by DST's suffix)",
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(DTYPES),
        help="convert floating-point values to this dtype (default: as they are)",
    )
    parser.add_argument(
        "--max_shard_size",
        metavar="SIZE",
        help=f"largest file of a safetensors folder, such as 500MB (default: {SHARD_SIZE})",
    )
    parser.add_argument(
        "--use_ema",
        action="store_true",
        help="convert the moving average of the weights (EMA) that SRC holds, not the weights",
    )
    parser.add_argument(
        "--no_verify_checkpoint",
        action="store_true",
        help="do not compare a checkpoint's files with their checksums first (default: compared)",
    )
    given = parser.parse_args(argv)
    dst: Path = given.dst
    try:
        by_suffix = SUFFIXES.get(dst.suffix)
        if by_suffix and given.to and given.to != by_suffix:
            raise UsageError(
                f"--to {given.to} is incompatible with {dst}: a {dst.suffix} file is {by_suffix}"
            )
        form = given.to or by_suffix
        if form is None:
            raise UsageError(
                f"{dst}: name a file .safetensors, .pt, .pth or .bin, or give --to dcp or --to "
                "safetensors for a folder"
            )
        write: Callable[[Source, Path], None]
        write = {"dcp": write_dcp, "torch": write_torch, "safetensors": write_safetensors}[form]
        if form == "safetensors" and not by_suffix:
            shard_size = given.max_shard_size or SHARD_SIZE
            write = functools.partial(write_safetensors_folder, max_shard_size=shard_size)
        elif given.max_shard_size:
            raise UsageError("--max_shard_size is for a folder: --to safetensors and a name for it")
        if dst.exists() or dst.is_symlink():
            raise UsageError(f"{dst} is there already: name another, or remove it")
        if not dst.parent.is_dir():
            raise UsageError(f"{dst.parent} is not a folder: make it first")
        source = open_source(
            given.src, verify=not given.no_verify_checkpoint, use_ema=given.use_ema
        )
        source = replace(source, dtype=DTYPES.get(given.dtype))
        if run := source.run:
            source = replace(source, config=timm_config(run))
            if run.objective.objective != "classify":  # which added to the model, as MAE's decoder
                names = model_of(run.model).meta.state_dict().keys()
                tensors = {name: each for name, each in source.tensors.items() if name in names}
                source = replace(source, tensors=tensors)
        size = convert(source, dst, write)
    except UsageError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return 130
    count = len(source.tensors)
    print(f"converted {source.path}: {count} tensors, {size:,} bytes, to {dst}")
    return 0


if __name__ == "__main__":
    with exit_quietly_on_broken_pipe(PROGRAM):
        sys.exit(main())
