"""Volumes and images in files of arrays: cut, flipped and divided as NumPy does it."""

import itertools
import os
import struct

import nibabel
import numpy as np
import pytest
import tifffile
import torch

from data.batch import BatchShard
from data.files import DataFolderError
from data.open import open_data
from data.source import DatasetRequest
from tests.support.loading import arguments, check_same, concatenated

SIZE = (8, 12, 16)
LARGER = (11, 14, 21)


def volume(number, shape=LARGER, dtype=np.uint16):
    return np.random.default_rng(number).integers(0, 1000, shape).astype(dtype)


def write(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".npy"):
        np.save(path, array)
    elif path.name.endswith(".npz"):
        np.savez_compressed(path, array)
    elif path.name.endswith((".tif", ".tiff")):
        tifffile.imwrite(path, array)
    else:
        nibabel.Nifti1Image(np.ascontiguousarray(array.T), np.eye(4)).to_filename(path)


FORMATS = (".npy", ".npz", ".nii", ".nii.gz")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Two classes of volumes in all formats, 12 for training and 5 for validation."""
    top = tmp_path_factory.mktemp("volumes")
    for number in range(17):
        name = f"{'train' if number < 12 else 'val'}/{'ab'[number % 2]}/{number:02}"
        write(top / f"{name}{FORMATS[number % 4]}", volume(number))
    return top


def number_of(path):
    return int(os.path.basename(path).partition(".")[0])


def opened(top, size=SIZE, channels=1, seed=3, **changes):
    plain = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "batch_size": 4, "data_source": "volumes"}
    return open_data(DatasetRequest(arguments(top, **plain | changes), channels, size, 10, seed))


def all_of(loader, epoch=0):
    return concatenated([*loader.epoch(epoch)])


def cuts(array, size=SIZE):
    """Every part of this size that an array has, as (is flipped, part), from 0 to 1."""
    array = array / np.iinfo(array.dtype).max
    places = [range(there - here + 1) for there, here in zip(array.shape, size, strict=True)]
    for place in itertools.product(*places):
        part = array[tuple(slice(at, at + n) for at, n in zip(place, size, strict=True))]
        yield False, part
        yield True, part[..., ::-1]


def test_validation_volumes_are_the_middles(tree):
    source = opened(tree)
    assert (source.train_length, source.val_length, source.classes) == (12, 5, ["a", "b"])
    assert source.reads_rows
    found = all_of(source.val_loader(4, BatchShard()))
    paths = sorted((tree / "val").glob("*/*"))
    assert found["target"].tolist() == ["ab".index(path.parent.name) for path in paths] + [-1] * 3
    assert found["index"].tolist() == [*range(5), *[-1] * 3]
    for image, path in zip(found["image"], paths, strict=False):
        middle = volume(number_of(path))[1:9, 1:13, 2:18] / 65535
        np.testing.assert_allclose(image[0], middle, rtol=1e-6)
    assert not found["image"][5:].any()


@pytest.mark.parametrize("hflip", [0.5, 1.0])
def test_training_volumes_are_cut_anywhere(tree, hflip):
    source = opened(tree, hflip=hflip)
    flips, places = [], set()
    known = [np.stack([part for _, part in cuts(volume(n))]).astype("f") for n in range(12)]
    for epoch in range(3):
        images = all_of(source.train_loader(4, BatchShard()), epoch)["image"]
        for image in images[:, 0].numpy():
            found = [
                (n, *np.flatnonzero(np.isclose(k, image).all((1, 2, 3))))
                for n, k in enumerate(known)
            ]
            ((_, place),) = [each for each in found if len(each) == 2]
            flips.append(place % 2)
            places.add(place // 2)
    assert np.mean(flips) == hflip if hflip != 0.5 else 0.2 < np.mean(flips) < 0.8
    assert len(places) > 20


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_are_parts_of_the_same_volumes(tree, num_workers):
    source = opened(tree, num_workers=num_workers)
    rows = [range(0, 3), range(3, 4), range(4, 8)]
    for load in (source.train_loader, source.val_loader):
        whole = all_of(load(4, BatchShard()), 1)
        parts = [all_of(load(4, BatchShard(rows=each)), 1) for each in rows]
        images = torch.cat([part["image"] for part in parts], dim=2)
        for part in parts:  # the other fields have no rows
            check_same(part | {"image": images}, whole)


def test_only_the_slab_is_read(tree, monkeypatch):
    from data.volumes import ArrayFile

    asked, plain = [], ArrayFile.read

    def noted(self, window):
        asked.append([each.stop - each.start for each in window])
        return plain(self, window)

    monkeypatch.setattr(ArrayFile, "read", noted)
    all_of(opened(tree).train_loader(4, BatchShard(rows=range(2, 4))))
    assert asked == [[2, 12, 16]] * 12


@pytest.mark.parametrize(
    ("shape", "axis"), [((2, *LARGER), 0), ((*LARGER, 2), 3), ((2, 11, 14, 2), 0)]
)
def test_channels_first_or_last(tmp_path, shape, axis):
    for split in ("train", "val"):
        write(tmp_path / split / "a" / "0.npy", volume(0, shape, np.float32))
    size = (8, 12, 2) if shape[-1] == 2 and axis == 0 else SIZE
    source = opened(tmp_path, size, 2, mean=(0.1, 0.2, 0.6), std=(0.2, 0.3, 1.0), batch_size=1)
    (image,) = next(source.val_loader(1, BatchShard()).epoch(0))["image"]
    array = np.moveaxis(volume(0, shape, np.float32), axis, 0)
    starts = [(there - here) // 2 for there, here in zip(array.shape[1:], size, strict=True)]
    middle = array[:, *(slice(at, at + n) for at, n in zip(starts, size, strict=True))]
    np.testing.assert_allclose(image, (middle - 0.3) / 0.5, rtol=1e-5)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".tif", ".TIFF"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images(tmp_path, suffix, channels):
    shape = (20, 30) if channels == 1 else (20, 30, 3)
    array = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    for split in ("train", "val"):
        path = tmp_path / split / "a" / f"0{suffix.lower()}"
        write(path, array)
        path.rename(path.with_suffix(suffix))
    colours = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    source = opened(tmp_path, (16, 24), channels, batch_size=1, **colours)
    (image,) = next(source.val_loader(1, BatchShard(rows=range(4, 16))).epoch(0))["image"]
    middle = array.reshape(20, 30, channels)[6:18, 3:27].transpose(2, 0, 1) / 255
    mean, std = ([0.4], [0.3]) if channels == 1 else colours.values()
    expected = (middle - np.reshape(mean, (-1, 1, 1))) / np.reshape(std, (-1, 1, 1))
    np.testing.assert_allclose(image, expected, rtol=1e-5, atol=1e-6)


# -- a table of labels ------------------------------------------------------------------


def test_a_table_of_labels(tree, tmp_path):
    rows = [("train/a/00.npy", "dead", "val"), ("val/b/13.npz", "dead", "train")]
    rows += [("train/b/01.npz", "alive", "train"), (tree / "val/a/12.npy", "alive", "val")]
    text = "id,split,label,path\n" + "".join(f"x,{s},{c},{p}\n" for p, c, s in rows)
    (tmp_path / "labels.csv").write_text("\ufeff" + text, encoding="utf-8")
    source = opened(tree, labels=str(tmp_path / "labels.csv"), batch_size=2)
    assert source.classes == ["alive", "dead"]
    assert (source.train_length, source.val_length) == (2, 2)
    found = all_of(source.val_loader(2, BatchShard()))
    assert found["target"].tolist() == [1, 0]
    for image, number in zip(found["image"], (0, 12), strict=True):
        np.testing.assert_allclose(image[0], volume(number)[1:9, 1:13, 2:18] / 65535, rtol=1e-6)
    assert sorted(all_of(source.train_loader(2, BatchShard()))["target"].tolist()) == [0, 1]
    (tmp_path / "labels.csv").write_text(text.replace("alive", "well"))
    other = opened(tree, labels=str(tmp_path / "labels.csv"), batch_size=2)
    assert other.fingerprint() != source.fingerprint()


GOOD = "path,label,split\ntrain/a/00.npy,x,train\nval/a/12.npy,x,val\n"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "labels.csv cannot be read: No such file or directory"),
        ("", "has no column path; the columns of its first line are: none"),
        (
            GOOD.replace(",x,val", ",x,other"),
            "lists no files with split val: write val in its column split, or set --val_split",
        ),
        (GOOD.replace(",x,train", ",,train"), "line 2 of .* has no label"),
        (GOOD + "train/a/00.npy,y,val\n", "line 4 of .* train/a/00.npy was already listed"),
        (GOOD.partition("val/")[0], "lists no files with split val"),
        (GOOD.replace("00.npy", "99.npy"), "lists .*/train/a/99.npy, which does not exist"),
        (b"path,label,split\n\xff\xfe", "cannot be read: 'utf-8' codec can't decode"),
    ],
)
def test_an_odd_table(tree, tmp_path, content, told):
    path = tmp_path / "labels.csv"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(DataFolderError, match=told):
        opened(tree, labels=str(path), batch_size=1)


# -- what cannot be used ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "channels", "told"),
    [
        ((7, 14, 21), 1, "0.npy has size 7 x 14 x 21, smaller than the model's 8 x 12 x 16"),
        ((14, 21), 1, "0.npy has shape 14 x 21, but the model takes 8 x 12 x 16"),
        (LARGER, 3, "but the model takes 8 x 12 x 16 with 3 channel"),
    ],
)
def test_another_shape_is_refused(tmp_path, shape, channels, told):
    for split in ("train", "val"):
        write(tmp_path / split / "a" / "0.npy", volume(0, shape))
    source = opened(tmp_path, channels=channels, batch_size=1)
    for loader in (source.train_loader(1, BatchShard()), source.val_loader(1, BatchShard())):
        with pytest.raises(DataFolderError, match=told):
            all_of(loader)


def test_unreadable_files(tree, tmp_path):
    names = {split: sorted((tree / split).glob("*/*")) for split in ("train", "val")}
    for split, paths in names.items():
        for number, path in enumerate(paths):
            here = tmp_path / split / path.parent.name / path.name
            here.parent.mkdir(parents=True, exist_ok=True)
            here.write_bytes(path.read_bytes() if number % 3 else b"nothing")
    source = opened(tmp_path)
    train, val = source.train_loader(4, BatchShard()), source.val_loader(4, BatchShard())
    whole = all_of(train)
    assert len(whole["target"]) == 12
    assert {path for path, *_ in train.bad_images()} == {
        str(tmp_path / path.relative_to(tree)) for path in names["train"][::3]
    }
    half = all_of(source.train_loader(4, BatchShard(rows=range(4))))
    check_same(half, whole | {"image": whole["image"][:, :, :4]})
    found = all_of(val)
    assert found["target"].tolist() == [-1, 0, 0, -1, 1, -1, -1, -1]
    assert found["index"].tolist() == [-1, 1, 2, -1, 4, -1, -1, -1]
    assert not found["image"][0].any()
    assert len(val.bad_images()) == 2


def test_damage_that_other_rows_do_not_show(tmp_path):
    """Who reads the whole replaces the file; who reads a part of the rows stops."""
    for split, number in itertools.product(("train", "val"), range(4)):
        write(tmp_path / split / "a" / f"{number}.nii.gz", volume(number, (64, 64, 64)))
    broken = tmp_path / "train" / "a" / "0.nii.gz"
    content = broken.read_bytes()
    broken.write_bytes(content[: len(content) // 2])
    source = opened(tmp_path, (64, 64, 64))
    loader = source.train_loader(4, BatchShard())
    all_of(loader)
    assert [path for path, *_ in loader.bad_images()] == [str(broken)]
    all_of(source.train_loader(4, BatchShard(rows=range(8))))
    with pytest.raises(DataFolderError, match=r"0\.nii\.gz is damaged .*repair or remove it"):
        all_of(source.train_loader(4, BatchShard(rows=range(56, 64))))


def test_a_folder_without_arrays(digits):
    with pytest.raises(DataFolderError, match=r"has class folders without images: 0, .*\.nii\.gz"):
        opened(digits)


def test_a_tiff_file_whose_width_has_two_values(tmp_path):
    array = np.zeros((20, 24), np.uint8)
    for split, number in itertools.product(("train", "val"), range(3)):
        path = tmp_path / split / "a" / f"{number}.tif"
        path.parent.mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(path, array, tile=(16, 16), compression="zlib")
        content = path.read_bytes()
        width = struct.pack("<HHII", 256, 4, 1, 24)  # a tag, its type, how many values, the value
        assert content.count(width) == 1
        if number == 1:
            path.write_bytes(content.replace(width, struct.pack("<HHIHH", 256, 3, 2, 24, 24)))
    source = opened(tmp_path, (16, 16), batch_size=3)
    for loader in (source.train_loader(3, BatchShard()), source.val_loader(3, BatchShard())):
        assert len(all_of(loader)["target"]) == 3
        ((path, reason, *_),) = loader.bad_images()
        assert path.endswith("1.tif")
        assert reason.startswith("its header is damaged: its shape is (20, (24, 24))")


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e300])
def test_values_that_are_not_finite(tmp_path, value):
    for split, number in itertools.product(("train", "val"), range(2)):
        array = np.zeros(SIZE)
        array[-1] = value if number else 0
        write(tmp_path / split / "a" / f"{number}.npy", array)
    source = opened(tmp_path, batch_size=2)
    for load in (source.train_loader, source.val_loader):
        loader = load(2, BatchShard())
        assert all_of(loader)["image"].isfinite().all()
        ((path, reason, *_),) = loader.bad_images()
        assert path.endswith("1.npy")
        assert reason == "it contains values that are NaN or infinite in fp32"
        assert all_of(load(2, BatchShard(rows=range(4))))["image"].isfinite().all()
        with pytest.raises(DataFolderError, match=r"1.npy is damaged .* its other rows cannot"):
            all_of(load(2, BatchShard(rows=range(4, 8))))
