"""Shows tensors that are spread over devices to PyTorch's distributed checkpoint (DCP)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass
class Chunk:
    """A rectangular piece of a global tensor: where it starts, and its values on the CPU."""

    offsets: tuple[int, ...]
    data: torch.Tensor


class ShardedTensor(torch.Tensor):
    """Holds the chunks of one global tensor that this process has.

    Implements the three methods by which DCP's default planners save and load any sharded tensor. A
    checkpoint therefore knows global names and shapes only, and any other division of the same
    tensor can read it. It has the global tensor's size but no storage of its own: it cannot be
    computed with.
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
        return [
            ChunkStorageMetadata(torch.Size(chunk.offsets), chunk.data.size())
            for chunk in self.chunks
        ]

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
    """Divide the row-major range [start, end) of a tensor into rectangles.

    FSDP's flat shards are such ranges. Yields (offsets, sizes, flat start) of at
    most 2 * len(shape) - 1 boxes whose elements are, in order, those of the range.
    """
    if start >= end:
        return
    if len(shape) <= 1:
        yield tuple(start for _ in shape), tuple(end - start for _ in shape), start
        return
    row = 1
    for size in shape[1:]:
        row *= size
    first_full, last_full = -(-start // row), end // row
    if first_full > last_full:  # inside one row
        yield from _in_row(shape, last_full, row, start, end)
        return
    yield from _in_row(shape, first_full - 1, row, start, first_full * row)
    if last_full > first_full:
        zeros = (0,) * (len(shape) - 1)
        yield (first_full, *zeros), (last_full - first_full, *shape[1:]), first_full * row
    yield from _in_row(shape, last_full, row, last_full * row, end)


def _in_row(shape: Sequence[int], index: int, row: int, start: int, end: int) -> Iterator:
    base = index * row
    for offsets, sizes, flat in flat_range_boxes(shape[1:], start - base, end - base):
        yield (index, *offsets), (1, *sizes), base + flat
