"""Shards of equal size: those of torch.chunk, as FSDP2 has them, padded; and parts of parameters by
tensor parallelism, and where pieces of them are in the whole."""

import pytest
import torch

from torch_fsdp.devices import Cpu
from torch_fsdp.shards import Layout
from torch_fsdp.tensor_parallel import Part
from training.checkpoints.state import Chunk


@pytest.mark.parametrize(
    ("shape", "dim"), [((10, 3), 0), ((8,), 0), ((2, 5), 0), ((1, 6, 4), 1), ((7, 1, 2), 0)]
)
@pytest.mark.parametrize("shards", [1, 3, 4])
def test_shards(shape, dim, shards):
    dtypes = torch.float32, torch.float32
    layout = Layout(torch.Size(shape), dim, shards, "group", *dtypes, shards, Cpu())
    whole = torch.randn(shape)
    chunks = list(whole.chunk(shards, dim=dim))
    assert len({layout.shard(whole, index).shape for index in range(shards)}) == 1
    for index in range(shards):
        start, size = layout.range(index)
        shard = layout.shard(whole, index)
        expected = chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)
        assert shard.narrow(dim, 0, size).equal(expected)
        assert not shard.narrow(dim, size, layout.chunk - size).any()
        if size:
            assert whole.narrow(dim, start, size).equal(expected)


@pytest.mark.parametrize(
    ("shape", "dim", "packed"), [((24, 5), 0, 3), ((24,), 0, 3), ((8, 5), 0, 2), ((5, 8), 1, 1)]
)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts(shape, dim, packed, count):
    """Each has the same rows of all that is packed, and pieces of any size fill the whole."""
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    found = torch.full(shape, float("nan"))
    for index in range(count):
        part = Part(whole.shape, dim, packed, index, count)
        values = part.of(whole)
        assert values.shape == part.shape
        pieces = [each.chunk(count, dim)[index] for each in whole.chunk(packed, dim)]
        assert values.equal(torch.cat(pieces, dim))
        for start in range(0, values.shape[0], 3):
            offsets = (start, *(0 for _ in shape[1:]))
            for piece in part.in_whole(Chunk(offsets, values[start : start + 3])):
                place = tuple(
                    slice(first, first + size)
                    for first, size in zip(piece.offsets, piece.data.shape, strict=True)
                )
                assert found[place].isnan().all()
                found[place] = piece.data
    assert found.equal(whole)
