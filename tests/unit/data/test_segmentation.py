"""Images with masks: the layouts of ``--segment_dir``, windows, masks that cannot be used."""

import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from data.batch import PADDING, BatchShard
from data.digits import read_digits
from data.files import BrokenImageError, DataFolderError
from data.segmentation import open_masked
from data.tables import ParquetSplit
from tests.support.masked_images import (
    IGNORED,
    LAYOUTS,
    encoded,
    masked_image,
    request_of,
    split_of,
    write_masked,
)
from training.evaluation.segment import Masks

pytestmark = pytest.mark.fast

TRAIN = [(16, 16), (20, 40), (33, 17), (16, 16)]
VAL = [(16, 16), (30, 61), (50, 16), (12, 12), (17, 100)]


def test_layouts_hold_the_same(tmp_path):
    digests = set()
    for layout in LAYOUTS:
        images = write_masked(tmp_path / layout, layout, TRAIN, VAL)
        source = open_masked(request_of(tmp_path / layout))
        assert (source.train_length, source.val_length) == (len(TRAIN), len(VAL))
        for name, pairs in images.items():
            split = source.splits[name]
            digests.add((name, split.digest()))
            assert split.sizes.tolist() == [list(mask.shape) for _, mask in pairs]
            for number, (pixels, mask) in enumerate(pairs):
                expected = np.where(mask == IGNORED, -1, mask.astype(int))
                assert np.array_equal(split.mask(number), expected), (layout, number)
                whole = Image.fromarray(pixels).resize(
                    split.scaled[number].tolist()[::-1], Image.Resampling.BICUBIC
                )
                shown = split.picture(number).permute(1, 2, 0).numpy().astype(int)
                assert np.abs(shown - np.asarray(whole)).max() <= 1
    assert len(digests) == 2 * len(LAYOUTS)


def test_urls_hold_the_same(tmp_path):
    for layout in LAYOUTS:
        write_masked(tmp_path / layout, layout, TRAIN, VAL)
        here = open_masked(request_of(tmp_path / layout))
        there = open_masked(request_of(f"file://{tmp_path / layout}", index_dir=str(tmp_path)))
        for name, split in here.splits.items():
            other = there.splits[name]
            assert np.array_equal(split.sizes, other.sizes)
            for number in range(split.images):
                assert np.array_equal(split.mask(number), other.mask(number))
                assert split.picture(number).equal(other.picture(number))


def test_a_row_group_is_read_once(tmp_path, monkeypatch):
    write_masked(tmp_path, "parquet", [(16, 16)] * 7, VAL)
    reads = []
    read_group = ParquetSplit._read_group

    def counted(split, file, group):
        reads.append((split.columns.image, split.name, group))
        return read_group(split, file, group)

    monkeypatch.setattr(ParquetSplit, "_read_group", counted)
    split = open_masked(request_of(tmp_path)).splits["train"]
    assert sorted(reads) == [
        *(("image", "train", n) for n in range(3)),
        *(("image", "val", n) for n in range(2)),
        ("mask", "train", 0),  # has two labels
    ]
    Masks(split).read(range(7))
    assert reads[5:] == [("mask", "train", n) for n in range(3)]  # the first is still in memory


def test_other_names_of_splits_links_and_ignored_labels(tmp_path):
    write_masked(tmp_path / "real", "ade20k", TRAIN, VAL)
    for top in ("images", "annotations"):
        (tmp_path / "real" / top / "training").rename(tmp_path / f"{top}_elsewhere")
        os.symlink(tmp_path / f"{top}_elsewhere", tmp_path / "real" / top / "train")
    (tmp_path / "real" / "classes.txt").write_text("sky\nroad\n")
    source = open_masked(request_of(tmp_path / "real", segment_ignore=(0, 3)))
    assert source.class_names == ["sky", "road"]
    gray = open_masked(request_of(tmp_path / "real", channels=1)).splits["val"]
    assert gray.load_sample(1, 0, 1).shape == (1, 16, 16)
    labels = np.unique(np.concatenate([source.splits["train"].mask(n).ravel() for n in range(4)]))
    assert labels.tolist() == [-1, 1, 2, 255]


