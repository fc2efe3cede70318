"""Images of any size in sequences of tokens: grids, packing, rows of bytes, what is read."""

import itertools
import math
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.naflex_transforms import patchify_image

from data import fake
from data.batch import PADDING, BatchShard
from data.config import DataConfig
from data.files import DataFolderError
from data.pack import pack as pack_shards
from data.packing import (
    Packing,
    PackLayout,
    PackRequest,
    PackSampler,
    grids,
    pack_images,
    too_large,
)
from data.source import CropRequest, DatasetRequest, open_data
from data.tables import ParquetSplit
from data.transforms import TrainTransform, random_box, seeded
from tests.support.table_files import write_tables
from training.checkpoints.compatible import other_order

pytestmark = pytest.mark.fast

REQUEST = PackRequest((4, 6), 2, 40, 5, 16, False, (1.0, 1.0), 0.0)
DRAWN = replace(REQUEST, side_scale=(0.4, 1.2), drop_rate=0.3)
LAYOUT = PackLayout(3, REQUEST)
SIZES = [(16, 24), (9, 13), (30, 70), (1, 5000), (2, 3), (40, 20), (12, 12)]
"""Height and width of images 0, 7, ..., of 1, 8, ..., and so on."""
TRAIN, VAL = 60, 23


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Images of strange sizes in two classes, no two alike."""
    root, random = tmp_path_factory.mktemp("packing"), np.random.default_rng(0)
    for split, count in (("train", TRAIN), ("val", VAL)):
        for number in range(count):
            path = root / split / f"class{number % 2}" / f"{number:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(256, size=(*SIZES[number % len(SIZES)], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
    return root


def opened(folder, request=REQUEST, augment=True, channels=3, **how):
    how = {"data_dir": str(folder), "batch_size": 4, "num_workers": 0} | how
    return open_data(
        DatasetRequest(DataConfig(**how), channels, (16, 24), 10, 5, augment=augment, pack=request)
    )


def sequences(batches, layout=LAYOUT):
    """(patches, places, segments, images, labels) of each sequence of the batches."""
    for rows, labels in batches:
        yield from zip(*layout.unpack(rows), labels, strict=True)


# -- grids -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        REQUEST,
        replace(REQUEST, resize=True),
        replace(REQUEST, max_patches=255, tokens=300),
        replace(REQUEST, max_patches=1),
        replace(REQUEST, max_patches=999, patch=(16, 16)),
    ],
)
def test_grids_are_the_least_distorted_ones(request_):
    random = np.random.default_rng(1)
    sizes = np.exp(random.uniform(0, math.log(3000), (300, 2))).astype(np.int32)
    sizes = np.concatenate([sizes, SIZES, [(8, 520), (513, 17)]])
    most = min(request_.max_patches, request_.tokens - request_.prefix)
    every = [(r, c) for r in range(1, most + 1) for c in range(1, most // r + 1)]
    scaled_down = 0
    for (height, width), grid in zip(sizes, grids(sizes, request_).tolist(), strict=True):
        high, wide = (side / of for side, of in zip((height, width), request_.patch, strict=True))
        by = math.sqrt(most / (high * wide))
        scaled_down += by < 1
        by = by if request_.resize else min(by, 1)
        ideal = [min(max(side * by, 1), most) for side in (high, wide)]

        def stretches(grid, ideal=ideal):
            """By how much the side that changes more is stretched or shrunk, and the other."""
            by_side = (max(a / b, b / a) for a, b in zip(grid, ideal, strict=True))
            return sorted((round(by, 9) for by in by_side), reverse=True)

        assert grid[0] * grid[1] <= most
        some = every if len(every) < 2000 else every[:: 1 + len(every) // 2000]
        assert stretches(grid) <= min(map(stretches, some))
    assert too_large(sizes, request_) == scaled_down


def test_grids_that_one_expects():
    request = PackRequest((16, 16), 0, 1024, 9, 256, False, (1.0, 1.0), 0.0)
    sizes = [(224, 224), (160, 320), (375, 500), (1, 5000), (5000, 1), (3, 3), (0, 0), (94, 20)]
    expected = [(14, 14), (10, 20), (14, 18), (1, 256), (256, 1), (1, 1), (16, 16), (6, 1)]
    assert grids(np.array(sizes), request).tolist() == [list(grid) for grid in expected]
    halved = grids(np.array(sizes[:3]), request, np.array([0.5, 0.5, 1.1]))
    assert halved.tolist() == [[7, 7], [5, 10], [14, 18]]
    larger = replace(request, resize=True)
    assert grids(np.array([(32, 32), (4000, 4000)]), larger, 0.5).tolist() == [[8, 8], [8, 8]]
    assert grids(np.array([(32, 32), (4000, 4000)]), larger).tolist() == [[16, 16], [16, 16]]


GRIDS = "the grids of patches of the images in train/"
PACKING = "the packing of the images in train/"


@pytest.mark.parametrize(
    ("request_", "before"),
    [
        (REQUEST, {GRIDS: "470157e55d53482e"}),
        (
            DRAWN,  # the grids of scaled images, which a run does not record, have changed too
            {
                PACKING: "40 tokens and at most 5 images a sequence, 2 class and register tokens "
                "an image, sides times 0.4 to 1.2, 0.3 of the patches left out"
            },
        ),
    ],
)
def test_a_run_in_the_grids_of_older_versions_is_not_continued_within_an_epoch(
    folder, request_, before
):
    """What was recorded when the other side did not break ties."""
    data = opened(folder, request_)
    run = SimpleNamespace(values={"buckets": None, "data_source": "folder"})
    saved = SimpleNamespace(
        position=SimpleNamespace(images_in_epoch=4),
        arguments=run.values,
        order=data.order() | before,
    )
    (what,) = before
    assert other_order(saved, run, data).startswith(f"{what} changed from {before[what]} to ")
    saved.position.images_in_epoch = 0
    assert other_order(saved, run, data) is None


def test_a_crop_of_a_line_has_pixels():
    for height, width in ((1, 5000), (5000, 1)):
        for by in (0.2, 5):
            ratio = (by * width / height, by * width / height)
            assert min(random_box((height, width), (0.9, 1.0), ratio)[2:]) >= 1


# -- packing -----------------------------------------------------------------------------


def first_fit_decreasing(tokens, request):
    """The images of each sequence, by a loop."""
    packed = []
    for image in sorted(range(len(tokens)), key=lambda image: -tokens[image]):
        for inside in packed:
            room = request.tokens - sum(tokens[other] for other in inside)
            if tokens[image] <= room and len(inside) < request.images:
                inside.append(image)
                break
        else:
            packed.append([image])
    return {frozenset(inside) for inside in packed}


@pytest.mark.parametrize("images", [1, 4, 255])
@pytest.mark.parametrize("count", [1, 511, 512, 1300])
def test_packing_is_first_fit_decreasing_in_each_window(count, images):
    request = replace(REQUEST, tokens=64, images=images)
    random = np.random.default_rng(count)
    tokens = random.choice([1, 3, 17, 30, 33, 63, 64], count)
    numbers = random.permutation(count) + 1000
    expected = set()
    for first in range(0, count, 512):
        for inside in first_fit_decreasing(tokens[first : first + 512].tolist(), request):
            expected.add(frozenset(int(numbers[first + image]) for image in inside))
    in_order = pack_images(numbers, tokens, request)
    found = [in_order[number] for number in range(len(in_order))]
    assert {frozenset(inside) for inside in found} == expected
    assert sorted(itertools.chain(*found)) == sorted(numbers.tolist())
    place = {number: at for at, number in enumerate(numbers.tolist())}
    places = [[place[number] for number in inside] for inside in found]
    assert places == sorted(places)
    assert all(inside == sorted(inside) for inside in places)

    shuffled = [
        pack_images(numbers, tokens, request, torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    orders = [[packing[number] for number in range(len(packing))] for packing in shuffled]
    assert orders[0] == orders[1]
    assert sorted(map(tuple, orders[2])) == sorted(map(tuple, found))
    assert count == 1 or orders[2] != orders[0]


def test_full_sequences_are_not_the_first():
    tokens = np.random.default_rng(0).integers(1, 64, 512)
    request = replace(REQUEST, tokens=64, images=255)
    packing = pack_images(np.arange(512), tokens, request, torch.Generator().manual_seed(0))
    used = np.array([tokens[packing[number]].sum() for number in range(len(packing))])
    assert used.sum() > 0.95 * 64 * len(used)
    assert (used[: len(used) // 2] < 64).sum() > 1


@pytest.mark.parametrize("epoch_sequences", [9, 10, 13, 3])
def test_epochs_have_the_length_of_the_first(epoch_sequences):
    def pack_epoch(epoch):
        numbers = np.arange(2 * epoch_sequences)
        return Packing(numbers, numbers[::2], np.full(epoch_sequences, 2))

    sampler = PackSampler(pack_epoch, 10, 4, shuffle=True, shard=1, shards=2)
    sampler.set_position(3)
    expected = [place % epoch_sequences for place in (2, 3, 6, 7)]
    assert len(sampler) == 2
    keys = [key for batch in sampler for key in batch]
    assert keys == [(3, 8, 2 * place, 2 * place + 1) for place in expected]


# -- the row of a sequence ---------------------------------------------------------------


def test_unpacked_is_what_was_packed():
    torch.manual_seed(0)
    given = [
        (
            torch.randint(256, (40, 4 * 6 * 3), dtype=torch.uint8),
            np.random.default_rng(number).integers(2**16, size=(40, 4)),
            np.arange(40) * 5,
            (0, 1, 2**24 - 1)[number],
        )
        for number in range(3)
    ]
    rows = torch.stack([LAYOUT.pack(*one) for one in given])
    assert rows.shape == (3, LAYOUT.length) == (3, 40 * (72 + 8 + 1) + 4)
    dtypes = (torch.uint8, torch.int32, torch.int32, torch.float32)
    for found, part, dtype in zip(
        LAYOUT.unpack(rows), zip(*given, strict=True), dtypes, strict=True
    ):
        assert found.dtype == dtype
        assert np.array_equal(found.numpy(), np.stack([np.asarray(one) for one in part]))


def paths(folder, split):
    return sorted((folder / split).glob("*/*.png"))


def check_sequence(sequence, request=REQUEST):
    """The images of a sequence: the label, grid, patches and their numbers of each."""
    patches, places, segments, _, labels = sequence
    images = []
    for image, label in enumerate(labels.tolist()):
        mine = (segments == image + 1).nonzero().flatten()
        if not len(mine):
            assert label == PADDING
            continue
        assert (mine.diff() == 1).all()
        before, after = mine[: request.prefix], mine[request.prefix :]
        assert places[before].tolist() == [[n, 0, 0, 0] for n in range(request.prefix)]
        assert not patches[before].any()
        row, column, rows, columns = places[after].T
        assert rows.unique().numel() == columns.unique().numel() == 1
        numbers = row * columns + column
        assert (numbers.diff() > 0).all()
        assert (row < rows).all()
        assert (column < columns).all()
        images.append((label, (int(rows[0]), int(columns[0])), patches[after], numbers))
    padding = segments == 0
    assert not patches[padding].any()
    assert not places[padding].any()
    return images


@pytest.mark.parametrize("channels", [3, 1])
def test_patches_in_validation_are_timms_of_whole_images(folder, channels):
    data = opened(folder, channels=channels)
    layout = PackLayout(channels, REQUEST)
    batches = list(data.splits["val"].numbered().batches(4, BatchShard()).epoch(0))
    assert [int(images) for *_, images, _ in sequences(batches, layout)] == [
        int(count) for _, labels in batches for count in [(labels >= 0).sum()] for _ in labels
    ]
    seen = []
    for sequence in sequences(batches, layout):
        for number, (rows, columns), patches, places in check_sequence(sequence):
            image = Image.open(paths(folder, "val")[number])
            resized = image.resize((6 * columns, 4 * rows), Image.BICUBIC)
            resized = np.array(resized.convert("L" if channels == 1 else "RGB"))
            resized = torch.from_numpy(resized).view(4 * rows, 6 * columns, channels)
            theirs, where, _ = patchify_image(resized.permute(2, 0, 1), (4, 6))
            assert torch.equal(patches, theirs)
            assert places.tolist() == (where[:, 0] * columns + where[:, 1]).tolist()
            seen.append(number)
    assert sorted(seen) == list(range(VAL))
    assert data.val_length == VAL


def test_patches_in_training_are_those_of_the_augmented_image(folder):
    """Its crop has the image's own shape, its size is that of its grid."""
    how = {"scale": (0.5, 1.0), "ratio": (0.8, 1.25), "hflip": 0.5}
    data = opened(folder, DRAWN, **how).splits["train"]
    found, dropped = {}, 0
    for sequence in sequences(data.numbered().batches(4, BatchShard()).epoch(2)):
        for number, grid, patches, places in check_sequence(sequence):
            height, width = SIZES[int(paths(folder, "train")[number].stem) % len(SIZES)]
            ratio = tuple(r * width / height for r in how["ratio"])
            size = (4 * grid[0], 6 * grid[1])
            config = replace(data.request.config, ratio=ratio)
            image = data._split.open(number, lines=True)
            whole = seeded(TrainTransform(config, size, 3), image, 5, 2, number)
            theirs, _, _ = patchify_image(whole, (4, 6))
            assert torch.equal(patches, theirs[places])
            count = grid[0] * grid[1]
            assert len(places) == max(1, count - round(0.3 * count))
            dropped += int((places > torch.arange(len(places))).any())
            assert grid == tuple(data.grids_of([number], 2)[0])
            found[number] = grid
    assert dropped > 10
    assert len(found) > 0.8 * TRAIN  # without the last short batch
    others = data.grids_of(list(found), 3).tolist()
    assert sum(tuple(b) != a for a, b in zip(found.values(), others, strict=True)) > 10


