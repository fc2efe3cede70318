"""A view of a user's own: its fields are read, shared and padded as those of whole images."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from data import fake
from data.batch import PADDING, BatchShard, Field
from data.config import DataConfig
from data.files import DataFolderError
from data.open import open_data
from data.source import DatasetRequest, View
from tests.support.loading import check_same, check_same_epochs, concatenated
from tests.support.own_view import NO_DETAIL, DetailAndOverview, HalvedLater, of_plain

pytestmark = pytest.mark.fast

OWN = DetailAndOverview()
SIZE = (12, 16)
TRAIN, VAL, BATCH = 22, 13, 4
BROKEN = {"train": (3, 8), "val": (6,)}
"""The places of unreadable images in each split."""
DETAIL = Field((*SIZE, 3), torch.float32, rows=0, padding=NO_DETAIL)
OVERVIEW = Field((3, 3), torch.bool, padding=1)
NUMBER = Field((), torch.int64, padding=PADDING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of two classes, each of another brightness, some of them broken."""
    root, random = tmp_path_factory.mktemp("own_view"), np.random.default_rng(0)
    for split, count in (("train", TRAIN), ("val", VAL)):
        for number in range(count):
            path = root / split / f"class{2 * number // count}" / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(100, size=(20, 30, 3)) + random.integers(156, size=3)
            Image.fromarray(pixels.astype(np.uint8)).save(path)
            if number in BROKEN[split]:
                path.write_bytes(path.read_bytes()[:60])
    return root


def opened(top, view=OWN, source="folder", augment=True, labels=True, **flags):
    values = {"data_dir": str(top), "data_source": source, "batch_size": BATCH, "num_workers": 0}
    config = DataConfig(**values | flags)
    how = {"augment": augment, "labels": labels, "view": view}
    return open_data(DatasetRequest(config, 3, SIZE, 10, 3, **how))


def first(loader, epoch=1, count=8):
    return list(itertools.islice(loader.epoch(epoch), count))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("source", ["folder", "digits"])
def test_its_fields_are_read_as_whole_images_are(source, workers, folder):
    """By loader processes and without them, from the same images, with the same random draws."""
    own = opened(folder, source=source, num_workers=workers)
    plain = opened(folder, View(), source)
    for split in ("train", "val"):
        loaders = [each.splits[split].batches(BATCH, BatchShard()) for each in (own, plain)]
        declared = {"detail": DETAIL, "overview": OVERVIEW, "target": NUMBER}
        declared |= {"index": NUMBER} if split == "val" else {}
        assert own.splits[split].fields == loaders[0].fields == declared
        found, expected = map(first, loaders)
        check_same_epochs(found, map(of_plain, expected))
        for batch in found:
            for name, field in declared.items():
                assert tuple(batch[name].shape) == (BATCH, *field.shape)
                assert batch[name].dtype == field.dtype
        assert 0 < concatenated(found)["overview"].float().mean() < 1
        told, plainly = (sorted(loader.bad_images()) for loader in loaders)
        assert told == plainly
        assert bool(told) == (source == "folder")


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_and_padding(workers, folder):
    data = opened(folder, num_workers=workers)
    train, val = data.train_loader(BATCH, BatchShard()), data.val_loader(BATCH, BatchShard())
    whole = concatenated(first(train))
    assert (whole["detail"] >= 0).all()
    assert (whole["target"] != PADDING).all()
    numbered = data.splits["train"].with_index().batches(BATCH, BatchShard())
    with_numbers = concatenated(first(numbered))
    numbers = with_numbers.pop("index").tolist()
    check_same(with_numbers, whole)
    assert not {*numbers} & {*BROKEN["train"]}
    assert [int(2 * number >= TRAIN) for number in numbers] == whole["target"].tolist()
    shuffled = data.splits["train"].sampler(BATCH, shuffle=True, seed=3)
    shuffled.set_position(1)
    wanted = [at.index for batch in shuffled for at in batch]
    at_broken = [place for place, number in enumerate(wanted) if number in BROKEN["train"]]
    assert at_broken
    assert [place for place in range(20) if numbers[place] != wanted[place]] == at_broken
    names = {f"{folder}/train/class0/{number:02}.png" for number in BROKEN["train"]}
    assert {name for name, *_ in train.bad_images()} == names

    whole = concatenated(first(val))
    is_padding = [number in BROKEN["val"] or number >= VAL for number in range(16)]
    assert whole["index"].tolist() == [
        PADDING if missing else number for number, missing in enumerate(is_padding)
    ]
    for name, value in (("detail", NO_DETAIL), ("overview", True), ("target", PADDING)):
        assert [bool((sample == value).all()) for sample in whole[name]] == is_padding
    assert [name for name, *_ in val.bad_images()] == [f"{folder}/val/class0/06.png"]


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("workers", [0, 1])
def test_rows_are_parts_of_the_field_that_has_rows(workers, split, folder):
    whole = opened(folder).splits[split]
    cuts = [range(0, 5), range(5, 6), range(6, 12)]
    for rank in range(2):
        expected = first(whole.batches(BATCH, BatchShard(rank, 2)))
        split_here = opened(folder, num_workers=workers).splits[split]
        loaders = [split_here.batches(BATCH, BatchShard(rank, 2, rows)) for rows in cuts]
        for rows, loader in zip(cuts, loaders, strict=True):
            assert loader.fields == whole.fields | {
                "detail": replace(DETAIL, shape=(len(rows), 16, 3))
            }
        found = [first(loader) for loader in loaders]
        for number, batch in enumerate(expected):
            parts = [each[number] for each in found]
            detail = torch.cat([part["detail"] for part in parts], dim=1)
            for part in parts:
                check_same(part | {"detail": detail}, batch)
    assert whole.fields["detail"] == DETAIL  # not changed by its loaders


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_same_for_any_number_of_processes_and_after_a_resume(split, folder):
    expected = first(opened(folder).splits[split].batches(BATCH, BatchShard()), epoch=2)
    assert len(expected) > 3
    for shards, start, workers in ((2, 0, 0), (4, 1, 0), (1, 3, 2), (2, 2, 1)):
        data = opened(folder, num_workers=workers).splits[split]
        parts = [
            data.batches(BATCH, BatchShard(rank, shards)).epoch(2, start) for rank in range(shards)
        ]
        check_same_epochs(map(concatenated, zip(*parts, strict=True)), expected[start:])
    nothing = next(data.batches(BATCH, BatchShard(1, 2, range(4), loads=False)).epoch(2))
    empty = {name: values[:0] for name, values in expected[0].items()}
    check_same(nothing, empty | {"detail": empty["detail"][:, :4]})
    other = first(data.batches(BATCH, BatchShard()), epoch=3)
    assert torch.equal(other[0]["detail"], expected[0]["detail"]) == (split == "val")