def test_windows_cover_the_image():
    """As mmsegmentation, by which DINOv2 evaluates, places them: the last one ends with the
    image."""
    for size, scaled, tops, lefts in (
        ((16, 16), (16, 16), [0], [0]),
        ((30, 61), (16, 33), [0], [0, 10, 17]),
        ((50, 16), (50, 16), [0, 10, 20, 30, 34], [0]),
        ((8, 4), (32, 16), [0, 10, 16], [0]),
        ((17, 100), (16, 94), [0], [0, 10, 20, 30, 40, 50, 60, 70, 78]),
    ):
        split = split_of([size])
        assert split.scaled[0].tolist() == [*scaled]
        assert [*map(list, split.starts(0))] == [tops, lefts]
        places = [(top, left) for top in tops for left in lefts]
        assert len(split) == len(split.windows_of(0)) == len(places)
        whole = split.picture(0)
        for number, (top, left) in enumerate(places):
            window = split.load_sample(number, 0, number)
            assert window.shape == (3, 16, 16)
            assert window.equal(whole[:, top : top + 16, left : left + 16])


def test_no_image_is_divided_over_processes():
    sizes = [(16, 16 * (1 + number % 7)) for number in range(29)]
    split = split_of(sizes)
    for shards in (1, 2, 3, 8, 40):
        share, seen = 4, []
        batches = set()
        for shard in range(shards):
            loader = split.numbered().batches(share * shards, BatchShard(shard, shards))
            batches.add(len(loader))
            numbers = torch.cat([labels for _, labels in loader.epoch(0)]).tolist()
            assert len(numbers) == len(loader) * share
            mine = [number for number in numbers if number != PADDING]
            images = [split.image_of(number) for number in mine]
            order = [*dict.fromkeys(images)]
            assert mine == [n for image in order for n in split.windows_of(image)]
            seen += mine
            middle = [labels for _, labels in loader.epoch(0, 1)]
            assert torch.cat([torch.tensor(numbers[:share]), *middle]).tolist() == numbers
        assert sorted(seen) == [*range(len(split))]
        assert len(batches) == 1


def test_training_windows_are_drawn():
    split = split_of([(16, 64), (64, 16), (16, 16)] * 40, "train")
    places = [split.starts(image) for image in range(120)]
    assert len(split) == 120
    lefts, tops = {left for (_, (left,)) in places[::3]}, {top for ((top,), _) in places[1::3]}
    assert len(lefts) > 15
    assert len(tops) > 15
    assert max(lefts) <= 48
    assert {*places[2::3]} == {((0,), (0,))}
    assert places == [split.starts(image) for image in range(120)]
    # The mask of a window is that of its pixels, the nearest ones.
    mask = np.arange(32 * 128).reshape(32, 128).astype(np.int16)
    (top,), (left,) = split.starts(0)
    expected = mask[1::2, 1::2][top : top + 16, left : left + 16]
    assert np.array_equal(split.mask_of_window(0, mask), expected)


def test_masks_of_mosaics():
    source = open_masked(request_of(None, (32, 24)))
    digits = {pixels.tobytes(): label for _, label, _, pixels in read_digits()}
    for name in ("train", "val"):
        split = source.splits[name]
        for number in (0, 7, 511):
            red = split.load_sample(number, 0, number)[0].numpy() * 0.229 + 0.485
            ink, mask = np.rint(255 * red).astype(np.uint8), split.mask(number)
            assert mask.shape == (32, 24)
            for top in range(0, 32, 8):
                for left in range(0, 24, 8):
                    cell = slice(top, top + 8), slice(left, left + 8)
                    assert {*mask[cell].flat} == {digits[ink[cell].tobytes()]}
    assert source.class_names == [*"0123456789"]