# -- batches -----------------------------------------------------------------------------


def test_the_same_for_any_number_of_processes_and_after_a_resume(folder):
    data = opened(folder, DRAWN)
    whole = list(data.train_loader(4, BatchShard()).epoch(2))
    assert (
        len(whole) == len(data.train_loader(4, BatchShard())) == data.splits["train"].sequences // 4
    )
    for shards, first, workers in ((2, 0, 0), (4, 1, 0), (1, 2, 2), (2, 1, 1)):
        again = opened(folder, DRAWN, num_workers=workers)
        parts = [
            again.train_loader(4, BatchShard(rank, shards)).epoch(2, first)
            for rank in range(shards)
        ]
        for ours, *theirs in zip(whole[first:], *parts, strict=True):
            for one, part in zip(ours, zip(*theirs, strict=True), strict=True):
                assert torch.equal(one, torch.cat(part))
    empty, labels = next(data.train_loader(4, BatchShard(loads=False)).epoch(2))
    assert empty.shape == (0, LAYOUT.length)
    assert labels.shape == (0, 5)
    there = pickle.loads(pickle.dumps(data.splits["train"]))
    key = (2, 7, 3, 1)
    for one, other in zip(data.splits["train"][key], there[key], strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    other = next(data.train_loader(4, BatchShard()).epoch(3))
    assert not torch.equal(other[0], whole[0][0])


@pytest.mark.parametrize("augment", [True, False])
def test_images_that_are_not_augmented_come_once_in_windows_in_order(folder, augment):
    data = opened(folder, DRAWN, augment=augment)
    split = data.splits["val" if augment else "train"].numbered()
    parts = [list(split.batches(8, BatchShard(rank, 2)).epoch(1)) for rank in range(2)]
    rows, labels = (
        torch.cat([torch.cat(both) for both in zip(*batches, strict=True)])
        for batches in zip(*(zip(*part, strict=True) for part in parts), strict=True)
    )
    present = labels[labels != PADDING]
    assert sorted(present.tolist()) == list(range(len(split)))
    firsts = labels[:, 0][labels[:, 0] != PADDING]
    assert (firsts.diff() > 0).all()
    _, _, segments, images = LAYOUT.unpack(rows)
    assert (segments.amax(1) == (labels != PADDING).sum(1)).all()
    assert images.view(-1, 8)[:, 0].sum() == len(split)
    of_some = torch.cat(
        [labels for _, labels in split.batches_of([5, 2, 9], 2, BatchShard()).epoch(0)]
    )
    assert sorted(of_some[of_some != PADDING].tolist()) == [2, 5, 9]


def test_other_images_take_the_place_of_broken_ones(folder, tmp_path):
    for path in (*paths(folder, "train"), *paths(folder, "val")):
        target = tmp_path / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Cut off: the header still has the size.
        is_broken = int(path.stem) % 7 == 2
        target.write_bytes(path.read_bytes()[:60] if is_broken else path.read_bytes())
    intact, broken = opened(folder), opened(tmp_path)
    for split, epoch in (("train", 1), ("val", 0)):
        loaders = [each.splits[split].batches(4, BatchShard()) for each in (intact, broken)]
        replaced = 0
        for one, other in zip(*(sequences(loader.epoch(epoch)) for loader in loaders), strict=True):
            if split == "train":
                assert torch.equal(one[1], other[1])
                assert torch.equal(one[2], other[2])
            differ = (one[0] != other[0]).any(1)
            images = one[2][differ].unique().tolist()
            replaced += len(images)
            check_sequence(other)
            for image in range(1, 6):
                mine = one[2] == image
                is_same = torch.equal(one[0][mine], other[0][mine])
                if split == "val" and not is_same:
                    assert not other[2][mine].any()
                    assert int(other[4][image - 1]) == PADDING
                elif split == "val":
                    assert one[4][image - 1] == other[4][image - 1]
                    assert torch.equal(one[1][mine], other[1][mine])
        count = sum(int(path.stem) % 7 == 2 for path in paths(folder, split))
        assert count - 2 <= replaced <= count  # training drops the last short batch
        assert loaders[0].bad_images() == []
        assert len(loaders[1].bad_images()) == pytest.approx(replaced, abs=2)


def test_an_image_whose_size_is_unknown(folder, tmp_path):
    for path in (*paths(folder, "train"), *paths(folder, "val")):
        target = tmp_path / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"" if int(path.stem) in (0, 1) else path.read_bytes())
    data = opened(tmp_path)
    assert data.splits["train"].sizes.min(axis=1).tolist().count(0) == 2
    labels = torch.cat([labels for _, labels in data.val_loader(4, BatchShard()).epoch(0)])
    assert (labels != PADDING).sum() == VAL - 2


