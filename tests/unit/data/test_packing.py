"""Images of any size in sequences of tokens: grids, packing, fields, what is read."""

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
from data.batch import PADDING, BatchShard, Field
from data.config import DataConfig
from data.files import DataFolderError
from data.open import open_data
from data.pack import pack as pack_shards
from data.source import DatasetRequest
from data.tables import ParquetSplit
from data.transforms import TrainTransform, random_box, seeded
from features.native_resolution.packing import (
    Packing,
    PackRequest,
    PackSampler,
    SequenceIndex,
    grids,
    pack_images,
    patch_coord_of,
    tokens_of,
    too_large,
)
from features.native_resolution.sequences import SequenceView
from tests.support.loading import check_same, check_same_epochs, concatenated
from tests.support.table_files import write_tables
from training.checkpoints.compatible import other_order

pytestmark = pytest.mark.fast

REQUEST = PackRequest((4, 6), 2, 40, 5, 16, False, (1.0, 1.0), 0.0)
DRAWN = replace(REQUEST, side_scale=(0.4, 1.2), drop_rate=0.3)
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
    view = SequenceView(request)
    return open_data(
        DatasetRequest(DataConfig(**how), channels, (16, 24), 10, 5, augment=augment, view=view)
    )


def sequences(batches):
    """The fields of each sequence of the batches."""
    for batch in batches:
        for number in range(len(batch["segment_ids"])):
            yield {name: values[number] for name, values in batch.items()}


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
    run = SimpleNamespace(
        values={"buckets": None, "data_source": "folder", "balanced_sampling": None}
    )
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
    indices = [at for batch in sampler for at in batch]
    assert indices == [SequenceIndex(3, [2 * place, 2 * place + 1], 8) for place in expected]


@pytest.mark.parametrize(("tokens", "images", "most"), [(40, 5, 2), (54, 5, 3), (540, 5, 5)])
def test_as_many_of_the_largest_images_as_have_room(tokens, images, most):
    """Of 16 patches and 2 tokens before them: whole ones."""
    request = replace(REQUEST, tokens=tokens, images=images)
    assert SequenceView(request).images_per_sample == most
    packing = pack_images(np.arange(20), np.full(20, 18), request)
    assert max(len(packing[number]) for number in range(len(packing))) == most


# -- the fields of a sequence ------------------------------------------------------------


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize(("split", "augment"), [("train", True), ("train", False), ("val", True)])
def test_the_fields_that_are_declared_are_those_of_a_sequence(split, augment, labels, folder):
    for channels in (3, 1):
        view = SequenceView(REQUEST)
        config = DataConfig(data_dir=str(folder), batch_size=4, num_workers=0)
        how = {"labels": labels, "augment": augment, "view": view}
        data = open_data(DatasetRequest(config, channels, (16, 24), 10, 5, **how))
        number, in_order = Field((5,), torch.int64, padding=PADDING), (split, augment) != TRAINING
        expected = {
            "patches": Field((40, 4 * 6 * channels), torch.uint8),
            "patch_coord": Field((40, 4), torch.int32),
            "segment_ids": Field((40,), torch.int32),
            "batch_images": Field((), torch.float32),
        }
        expected |= {"target": number} if labels or in_order else {}
        expected |= {"index": number} if in_order else {}
        loader = data.splits[split].batches(4, BatchShard())
        assert data.splits[split].fields == loader.fields == expected
        shapes = {name: (4, *field.shape) for name, field in expected.items()}
        for batch in loader.epoch(0):
            assert {name: tuple(values.shape) for name, values in batch.items()} == shapes
            assert all(batch[name].dtype == field.dtype for name, field in expected.items())


TRAINING = "train", True


