"""Save a backend's state to checkpoint files and load it, with PyTorch's DCP."""

from __future__ import annotations

import math
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.utils.serialization import config

from training.backend import Backend
from training.checkpoints.format import (
    EMA,
    GRAM,
    MANIFEST,
    METADATA,
    RNG,
    TRAINING,
    WEIGHTS,
    Elsewhere,
    Entry,
    FolderWriter,
    checksum,
    damage,
    entries_of,
    load_into,
    tree,
)
from training.errors import UsageError
from training.processes import exchange

# -- sharded tensors for DCP -----------------------------------------------------------------------


@dataclass
class Chunk:
    """A rectangular piece of a global tensor: its offsets, and its values on the CPU."""

    offsets: tuple[int, ...]
    data: torch.Tensor


class ShardedTensor(torch.Tensor):
    """The chunks of a global tensor that this process holds.

    Implements the methods that DCP's default planners use to save and load sharded tensors, so that
    the checkpoint can be loaded with any other sharding. Supports no computation.
    """

    chunks: list[Chunk]

    @staticmethod
    def __new__(cls, size: Sequence[int], dtype: torch.dtype, chunks: list[Chunk]) -> ShardedTensor:
        tensor = torch.Tensor._make_wrapper_subclass(cls, torch.Size(size), dtype=dtype)
        tensor.chunks = chunks
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        raise NotImplementedError(f"{func} on the shards of a checkpoint")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(c.offsets), c.data.size()) for c in self.chunks]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, metadata.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(metadata, properties, self.size()),
            )
            for metadata in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for chunk in self.chunks:
            if index.offset is None or tuple(index.offset) == tuple(chunk.offsets):
                return chunk.data
        raise ValueError(f"no chunk of {index.fqn} starts at {index.offset}")