# -- sources -----------------------------------------------------------------------------


def test_shards_and_tables_have_the_sequences_of_the_folder(digits, tmp_path):
    write_tables(digits, tmp_path)
    pack_shards(str(digits), str(tmp_path / "shards"), 60_000, 1)
    request = PackRequest((4, 4), 1, 20, 4, 6, True, (0.6, 1.0), 0.25)
    expected = opened(digits, request)
    assert "packed into sequences of 20 tokens: " in str(expected)
    assert "all images scaled to 6 patches" in str(expected)
    for source, where in (
        ("webdataset", "shards"),
        ("parquet", "parquet"),
        ("huggingface", "saved"),
    ):
        other = opened(tmp_path / where, request, data_source=source)
        kinds = ("val",) if source == "parquet" else ("train", "val")  # its order is of runs
        for split in kinds:
            batches = [
                one.splits[split].batches(4, BatchShard()).epoch(1) for one in (expected, other)
            ]
            for one, two in itertools.islice(zip(*batches, strict=True), 5):
                assert all(map(torch.equal, one, two)), (source, split)
        packing = other.splits["train"].pack_epoch(1)
        assert sorted(packing.images.tolist()) == list(range(other.train_length))


def test_a_row_group_is_read_once_for_all_sequences_that_are_read_together(
    digits, tmp_path, monkeypatch
):
    write_tables(digits, tmp_path)
    request = PackRequest((4, 4), 1, 20, 4, 4, False, (1.0, 1.0), 0.0)
    split = opened(tmp_path / "parquet", request, data_source="parquet").splits["train"]
    keys, groups = next(iter(split.sampler(32, shuffle=True, seed=5))), []
    read_group = ParquetSplit._read_group
    monkeypatch.setattr(
        ParquetSplit,
        "_read_group",
        lambda self, *group: groups.append(group) or read_group(self, *group),
    )
    alone = [split[key] for key in keys]
    one_by_one, _ = len(groups), groups.clear()
    for one, other in zip(alone, split.__getitems__(keys), strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1:] == other[1:]
    assert len(set(groups)) == len(groups) < one_by_one


