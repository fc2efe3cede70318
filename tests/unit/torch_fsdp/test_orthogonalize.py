"""Slots for matrices that processes orthogonalize by one program."""

import pytest

from torch_fsdp.orthogonalize import assigned

LAST = [(5120, 588), (1000, 5120)]


def of_blocks(count, width):
    """Those of blocks: queries, keys and values; projection; both of the MLP."""
    return count * [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]


def test_10b_on_128_devices():
    """A slot of the largest size in each device is enough for all of its blocks."""
    matrices = [*LAST, *of_blocks(32, 5120)]
    blocks, rest = assigned(matrices, 128)
    assert (blocks.long, blocks.short, blocks.each) == (20480, 5120, 1)
    assert sorted(blocks.members) == [*range(2, 130)]
    # Of the short sides, that of the head is the longer one: 1,000, in rows of 128 devices.
    assert (rest.long, rest.short, rest.each) == (5120, 1024, 1)
    assert sorted(rest.members) == [0, 1]


def test_as_many_as_devices_are_not_mixed():
    """24 blocks on 8 devices: three slots of each size, and no matrix is padded."""
    found = assigned(of_blocks(24, 1024), 8)
    sizes = {(4096, 1024, True), (4096, 1024, False), (3072, 1024, True), (1024, 1024, True)}
    assert {(slots.long, slots.short, slots.tall[0]) for slots in found} == sizes
    for slots in found:
        assert slots.each == 3
        assert len(slots.members) == 24
        assert len({*slots.tall}) == 1


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 16, 64])
def test_every_matrix_has_one_slot(processes):
    matrices = [*LAST, *of_blocks(6, 48), (10, 48), (48, 10), (7, 7)]
    found = assigned(matrices, processes)
    assert sorted(i for slots in found for i in slots.members) == [*range(len(matrices))]
    for slots in found:
        assert (slots.each - 1) * processes < len(slots.members) <= slots.each * processes
        for i, tall in zip(slots.members, slots.tall, strict=True):
            rows, columns = matrices[i]
            assert tall == (rows >= columns)
            rows = -(-rows // processes) * processes
            most = (slots.long, slots.short) if tall else (slots.short, slots.long)
            assert most[0] % processes == 0
            assert rows <= most[0]
            assert columns <= most[1]
