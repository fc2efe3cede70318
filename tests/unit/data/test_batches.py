"""Batches: fields of any shape and dtype, in parts, in shares and micro-batches, and on their way
from loader processes."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import Dataset, default_collate

from data.batch import (
    PADDING,
    BatchShard,
    Field,
    Fields,
    Sample,
    SampleIndex,
    collate,
    joined,
    micro_batches,
)
from data.loader import DatasetLoader, GlobalBatchSampler
from tests.support.loading import check_same, check_same_epochs, concatenated

pytestmark = pytest.mark.fast

FIELDS = {
    "empty_first": Field((0,), torch.float32),
    "flag": Field((), torch.bool),
    "mask": Field((13,), torch.bool),
    "image": Field((3, 5, 7), torch.uint8, rows=1),
    "number": Field((), torch.int64, padding=PADDING),
    "values": Field((2, 3), torch.float32, rows=0, padding=-2),
    "empty": Field((2, 0, 3), torch.int64, rows=0),
    "share": Field((), torch.float64),
    "coordinates": Field((7, 4), torch.int32),
    "brain_float": Field((3,), torch.bfloat16),
    "wave": Field((2,), torch.complex64),
    "empty_last": Field((4, 0), torch.bool),
}
"""Of every kind. Some have an odd number of bytes, so that those after them are not aligned."""


@dataclass(frozen=True)
class Drawn(Dataset):
    """Random values of these fields for each index."""

    fields: Fields

    def __len__(self) -> int:
        return 700

    def __getitem__(self, at: SampleIndex) -> Sample:
        generator = torch.Generator().manual_seed(1000 * at.epoch + at.index)
        sample = {}
        for name, field in self.fields.items():
            if field.dtype.is_floating_point or field.dtype.is_complex:
                drawn = torch.randn(field.shape, generator=generator, dtype=field.dtype)
            else:
                high = 2 if field.dtype == torch.bool else torch.iinfo(field.dtype).max
                drawn = torch.randint(high, field.shape, generator=generator).to(field.dtype)
            sample[name] = drawn
        return Sample(sample, [])


def samples(count, fields=FIELDS):
    return [Drawn(fields)[SampleIndex(1, number)].fields for number in range(count)]


# -- from loader processes -------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "share", "workers"),
    [
        ([*FIELDS], 8, 1),
        ([*FIELDS], 150, 2),  # in parts of several processes, of which none is a batch
        (["empty", "flag"], 3, 1),
        (["flag", "empty"], 3, 1),
        (["empty"], 3, 1),
        (["number"], 1, 1),
    ],
)
def test_fields_arrive_as_they_are_read(names, share, workers):
    fields = {name: FIELDS[name] for name in names}
    found, expected = (
        DatasetLoader(
            Drawn(fields), GlobalBatchSampler(700, 2 * share, shuffle=True, shards=2), number
        )
        for number in (workers, 0)
    )
    assert found.fields == fields
    first = max(len(found) - 3, 0)
    count = len(found) - first
    ours, theirs = (list(loader.epoch(3, first)) for loader in (found, expected))
    assert len(ours) == count > 0
    check_same_epochs(ours, theirs)
    for batch in ours:
        assert [*batch] == names
        for name, field in fields.items():
            values = batch[name]
            assert (tuple(values.shape), values.dtype) == ((share, *field.shape), field.dtype)
            assert values.data_ptr() % 64 == 0  # as of PyTorch's own
    first, *others = ours
    for name in names:  # each can be written to, and none shares memory with another
        first.pop(name).zero_()
        check_same(first, {name: theirs[0][name] for name in first})
    check_same_epochs(others, theirs[1:])


# -- parts of a batch ------------------------------------------------------------------


def test_samples_are_collated_as_by_pytorch():
    check_same(collate(samples(5)), default_collate(samples(5)))


@pytest.mark.parametrize("cuts", [(7,), (1, 6), (2, 3, 2)])
def test_parts_are_joined_in_order(cuts):
    ends = [sum(cuts[: number + 1]) for number in range(len(cuts))]
    parts = [collate(samples(7)[end - count : end]) for count, end in zip(cuts, ends, strict=True)]
    check_same(joined(parts), collate(samples(7)))


@pytest.mark.parametrize(("shards", "count"), [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2)])
def test_a_micro_batch_has_samples_of_each_shard(shards, count):
    """As if each of the shards were divided on its own."""
    each = 2
    whole = collate(samples(shards * count * each))
    shares = [
        {
            name: values[number * count * each : (number + 1) * count * each]
            for name, values in whole.items()
        }
        for number in range(shards)
    ]
    found = micro_batches(whole, shards, count)
    assert len(found) == count
    for number, batch in enumerate(found):
        part = slice(number * each, (number + 1) * each)
        parts = [{name: values[part] for name, values in share.items()} for share in shares]
        check_same(batch, concatenated(parts))


# -- what a process loads --------------------------------------------------------------


def test_padding():
    for field in FIELDS.values():
        values = field.full()
        assert (tuple(values.shape), values.dtype) == (field.shape, field.dtype)
        assert (values == field.padding).all()


@pytest.mark.parametrize(
    ("shard", "count", "rows"),
    [
        (BatchShard(), 12, None),
        (BatchShard(2, 3), 4, None),
        (BatchShard(1, 2, range(1, 2)), 6, 1),
        (BatchShard(1, 2, range(0, 2), loads=False), 0, 2),
        (BatchShard(loads=False), 0, None),
    ],
)
def test_the_shapes_of_a_share(shard, count, rows):
    for field in FIELDS.values():
        shape = list(field.shape)
        if field.rows is not None and rows is not None:
            shape[field.rows] = rows
        assert shard.shape_of(12, field) == (count, *shape)
    if not shard.loads:
        empty = shard.empty(12, FIELDS)
        assert list(empty) == list(FIELDS)
        for name, field in FIELDS.items():
            assert tuple(empty[name].shape) == shard.shape_of(12, field)
            assert empty[name].dtype == field.dtype
            assert math.prod(empty[name].shape) == 0