@pytest.mark.parametrize("source", ["digits", "mnist"])
def test_digits(source):
    request = PackRequest((4, 4), 0, 60, 30, 49, False, (1.0, 1.0), 0.0)
    data = opened("", request, data_source=source)
    batch = next(data.train_loader(4, BatchShard()).epoch(0))
    for sequence in sequences([batch], PackLayout(3, request)):
        grids_ = [grid for _, grid, *_ in check_sequence(sequence, request)]
        assert grids_ == ([(2, 2)] * 15 if source == "digits" else [(7, 7)])


def test_fake_sequences_are_full(monkeypatch):
    monkeypatch.setitem(fake.LENGTHS, "val", 50)
    request = replace(REQUEST, drop_rate=0.5)
    data = opened("", request, data_source="fake")
    rows, labels = next(data.train_loader(4, BatchShard(1, 2)).epoch(0))
    found = list(sequences([(rows, labels)]))
    assert [len(check_sequence(one)) for one in found] == [4, 4]  # 40 // (2 + 16 / 2)
    assert int(found[0][3]) == 16
    assert not rows[:, : 40 * 72].any()
    parts = [list(data.val_loader(4, BatchShard(rank, 2)).epoch(0)) for rank in range(2)]
    counts = [[len(check_sequence(one)) for one in sequences(part)] for part in parts]
    assert counts == [[2, 2] * 6 + [2, 0], [2, 2] * 6 + [0, 0]]
    assert [int(images) for *_, images, _ in sequences(parts[0])] == [8, 8] * 6 + [2, 2]
    assert len(data.val_loader(4, BatchShard())) == 7