def test_numbers_of_tokens_and_images_have_room(folder):
    """The largest that ``PackRequest`` allows, and as many images as fp32 can count."""
    request = replace(REQUEST, tokens=65_535, images=255)
    patch_coord, segment_ids = tokens_of([patch_coord_of(1, 65_533, 2)], request)
    assert patch_coord.dtype == segment_ids.dtype == np.int32
    assert patch_coord[:3].tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 65_533]]
    assert patch_coord[-1].tolist() == [0, 65_532, 1, 65_533]
    assert segment_ids.min() == segment_ids.max() == 1
    patch_coord, segment_ids = tokens_of([patch_coord_of(2, 3, 1)] * 255, request)
    assert np.array_equal(segment_ids[: 255 * 7], np.arange(255 * 7) // 7 + 1)
    assert not segment_ids[255 * 7 :].any()
    assert not patch_coord[255 * 7 :].any()
    assert np.array_equal(patch_coord[254 * 7 : 255 * 7], patch_coord[:7])
    for count in (0, 1, 2**24 - 1):
        counted = opened(folder).splits["train"][SequenceIndex(0, [1], count)].fields
        assert counted["batch_images"].item() == count


def paths(folder, split):
    return sorted((folder / split).glob("*/*.png"))


def check_sequence(sequence, request=REQUEST):
    """The images of a sequence: the place in ``target``, the grid, the patches and their numbers of
    each."""
    patches, places = sequence["patches"], sequence["patch_coord"]
    segments, images = sequence["segment_ids"], []
    if "index" in sequence:
        assert torch.equal(sequence["index"] == PADDING, sequence["target"] == PADDING)
    for image, label in enumerate(sequence["target"].tolist()):
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
        assert label != PADDING
        images.append((image, (int(rows[0]), int(columns[0])), patches[after], numbers))
    padding = segments == 0
    assert not patches[padding].any()
    assert not places[padding].any()
    return images


@pytest.mark.parametrize("channels", [3, 1])
def test_patches_in_validation_are_timms_of_whole_images(folder, channels):
    data = opened(folder, channels=channels)
    batches = list(data.splits["val"].batches(4, BatchShard()).epoch(0))
    for batch in batches:
        assert batch["batch_images"].tolist() == [(batch["index"] != PADDING).sum()] * 4
    seen = []
    for sequence in sequences(batches):
        for place, (rows, columns), patches, places in check_sequence(sequence):
            number, label = (int(sequence[name][place]) for name in ("index", "target"))
            assert paths(folder, "val")[number].parent.name == f"class{label}"
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
    for sequence in sequences(data.with_index().batches(4, BatchShard()).epoch(2)):
        for place, grid, patches, places in check_sequence(sequence):
            number, label = (int(sequence[name][place]) for name in ("index", "target"))
            assert paths(folder, "train")[number].parent.name == f"class{label}"
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
        len(whole) == len(data.train_loader(4, BatchShard())) == data.splits["train"].samples // 4
    )
    for shards, first, workers in ((2, 0, 0), (4, 1, 0), (1, 2, 2), (2, 1, 1)):
        again = opened(folder, DRAWN, num_workers=workers)
        parts = [
            again.train_loader(4, BatchShard(rank, shards)).epoch(2, first)
            for rank in range(shards)
        ]
        check_same_epochs(map(concatenated, zip(*parts, strict=True)), whole[first:])
    empty = next(data.train_loader(4, BatchShard(loads=False)).epoch(2))
    check_same(empty, {name: values[:0] for name, values in whole[0].items()})
    there = pickle.loads(pickle.dumps(data.splits["train"]))
    one, other = (split[SequenceIndex(2, [3, 1], 7)] for split in (data.splits["train"], there))
    check_same(other.fields, one.fields)
    assert other.bad == one.bad == []
    other = next(data.train_loader(4, BatchShard()).epoch(3))
    for name in ("patches", "patch_coord", "segment_ids"):
        assert not torch.equal(other[name], whole[0][name])