BROKEN = {
    "another size": (
        lambda mask: encoded(mask[:-1]),
        "it is 40 x 19 pixels, but its image is 40 x 20",
    ),
    "colors": (lambda mask: encoded(np.repeat(mask[..., None], 3, 2)), "it has colors (mode RGB)"),
    "a JPEG": (
        lambda mask: encoded(mask, "jpeg"),
        "it is a JPEG, whose compression changes labels",
    ),
    "objects": (lambda mask: encoded(mask.astype(np.uint16) + 5000), "it contains label 5255: "),
    "cut off": (lambda mask: encoded(mask)[:-30], "truncated"),
    "no image": (lambda mask: b"abc", "no image of a known format"),
    "empty": (lambda mask: b"", "no image of a known format"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_masks_that_cannot_be_used(how, tmp_path):
    make, reason = BROKEN[how]
    write_masked(tmp_path, "ade20k", TRAIN, VAL)
    path = tmp_path / "annotations/training/train_1.png"
    path.write_bytes(make(masked_image((1, 0), TRAIN[1])[1]))
    split = open_masked(request_of(tmp_path)).splits["train"]
    with pytest.raises(BrokenImageError) as raised:
        split.mask(1)
    assert str(path) in str(raised.value)
    assert reason in str(raised.value)
    assert split.mask(0).shape == (16, 16)


def test_sixteen_bits_and_one_bit_are_labels(tmp_path):
    write_masked(tmp_path, "pairs", TRAIN, VAL)
    labels = np.arange(256, dtype=np.uint16).reshape(16, 16) + 300
    (tmp_path / "train/some/train_0.png").write_bytes(encoded(labels))
    Image.fromarray(labels % 2 > 0).save(tmp_path / "train/some/train_3.png")
    split = open_masked(request_of(tmp_path)).splits["train"]
    assert np.array_equal(split.mask(0), labels)
    assert np.array_equal(split.mask(3), labels % 2)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("ade20k", "rm annotations/training/train_2.png", "1 of 4 images have no mask in "),
        ("ade20k", "rm annotations/validation", "must both contain validation or val"),
        ("pairs", "rm val", "contains no images with masks: use a folder with images/ and"),
        ("pairs", "rm val/some/val_0.png", "add a .png with the same name for each, or remove"),
        ("voc", "rm SegmentationClass/val_3.png", "val.txt lists missing files: "),
        ("voc", "rm ImageSets", ".txt, the list of images: No such file"),
        ("parquet", "rm val-0.parquet", "contains no validation-*.parquet or val-*.parquet or "),
        ("parquet", "rm .", "is not a folder"),
    ],
)
def test_folders_that_cannot_be_used(layout, change, message, tmp_path):
    root = tmp_path / "root"
    write_masked(root, layout, TRAIN, VAL)
    path = root / change.removeprefix("rm ")
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(DataFolderError) as raised:
        open_masked(request_of(root))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("layout", "names", "message"),
    [
        ("ade20k", "annotations/training/train_0.PNG", "train_0.PNG and train_0.png differ only"),
        ("ade20k", "images/training/train_0.jpeg", "train_0.bmp and train_0.jpeg differ only in t"),
        ("ade20k", "images/validation/val_1.BMP", "val_1.BMP and val_1.bmp differ only in the ext"),
        ("pairs", "val/some/val_1.tif", "val_1.bmp and val_1.tif differ only in the extension"),
    ],
)
def test_names_that_differ_only_in_the_extension(layout, names, message, tmp_path):
    write_masked(tmp_path, layout, TRAIN, VAL)
    (tmp_path / names).write_bytes(b"")
    with pytest.raises(DataFolderError) as raised:
        open_masked(request_of(tmp_path))
    assert message in str(raised.value)


@pytest.mark.parametrize("layout", ["ade20k", "pairs"])
def test_masks_without_an_image_are_counted(layout, tmp_path):
    write_masked(tmp_path, layout, TRAIN, VAL)
    assert "left out" not in str(open_masked(request_of(tmp_path)))
    for image in (*tmp_path.rglob("train_1.bmp"), *tmp_path.rglob("val_2.bmp")):
        image.rename(image.with_suffix(".heic"))
    source = open_masked(request_of(tmp_path))
    assert (source.train_length, source.val_length) == (len(TRAIN) - 1, len(VAL) - 1)
    assert str(source).endswith("; 2 files left out (masks without an image 2)")


def write_labels(root, layout, labels):
    """Images whose masks have only these labels for training, in columns."""
    write_masked(root, layout, TRAIN, VAL)
    for path in root.rglob("train_*.png"):
        height, width = np.asarray(Image.open(path)).shape
        mask = np.resize(np.array(labels, np.uint8), (height, width))
        path.write_bytes(encoded(mask))