def test_the_order_is_known_by_grids_and_packing(folder):
    facts = [
        opened(folder, request).order()
        for request in (
            REQUEST,
            REQUEST,
            replace(REQUEST, tokens=41),
            replace(REQUEST, patch=(4, 4)),
        )
    ]
    assert facts[0] == facts[1]
    assert len({tuple(map(str, one.values())) for one in facts}) == 3
    of_packing, of_grids = (
        [name for name in facts[0] if facts[0][name] != other[name]] for other in facts[2:]
    )
    assert of_packing == ["the packing of the images in train/"]
    assert of_grids == ["the grids of patches of the images in train/"]


CROPS = CropRequest((8, 8), 2, (0.32, 1.0), (0.05, 0.32), (4, 4), (0.25, 0.5))


@pytest.mark.parametrize(
    ("changed", "how", "told"),
    [
        ({"tokens": 2}, {}, "a sequence of 2 tokens is too short for an image: .* need 3 tokens"),
        ({}, {"batch_size": 500}, r"has \d+ sequences of training images, fewer than one batch"),
        ({}, {"data_source": "mosaics"}, "--data_source mosaics provides arrays"),
        ({}, {"data_source": "volumes"}, "--data_source volumes provides arrays"),
    ],
)
def test_errors(folder, changed, how, told):
    with pytest.raises(DataFolderError, match=told):
        opened(folder, replace(REQUEST, **changed), **how)


def test_no_sequences_of_crops(folder):
    config = DataConfig(data_dir=str(folder))
    request = DatasetRequest(config, 3, (16, 24), 10, 5, crops=CROPS, pack=REQUEST)
    with pytest.raises(DataFolderError, match="cannot be combined with crops"):
        open_data(request)