def test_some_images_and_images_without_augmentation(folder):
    split = opened(folder, augment=False, labels=False).splits["train"]
    assert split.fields == {
        "detail": DETAIL,
        "overview": OVERVIEW,
        "target": NUMBER,
        "index": NUMBER,
    }
    whole = concatenated(first(split.batches(BATCH, BatchShard())))
    chosen = [10, 3, 0, 21, 5]
    parts = [[*split.batches_of(chosen, BATCH, BatchShard(rank, 2)).epoch(0)] for rank in range(2)]
    found = concatenated([concatenated(both) for both in zip(*parts, strict=True)])
    check_same(
        {name: values[:5] for name, values in found.items()},
        {name: values[chosen] for name, values in whole.items()},
    )
    assert found["index"].tolist() == [10, PADDING, 0, 21, 5, *[PADDING] * 3]
    training = opened(folder, labels=False).splits["train"]
    assert training.fields == {"detail": DETAIL, "overview": OVERVIEW}
    assert next(training.batches(BATCH, BatchShard()).epoch(0)).keys() == training.fields.keys()


def test_several_sizes_over_a_training(folder):
    steps, whole = 9, []
    for epoch in range(2):
        loader = opened(folder, HalvedLater()).train_loader(BATCH, BatchShard(), steps)
        whole += loader.epoch(epoch)
        workers = opened(folder, HalvedLater(), num_workers=1)
        parts = [
            workers.train_loader(BATCH, BatchShard(rank, 2), steps).epoch(epoch, 2)
            for rank in range(2)
        ]
        check_same_epochs(map(concatenated, zip(*parts, strict=True)), whole[5 * epoch + 2 :])
    sizes = [tuple(batch["detail"].shape[1:]) for batch in whole]
    assert sizes == [(12, 16, 3)] * 5 + [(6, 8, 3)] * 5
    plain = opened(folder).train_loader(BATCH, BatchShard())
    check_same_epochs(whole[:5], plain.epoch(0))
    val = opened(folder, HalvedLater()).val_loader(BATCH, BatchShard())
    assert {tuple(batch["detail"].shape[1:]) for batch in val.epoch(0)} == {(12, 16, 3)}


def test_fake_data_has_its_fields(monkeypatch):
    monkeypatch.setitem(fake.LENGTHS, "val", 7)
    data = opened("", source="fake")
    data.splits["train"].check_first_sample()
    train = next(data.train_loader(BATCH, BatchShard(1, 2, range(2, 12))).epoch(0))
    assert {name: tuple(values.shape) for name, values in train.items()} == {
        "detail": (2, 10, 16, 3),
        "overview": (2, 3, 3),
        "target": (2,),
    }
    parts = [[*data.val_loader(BATCH, BatchShard(rank, 2)).epoch(0)] for rank in range(2)]
    found = concatenated([concatenated(both) for both in zip(*parts, strict=True)])
    assert found["index"].tolist() == [*range(7), PADDING]
    for name, field in data.splits["val"].fields.items():
        assert (found[name].dtype, tuple(found[name].shape)) == (field.dtype, (8, *field.shape))
        assert (found[name][7] == field.padding).all()
        assert name == "index" or not found[name][:7].any()


def test_its_check_comes_before_anything_is_read():
    with pytest.raises(DataFolderError, match="only of photographs"):
        opened("no such folder", DetailAndOverview("only of photographs"))
