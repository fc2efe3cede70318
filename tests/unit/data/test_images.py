"""Image folders and files as users have them: links, broken files, 16 bits, odd names."""

import os
import pickle
import shutil
import struct
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from data.batch import PADDING, BatchShard, SampleIndex
from data.decode import find_images, read_image
from data.files import BrokenImageError, DataFolderError
from data.index import check_folder, index_split
from data.open import open_data
from data.pack import pack
from models.config import VitConfig
from tests.support.loading import arguments, check_same, concatenated, loaders, wanted
from tests.support.memory_files import in_memory

pytestmark = pytest.mark.fast

CONFIG = VitConfig(img_size=16, patch_size=4, num_classes=10)


def image(path, value=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (16, 16), value).save(path)


# -- which files ----------------------------------------------------------------------


def test_order_is_torchvisions(tmp_path):
    top = tmp_path / "train"
    for name in (
        "b/z.png",
        "b/a.JPEG",
        "b/a/2.png",
        "b/a-/1.png",
        "b/a b/3.webp",
        "b/a/deep/er/0.bmp",
        "B/1.png",
        "c/10.png",
        "c/9.png",
        "c/\udcff.png",
        "\udcfe/1.png",
    ):
        image(top / name)
    image(tmp_path / "elsewhere" / "sub" / "1.png")
    (top / "linked").symlink_to(tmp_path / "elsewhere")
    (top / "b" / "more").symlink_to(tmp_path / "elsewhere2")
    image(tmp_path / "elsewhere2" / "7.png")
    (top / "c" / "lost.png").symlink_to("nowhere")
    for name in ("c/notes.txt", "c/movie.gif", "c/LICENSE", "b/a/x.TXT", "beside.png"):
        (top / name).touch()
    theirs, ours = ImageFolder(str(top)), index_split(str(tmp_path / "train"))
    assert list(zip(ours.paths, ours.labels, strict=True)) == theirs.samples
    assert ours.classes == theirs.classes
    assert ours.left_out == {".txt": 2, ".gif": 1, "no extension": 1, "in no class folder": 1}


HIDDEN = (
    "._1.png",
    ".ipynb_checkpoints/1-checkpoint.png",
    "a/._1.png",
    "a/.DS_Store",
    "a/.ipynb_checkpoints/1-checkpoint.png",
    "a/PaxHeaders.12/1.png",
)
"""What tools leave in a folder of a split."""


@pytest.mark.parametrize("url", [False, True])
@pytest.mark.parametrize("labels", [True, False])
def test_what_is_hidden_is_left_out(labels, url, tmp_path):
    """But not if the folder itself is in a hidden one."""
    root = tmp_path / ".cache" / "data"
    for split in ("train", "val"):
        image(root / split / "a" / "1.png")
        for name in HIDDEN:
            image(root / split / f"{name}.png")
            (root / split / f"{name}.png").rename(root / split / name)
    where = in_memory(root) if url else root
    config = arguments(where, batch_size=1)
    source = open_data(replace(wanted(config, CONFIG), labels=labels))
    classes = "; warning: 1 class, but the model has 10 outputs (--num_classes)" if labels else ""
    assert str(source).endswith(
        f"1 training, 1 validation images; {2 * len(HIDDEN)} files left out "
        f"(hidden {2 * len(HIDDEN)}){classes}"
    )
    assert source.classes == (["a"] if labels else None)


def test_packing_and_prediction_leave_hidden_files_out(tmp_path):
    for split in ("train", "val"):
        for name in ("a/1.png", "a/._1.png", "a/.ipynb_checkpoints/2.png", ".b/3.png"):
            image(tmp_path / split / name)
    pack(str(tmp_path), str(tmp_path / "shards"), 10**6, 1)
    with tarfile.open(tmp_path / "shards" / "train" / "train-000000.tar") as tar:
        assert tar.getnames() == ["00000000.png", "00000000.cls"]
    found = find_images([str(tmp_path / "train"), str(tmp_path / "val" / "a" / "._1.png")])
    top = tmp_path / "train"
    assert found.paths == [top / "a" / "1.png", tmp_path / "val" / "a" / "._1.png"]
    assert found.passed_over == {"hidden": 3}


def test_classes_that_look_alike(tmp_path):
    """As where one half of a data set was copied by a Mac."""
    for split, name in (("train", "caf\u00e9"), ("val", "cafe\u0301")):
        image(tmp_path / split / name / "1.png")
    with pytest.raises(
        DataFolderError, match="the same letters in different Unicode normal forms"
    ) as e:
        check_folder(str(tmp_path), 10)
    assert r"is 'caf\xe9' in train and 'cafe\u0301' in val" in str(e.value)