@pytest.mark.parametrize(
    ("labels", "ignore", "message"),
    [
        (
            (0, 255, 255, 255),
            (255,),
            "the masks in train have a single label, 0, because 75.0 % of their pixels are "
            "ignored (--segment_ignore 255); if an ignored label is a class, set --segment_ignore "
            "4095, which no mask has: segmentation requires at least two labels",
        ),
        ((0, 7), (0, 9), "label, 7, because 50.0 % of their pixels are ignored (--segment_ignore"),
        ((3,), (255,), "the masks in train have a single label, 3: segmentation requires at lea"),
        ((255,), (255,), "the masks in train have no labels, because 100.0 % of their pixels ar"),
    ],
)
def test_a_single_label_is_not_measured(labels, ignore, message, tmp_path):
    write_labels(tmp_path, "ade20k", labels)
    (tmp_path / "annotations/training/train_2.png").write_bytes(b"not read")
    with pytest.raises(DataFolderError) as raised:
        open_masked(request_of(tmp_path, segment_ignore=ignore))
    assert message in str(raised.value)
    assert str(tmp_path) in str(raised.value)


def test_two_labels_are_found_wherever_they_are(tmp_path):
    write_masked(tmp_path, "voc", [(16, 16)] * 40, VAL)
    for path in tmp_path.rglob("train_*.png"):
        path.write_bytes(encoded(np.zeros((16, 16), np.uint8)))
    with pytest.raises(DataFolderError, match="have a single label, 0: "):
        open_masked(request_of(tmp_path))
    mask = np.zeros((16, 16), np.uint8)
    mask[3, 5] = 1
    (tmp_path / "SegmentationClass/train_39.png").write_bytes(encoded(mask))
    assert open_masked(request_of(tmp_path)).train_length == 40
    for path in tmp_path.rglob("train_*.png"):  # each of them is reported when it is read
        path.write_bytes(b"no mask")
    assert open_masked(request_of(tmp_path)).train_length == 40


@pytest.mark.parametrize(
    ("listed", "ignore", "expected", "warning"),
    [
        ("sky road sea", (255,), ["sky", "road", "sea"], None),
        ("sky road sea grass", (255,), ["sky", "road", "sea", "grass"], None),
        ("sky road", (255,), ["sky", "road"], "classes.txt has 2 names, but the labels range"),
        # ADE20K's two ways: label 0 is "other", which has no name.
        ("sky road", (0,), ["", "sky", "road"], None),
        ("sky road", (0, 255), ["", "sky", "road"], None),
        ("- sky road", (0,), ["", "sky", "road"], None),
        ("- sky", (0,), ["", "sky"], "has 2 names, but the labels range from 0 to 2: the first"),
        ("sky", (0,), ["sky"], "first name is used for label 0; if it is that of label 1, add an"),
        ("other sky road", (0,), ["other", "sky", "road"], "classes.txt, other, is used for la"),
        ("sky road sea x", (0,), ["sky", "road", "sea", "x"], "sky, is used for label 0, which"),
        ("", (0,), [], None),
    ],
)
def test_names_of_labels(listed, ignore, expected, warning, tmp_path):
    """Of masks with labels 0, 1 and 2."""
    write_labels(tmp_path, "ade20k", (0, 1, 2))
    if listed:
        text = "\n".join("" if name == "-" else name for name in listed.split())
        (tmp_path / "classes.txt").write_text(text + "\n\n")
    names, said = open_masked(request_of(tmp_path, segment_ignore=ignore)).names_by_label(3)
    assert names == expected
    assert (said is None) if warning is None else (warning in said and "\n" not in said)


def test_columns_and_volumes(tmp_path):
    for names, listed in ((["image", "depth"], "image, depth"), (["mask"], "mask")):
        table = pa.table({name: [b"x"] for name in names})
        for split in ("train", "val"):
            pq.write_table(table, tmp_path / f"{split}.parquet")
        with pytest.raises(DataFolderError, match=f"its image columns are: {listed}"):
            open_masked(request_of(tmp_path))
    with pytest.raises(DataFolderError, match="this model takes volumes"):
        open_masked(request_of(None, (8, 16, 16)))


def test_negative_labels(tmp_path):
    write_masked(tmp_path, "pairs", [(16, 16)], [(16, 16)])
    (mask,) = (tmp_path / "val").rglob("*.png")
    labels = np.zeros((16, 16), np.int32)
    labels[3, 4] = -5
    Image.fromarray(labels).save(mask, "TIFF")
    with pytest.raises(BrokenImageError, match="it contains label -5: labels start at 0"):
        open_masked(request_of(tmp_path)).splits["val"].mask(0)