def flat_range_boxes(
    shape: Sequence[int], start: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Divide the row-major range [start, end) of a tensor, such as a flat shard of FSDP, into
    boxes. Yields (offsets, sizes, flat start) of at most 2 * len(shape) - 1 boxes, in order."""
    if not shape and start < end:
        yield (), (), start
        return
    row, at = math.prod(shape[1:]), start
    while at < end:
        index, inside = divmod(at, row)
        if inside == 0 and (rows := (end - at) // row):
            yield (index, *(0 for _ in shape[1:])), (rows, *shape[1:]), at
            at += rows * row
        else:  # a part of one row
            base = index * row
            stop = min(end, base + row)
            for offsets, sizes, flat in flat_range_boxes(shape[1:], inside, stop - base):
                yield (index, *offsets), (1, *sizes), base + flat
            at = stop


# -- saving and loading ----------------------------------------------------------------------------


def state_content(
    backend: Backend, training: Mapping[str, torch.Tensor], *, copy: bool
) -> dict[str, Any]:
    """Return a checkpoint's content: the backend's state, ``training``, the CPU's random state.

    With ``copy``, it is a copy in host memory that does not change when training continues.
    """
    state = backend.state()
    content = tree(state, {**training, **state.step, RNG: torch.get_rng_state()})
    return _copied(content) if copy and not state.is_copy else content


def _copied(value: Any) -> Any:
    """Return a nested dictionary of tensors with each tensor copied to the CPU."""
    if isinstance(value, Mapping):
        return {name: _copied(inner) for name, inner in value.items()}
    if isinstance(value, ShardedTensor):
        chunks = [Chunk(chunk.offsets, _copied(chunk.data)) for chunk in value.chunks]
        return ShardedTensor(value.size(), value.dtype, chunks)
    return value.detach().to("cpu", copy=True)


def bytes_of(value: Any) -> int:
    """Return the number of bytes that this process holds of the tensors in a nested dictionary."""
    return sum(tensor.nbytes for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, ShardedTensor):
        yield from (chunk.data for chunk in value.chunks)
    else:
        yield value


def not_finite(content: Mapping[str, Any]) -> str | None:
    """Return the name of an entry of ``state_content`` that has NaN or infinite values in this
    process; None if all are finite."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            if inside := not_finite(value):
                return f"{name}.{inside}"
            continue
        for tensor in _tensors(value):
            if tensor.is_floating_point() and tensor.numel():
                # Only the CPU and CUDA certainly support ``aminmax``, which propagates NaN.
                ends = (tensor if tensor.is_cuda else tensor.cpu()).detach().aminmax()
                if not torch.stack(ends).isfinite().all():
                    return name
    return None


def write_state(
    content: dict[str, Any],
    folder: Path,
    group: dist.ProcessGroup | None = None,
    *,
    no_dist: bool = False,
    per_host: bool = False,
) -> dict[str, Entry]:
    """Write what ``state_content`` returned, without the manifest; return the manifest entries of
    this process's files. All processes must call it, with their process group. With ``no_dist``,
    one process calls it and writes everything that it holds, including replicated tensors. With
    ``per_host``, the first process writes the ``training.*`` entries into ``TRAINING_FILE``, which
    all hosts need. Raises OSError, RuntimeError or DCP's CheckpointException."""
    from_cuda = any(tensor.is_cuda for tensor in _tensors(content))
    storage = FolderWriter(folder, from_cuda=from_cuda, training_apart=per_host)
    if per_host and exchange.rank() > 0:
        content = {name: value for name, value in content.items() if name != TRAINING}
    # torch.save's CRC-32 checksums take as long as everything else it does, and no reader checks
    # them.
    with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
        no_dist = no_dist or not dist.is_initialized()
        dcp.save(content, storage_writer=storage, no_dist=no_dist, process_group=group)
    return storage.sums


def load_state(
    backend: Backend,
    folder: Path,
    *,
    with_optimizer: bool = True,
    use_ema: bool = False,
    is_part: bool = False,
    elsewhere: Elsewhere | None = None,
) -> bool:
    """Load the values of a checkpoint into the backend; all processes must call it. Returns True if
    the checkpoint has an EMA. Raises any exception if it is damaged.

    ``with_optimizer``: also load everything else that the next step depends on. ``use_ema``: load
    the EMA as the weights. ``is_part``: each process has its own ``folder``, written with
    ``no_dist``. ``elsewhere``: the checkpoint's files that are not in ``folder``.
    """
    saved = entries_of(folder)
    has_ema = any(name.startswith(f"{EMA}.") for name in saved)
    state = backend.state(with_optimizer=with_optimizer)
    training: dict[str, torch.Tensor] = {}
    if with_optimizer:
        step = {name: x for name, x in state.step.items() if f"{TRAINING}.{name}" in saved}
        has_gram = any(name.startswith(f"{GRAM}.") for name in saved)
        ema, gram = state.ema if has_ema else None, state.gram if has_gram else None
        state = replace(state, step=step, ema=ema, gram=gram)
        training = {**step, RNG: torch.get_rng_state()}
    wanted = tree(state, training)
    if use_ema:
        wanted[EMA] = wanted.pop(WEIGHTS)
    if is_part:
        wanted = _held(wanted, saved)
    no_dist = is_part or not dist.is_initialized()
    load_into(wanted, folder, no_dist=no_dist, elsewhere=elsewhere)
    if with_optimizer:
        torch.set_rng_state(training[RNG])
    backend.load_state(state)
    return has_ema


def _held(content: Mapping[str, Any], saved: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested dictionary of tensors without those that this process holds no part of.

    Raises UsageError unless the entries ``saved`` contain each chunk of the others: DCP would
    silently leave missing parts unchanged.
    """
    held: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            held[name] = _held(value, saved, f"{prefix}{name}.")
            continue
        here = whole = [((0,) * value.dim(), tuple(value.shape))]
        if isinstance(value, ShardedTensor):
            if not value.chunks:
                continue
            here = [(tuple(chunk.offsets), tuple(chunk.data.shape)) for chunk in value.chunks]
        entry = saved.get(prefix + name)
        there = {(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks} if entry else set()
        if not there.issuperset(here) and not there.issuperset(whole):
            raise UsageError(
                f"--local_ckpt_dir lacks a part of {prefix}{name} that this process holds: empty "
                "it to resume from --ckpt_dir"
            )
        held[name] = value
    return held


def damage_for_all(
    path: Path,
    *,
    verify: bool,
    share: tuple[int, int] | None = None,
    of: Collection[str] | None = None,
) -> str | None:
    """Return what is wrong with a checkpoint's files, None if nothing; the same in all processes.

    With ``verify``, compare the files with the manifest; each process checks its share: by default
    of all files and processes, else of the files ``of``, as a number and a count. Raises UsageError
    in all processes if two of them do not see the same checkpoint. All processes must call it.
    """
    part, parts = share or (exchange.rank(), exchange.count())
    seen = None
    with exchange.raise_on_all_ranks():
        has_manifest = (path / MANIFEST).exists()
        file = path / (MANIFEST if has_manifest else METADATA)
        if file.exists():
            seen = checksum(file)
    hosts = exchange.all_gather_object([seen, socket.gethostname()])
    for number, (other, host) in enumerate(hosts):
        if other != hosts[0][0]:
            raise UsageError(
                f"{exchange.name(number, host)} does not see the checkpoint {path} that the first "
                "process is about to resume: use a folder that all nodes share",
                agreed=True,
            )
    problem = None
    with exchange.raise_on_all_ranks():
        try:
            if verify:
                problem = damage(path, part, parts, of=of)
        except ValueError as error:
            problem = str(error)
    return next((text for text in exchange.all_gather_object(problem) if text is not None), None)