@pytest.mark.parametrize(
    ("link", "target", "told"),
    [
        ("a/up", "..", "a/up is a link to {top}, which contains it"),
        ("a/self", ".", "a/self is a link to {top}/a, which contains it"),
        ("again", "a", "again and {top}/a are the same folder, {top}/a"),
        ("lost", "/does/not/exist", "lost is a link to /does/not/exist, which cannot be reached"),
    ],
)
def test_links_that_are_refused(link, target, told, tmp_path):
    top = tmp_path.resolve() / "train"
    for name in ("a", "b", "a/x"):
        image(top / name / "1.png")
    (top / link).symlink_to(target)
    with pytest.raises(DataFolderError) as error:
        index_split(str(tmp_path.resolve() / "train"))
    assert told.format(top=top) in str(error.value)


def test_folder_that_may_not_be_read():
    """Its images must not be missing in silence. As another user: root may read everything."""
    where = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own folders are closed to others
    where.chmod(0o755)
    image(where / "train" / "a" / "1.png")
    (where / "train" / "a" / "closed").mkdir(mode=0)
    as_root = os.geteuid() == 0
    if as_root:
        os.seteuid(1)
    try:
        with pytest.raises(DataFolderError, match="a/closed cannot be read: Permission denied"):
            index_split(str(where / "train"))
    finally:
        if as_root:
            os.seteuid(0)
        shutil.rmtree(where)


# -- one file -------------------------------------------------------------------------

PICTURE = np.linspace(0, 255, 64).round().astype(np.uint8).reshape(8, 8)


def tiff(content, bits, photometric):
    """A grey 8x8 picture in one strip, little-endian: of kinds that Pillow does not write."""
    tags = {
        256: 8,
        257: 8,
        258: bits,
        259: 1,
        262: photometric,
        273: 200,
        277: 1,
        278: 8,
        279: len(content),
    }
    head = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
    head += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return (head + bytes(4)).ljust(200, b"\0") + content


@pytest.mark.parametrize("name", ["g.png", "g.tif", "big_endian.tif", "g.pgm", "g.jp2"])
def test_16_bits_are_as_8_bits(name, tmp_path):
    wide = PICTURE.astype(np.uint16) * 257
    if name.startswith("big"):
        wide = wide.astype(">u2")
    options = {"irreversible": False} if name.endswith("jp2") else {}
    Image.fromarray(wide).save(tmp_path / name, **options)
    found = read_image(str(tmp_path / name))
    assert found.mode == "RGB"
    assert np.array_equal(np.asarray(found), np.stack([PICTURE] * 3, axis=-1))


def test_tiffs_of_12_bits_and_with_white_as_zero(tmp_path):
    twelve = (PICTURE.astype(np.uint32) * 4095 + 127) // 255
    packed = b"".join(
        bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in twelve.reshape(-1, 2).tolist()
    )
    wide = PICTURE.astype("<u2") * 257
    for content, bits, photometric in (
        (packed, 12, 1),
        ((255 - PICTURE).tobytes(), 8, 0),
        ((65535 - wide).tobytes(), 16, 0),
    ):
        (tmp_path / "x.tif").write_bytes(tiff(content, bits, photometric))
        assert np.array_equal(np.asarray(read_image(str(tmp_path / "x.tif")))[..., 0], PICTURE)


def test_values_of_32_bits(tmp_path):
    """Read as before where they are those of 8 bits; else nobody knows what white is."""
    path = str(tmp_path / "x.tif")
    for kind in (np.int32, np.float32):
        Image.fromarray(PICTURE.astype(kind)).save(path)
        assert np.array_equal(np.asarray(read_image(path))[..., 0], PICTURE)
        for wrong in (PICTURE.astype(kind) * 4, PICTURE.astype(kind) - 1):
            Image.fromarray(wrong).save(path)
            with pytest.raises(BrokenImageError, match="convert it to 8 or 16 bits"):
                read_image(path)
    for values, told in (([[0, np.nan]], "range from nan"), ([[0.25, 1]], "from 0.25 to 1, and")):
        Image.fromarray(np.array(values, np.float32)).save(path)
        with pytest.raises(BrokenImageError, match=told):
            read_image(path)


BROKEN = {
    "empty.png": b"",
    "text.jpg": b"no image",
    "head.png": b"\x89PNG\r\n\x1a\n" + bytes(20),
    "tiff.tif": b"II*\0" + bytes(9),
    "ppm.ppm": b"P6\n0 x\n",
    "huge.ppm": b"P6\n100000 100000\n255\n",
    "line.ppm": b"P6\n5000 1\n255\n" + bytes(15000),
    "wide.bmp": b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, -5, 5, 1, 24, *[0] * 6),
    "script.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
}