@pytest.mark.parametrize("augment", [True, False])
def test_images_that_are_not_augmented_come_once_in_windows_in_order(folder, augment):
    data = opened(folder, DRAWN, augment=augment)
    split = data.splits["val" if augment else "train"]
    parts = [list(split.batches(8, BatchShard(rank, 2)).epoch(1)) for rank in range(2)]
    found = concatenated([concatenated(both) for both in zip(*parts, strict=True)])
    numbers = found["index"]
    present = numbers[numbers != PADDING]
    assert sorted(present.tolist()) == list(range(len(split)))
    firsts = numbers[:, 0][numbers[:, 0] != PADDING]
    assert (firsts.diff() > 0).all()
    assert (found["segment_ids"].amax(1) == (numbers != PADDING).sum(1)).all()
    assert found["batch_images"].view(-1, 8)[:, 0].sum() == len(split)
    some = concatenated([*split.batches_of([5, 2, 9], 2, BatchShard()).epoch(0)])["index"]
    assert sorted(some[some != PADDING].tolist()) == [2, 5, 9]


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
                assert torch.equal(one["patch_coord"], other["patch_coord"])
                assert torch.equal(one["segment_ids"], other["segment_ids"])
            assert one["batch_images"] == other["batch_images"]  # broken images are counted
            differ = (one["patches"] != other["patches"]).any(1)
            images = one["segment_ids"][differ].unique().tolist()
            replaced += len(images)
            check_sequence(other)
            for image in range(1, 6):
                mine = one["segment_ids"] == image
                is_same = torch.equal(one["patches"][mine], other["patches"][mine])
                if split == "val" and not is_same:
                    assert not other["segment_ids"][mine].any()
                    assert other["target"][image - 1] == other["index"][image - 1] == PADDING
                elif split == "val":
                    for name in ("target", "index"):
                        assert one[name][image - 1] == other[name][image - 1]
                    assert torch.equal(one["patch_coord"][mine], other["patch_coord"][mine])
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
    found = concatenated([*data.val_loader(4, BatchShard()).epoch(0)])
    assert (found["target"] != PADDING).sum() == VAL - 2
    known = [number for number in range(VAL) if number not in (0, len(range(0, VAL, 2)))]
    assert sorted(found["index"][found["index"] != PADDING].tolist()) == known


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
            check_same_epochs(*(itertools.islice(each, 5) for each in batches))
        packing = other.splits["train"].pack_epoch(1)
        assert sorted(packing.images.tolist()) == list(range(other.train_length))


def test_a_row_group_is_read_once_for_all_sequences_that_are_read_together(
    digits, tmp_path, monkeypatch
):
    write_tables(digits, tmp_path)
    request = PackRequest((4, 4), 1, 20, 4, 4, False, (1.0, 1.0), 0.0)
    split = opened(tmp_path / "parquet", request, data_source="parquet").splits["train"]
    indices, groups = next(iter(split.sampler(32, shuffle=True, seed=5))), []
    read_group = ParquetSplit._read_group
    monkeypatch.setattr(
        ParquetSplit,
        "_read_group",
        lambda self, *group: groups.append(group) or read_group(self, *group),
    )
    alone = [split[at] for at in indices]
    one_by_one, _ = len(groups), groups.clear()
    for one, other in zip(alone, split.__getitems__(indices), strict=True):
        check_same(other.fields, one.fields)
        assert other.bad == one.bad
    assert len(set(groups)) == len(groups) < one_by_one


@pytest.mark.parametrize("source", ["digits", "mnist"])
def test_digits(source):
    request = PackRequest((4, 4), 0, 60, 30, 49, False, (1.0, 1.0), 0.0)
    data = opened("", request, data_source=source)
    for split in data.splits.values():
        split.check_first_sample()
    batch = next(data.train_loader(4, BatchShard()).epoch(0))
    for sequence in sequences([batch]):
        grids_ = [grid for _, grid, *_ in check_sequence(sequence, request)]
        assert grids_ == ([(2, 2)] * 15 if source == "digits" else [(7, 7)])


def test_fake_sequences_are_full(monkeypatch):
    monkeypatch.setitem(fake.LENGTHS, "val", 50)
    request = replace(REQUEST, drop_rate=0.5)
    data = opened("", request, data_source="fake")
    data.splits["train"].check_first_sample()
    batch = next(data.train_loader(4, BatchShard(1, 2)).epoch(0))
    assert [len(check_sequence(one)) for one in sequences([batch])] == [4, 4]  # 40 // (2 + 16 / 2)
    assert batch["batch_images"].tolist() == [16, 16]
    assert not batch["patches"].any()
    assert batch.keys() == data.splits["train"].fields.keys()
    parts = [list(data.val_loader(4, BatchShard(rank, 2)).epoch(0)) for rank in range(2)]
    counts = [[len(check_sequence(one)) for one in sequences(part)] for part in parts]
    assert counts == [[2, 2] * 6 + [2, 0], [2, 2] * 6 + [0, 0]]
    assert [int(one["batch_images"]) for one in sequences(parts[0])] == [8, 8] * 6 + [2, 2]
    joined = concatenated([concatenated(both) for both in zip(*parts, strict=True)])
    assert joined["index"][joined["index"] != PADDING].tolist() == [*range(50)]
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
