"""Shards of equal size: those of torch.chunk, as FSDP2 has them, padded."""

import pytest
import torch

from torch_fsdp.simple_fsdp import Layout


@pytest.mark.parametrize(
    ("shape", "dim"), [((10, 3), 0), ((8,), 0), ((2, 5), 0), ((1, 6, 4), 1), ((7, 1, 2), 0)]
)
@pytest.mark.parametrize("shards", [1, 3, 4])
def test_shards(shape, dim, shards):
    layout = Layout(torch.Size(shape), dim, shards, "group", torch.float32, torch.float32)
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