@pytest.mark.parametrize("name", BROKEN)
def test_any_broken_file_has_one_reason(name, tmp_path, capfd):
    (tmp_path / name).write_bytes(BROKEN[name])
    with pytest.raises(BrokenImageError) as error:
        read_image(str(tmp_path / name))
    assert str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert str(tmp_path) not in str(error.value)
    assert capfd.readouterr() == ("", "")


# -- in their place -------------------------------------------------------------------


@pytest.fixture
def half_broken(tmp_path):
    """Grey of each class; 8 of 40 training images and 3 of 20 validation images are broken."""
    for label in range(4):
        for number in range(10):
            image(tmp_path / "train" / str(label) / f"{number}.png", 60 * label)
            image(tmp_path / "val" / str(label) / f"{number % 5}.png", 60 * label)
    names = [f"train/{label}/{number}.png" for label in range(4) for number in (0, 7)]
    names += ["val/0/0.png", "val/1/2.png", "val/3/4.png"]
    for name in names:
        (tmp_path / name).write_bytes(b"no image")
    return tmp_path, {str(tmp_path / name) for name in names}


def epochs(loader, first_batch=0):
    return [batch for epoch in (1, 2) for batch in loader.epoch(epoch, first_batch)]


def test_another_image_stands_in_for_a_broken_one(half_broken):
    root, broken = half_broken
    alone, _ = loaders(arguments(root, batch_size=8, num_workers=0))
    batches = epochs(alone)
    for batch in batches:
        grey = batch["image"][:, 0].float().mean(dim=(1, 2))
        assert torch.equal((grey / 60).round().long(), batch["target"])
    found_bad = {path for path, *_ in alone.bad_images()}
    assert found_bad == {path for path in broken if "/train/" in path}
    assert alone.bad_images() == []
    epochs(alone)
    assert alone.bad_images() == []  # once a process

    halves = [(arguments(root, batch_size=8, num_workers=r), BatchShard(r, 2)) for r in range(2)]
    shares = [loaders(*half)[0] for half in halves]
    found = [epochs(loader) for loader in shares]
    told = [loader.bad_images() for loader in shares]
    for whole, *parts in zip(batches, *found, strict=True):
        check_same(concatenated(parts), whole)
    in_train = {path for path in broken if "/train/" in path}
    assert {path for path, *_ in told[0] + told[1]} == in_train
    assert {why for _, why, _ in told[1]} == {"no image of a known format"}  # of a worker
    names = sorted(os.listdir(os.path.join(root, "train")))
    labels = open_data(wanted(arguments(root, batch_size=8))).splits["train"].labels
    for path, _, number in told[0] + told[1]:
        assert os.path.basename(os.path.dirname(path)) == names[labels[number]]
    resumed = next(iter(loaders(arguments(root, batch_size=8))[0].epoch(2, 3)))
    check_same(resumed, batches[5 + 3])


def test_validation_counts_each_readable_image_once(half_broken):
    root, broken = half_broken
    _, val = loaders(arguments(root, batch_size=8, num_workers=1))
    found = concatenated([*val.epoch(0)])
    labels, indices = found["target"], found["index"]
    assert torch.bincount(labels[labels >= 0]).tolist() == [4, 4, 5, 4]
    assert not found["image"][labels < 0].any()
    readable = [at for at in range(20) if at not in (0, 7, 19)]
    assert indices[indices != PADDING].tolist() == readable
    assert torch.equal(indices == PADDING, labels == PADDING)
    assert {path for path, *_ in val.bad_images()} == {p for p in broken if "/val/" in p}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_nothing_can_be_read(tmp_path, num_workers):
    for split in ("train", "val"):
        image(tmp_path / split / "a" / "1.png")
    (tmp_path / "train" / "a" / "1.png").write_bytes(b"no image")
    train, _ = loaders(arguments(tmp_path, batch_size=1, num_workers=num_workers))
    with pytest.raises(DataFolderError) as error:
        next(train.epoch(0))
    assert str(error.value) == (
        f"{tmp_path}/train/a/1.png cannot be read (no image of a known format), and neither can "
        "10 images tried in its place"
    )


def test_a_split_can_be_sent_to_a_process(half_broken):
    source = open_data(wanted(arguments(half_broken[0], batch_size=8), CONFIG))
    there = pickle.loads(pickle.dumps(source.splits["train"]))
    ours, theirs = (split[SampleIndex(1, 0)] for split in (source.splits["train"], there))
    check_same(theirs.fields, ours.fields)
    assert theirs.bad == ours.bad


def test_largest_seed(half_broken):
    train, _ = loaders(arguments(half_broken[0], batch_size=8), seed=2**63 - 1)
    assert len(list(train.epoch(3))) == 5
