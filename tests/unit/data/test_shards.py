"""Tar shards: what data.pack writes, and what others have written, and what is wrong with it."""

import hashlib
import io
import json
import os
import re
import tarfile

import pytest
import webdataset
from fsspec.implementations.local import LocalFileSystem
from PIL import Image
from torchvision.datasets import ImageFolder, imagenet

from data import files
from data.batch import SampleIndex
from data.files import DataFolderError
from data.open import open_data
from data.pack import main, pack
from models.config import VitConfig
from tests.support.archives import write_imagenet_archives, write_tar
from tests.support.cli import ALL_DIGITS
from tests.support.loading import arguments, check_same_epochs, loaders, wanted

pytestmark = pytest.mark.fast

MODEL = VitConfig(img_size=16, patch_size=4, num_classes=10)


def png(value):
    content = io.BytesIO()
    Image.new("L", (16, 16), value).save(content, "png")
    return content.getvalue()


def opened(root, **flags):
    config = arguments(root, batch_size=1, data_source="webdataset", **flags)
    return open_data(wanted(config, MODEL))


def split_of(root, split, **flags):
    """The keys and labels of a split, and its images' bytes."""
    found = opened(root, **flags).splits[split]
    where = range(len(found))
    names = [found.name_of(number).rpartition(": ")[2] for number in where]
    labels = [int(found[SampleIndex(0, number)].fields["target"]) for number in where]
    return names, labels, [found.read(number) for number in where]


# -- written by data.pack -------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    target = tmp_path_factory.mktemp("packed") / "digits"
    shards = pack(str(ALL_DIGITS), str(target), 300_000, 2)
    written = [*sorted(target.glob("train/*")), *sorted(target.glob("val/*"))]
    assert shards == [str(path) for path in written]
    return target


def checksums(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


def test_shards_hold_the_folders_files_in_order(packed, tmp_path):
    for split, count in (("train", 1438), ("val", 359)):
        shards = sorted(packed.glob(f"{split}/*.tar"))
        assert len(shards) > 2
        found = []
        for shard in shards:
            assert shard.stat().st_size <= 300_000
            with tarfile.open(shard) as tar:
                content = {member.name: tar.extractfile(member).read() for member in tar}
            for key in sorted({name.split(".")[0] for name in content}):
                found.append((content[f"{key}.png"], int(content[f"{key}.cls"])))
        samples = ImageFolder(str(ALL_DIGITS / split)).samples
        assert len(found) == count == len(samples)
        for (content, label), (path, expected) in zip(found, samples, strict=True):
            with open(path, "rb") as file:
                assert (file.read(), expected) == (content, label)
    pack(str(ALL_DIGITS), str(tmp_path / "again"), 300_000, 1)
    assert checksums(tmp_path / "again") == checksums(packed)


def test_shards_are_read_by_the_package_webdataset(packed):
    urls = [str(path) for path in sorted(packed.glob("val/*.tar"))]
    found = list(
        webdataset.WebDataset(urls, shardshuffle=False).decode("pil").to_tuple("png", "cls")
    )
    assert [label for _, label in found] == ImageFolder(str(ALL_DIGITS / "val")).targets


def test_shards_give_what_the_folder_gives(packed):
    shards = arguments(packed, data_source="webdataset", num_workers=2)
    for there, here in zip(loaders(arguments(ALL_DIGITS)), loaders(shards), strict=True):
        check_same_epochs(here.epoch(3, 2), there.epoch(3, 2))
    assert opened(packed).classes == [str(digit) for digit in range(10)]


def test_packing_on_the_command_line(tmp_path, capsys, monkeypatch):
    def run(*words):
        monkeypatch.setattr("sys.argv", ["data.pack", *map(str, words)])
        main()

    run(ALL_DIGITS, tmp_path / "new", "--shard_size", "1GB", "--workers", "1")
    assert capsys.readouterr().out == f"2 shards: {tmp_path / 'new'}\n"
    for words, told in (
        ((ALL_DIGITS, tmp_path / "new"), "new already exists: choose another target"),
        ((tmp_path / "nowhere", tmp_path / "x"), "nowhere/train does not exist"),
        (("gs://bucket/x", tmp_path / "x"), "gs://bucket/x is a URL: pack a folder"),
        ((ALL_DIGITS, "nowhere://b/x"), "fsspec does not support nowhere:// URLs"),
        ((ALL_DIGITS, tmp_path / "x", "--shard_size", "256"), "'256' is not a size such as 256MB"),
        (
            (ALL_DIGITS, tmp_path / "x", "--workers", "0"),
            "argument --workers: 0 must be at least 1",
        ),
    ):
        with pytest.raises(SystemExit, match="2"):
            run(*words)
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("data.pack: error: ")
        assert told in line
    assert not (tmp_path / "x").exists()


# -- packed to a URL ------------------------------------------------------------------


def test_packing_to_a_url_goes_on_after_an_interruption(packed, tmp_path, monkeypatch):
    """Until all shards are there the target is refused as a data set; what is there already is not
    written again."""
    target = tmp_path / "there"
    put = LocalFileSystem.put_file

    def breaks(self, here, there, **options):
        if "train-000002" in there:
            raise ConnectionError("lost")
        return put(self, here, there, **options)

    monkeypatch.setattr(files, "RETRY_WAITS_S", ())
    monkeypatch.setattr(LocalFileSystem, "put_file", breaks)
    with pytest.raises(DataFolderError, match=r"train-000002\.tar cannot be written: lost"):
        pack(str(ALL_DIGITS), f"file://{target}", 300_000, 1)
    with pytest.raises(DataFolderError, match="is incomplete: run the same"):
        opened(target)
    monkeypatch.setattr(LocalFileSystem, "put_file", put)
    with pytest.raises(DataFolderError, match="already exists and is not"):
        pack(str(ALL_DIGITS), f"file://{target}", 200_000, 1)
    first = target / "train" / "train-000000.tar"
    written = first.stat().st_mtime_ns
    shards = pack(str(ALL_DIGITS), f"file://{target}", 300_000, 2)
    assert first.stat().st_mtime_ns == written
    assert len(shards) == len(list(target.glob("*/*.tar")))
    (target / "packing.json").unlink()
    assert checksums(target) == checksums(packed)
    with pytest.raises(DataFolderError, match="already exists and is not"):
        pack(str(ALL_DIGITS), f"file://{target}", 300_000, 1)


# -- ImageNet's archives --------------------------------------------------------------


@pytest.fixture
def archives(tmp_path):
    write_imagenet_archives(tmp_path / "archives")
    return tmp_path / "archives"


def test_archives_of_imagenet_as_torchvision_unpacks_them(archives, tmp_path, monkeypatch):
    """The shards are those of the folder that torchvision makes of the archives."""
    pack(str(archives), str(tmp_path / "shards"), 4_000, 1)
    monkeypatch.setattr(imagenet, "check_integrity", lambda path, *md5: os.path.exists(path))
    for split in ("train", "val"):
        imagenet.ImageNet(str(archives), split)
    assert (archives / "train" / "n01" / "n01_0.JPEG").is_file()
    pack(str(archives), str(tmp_path / "of_folder"), 4_000, 1)
    assert checksums(tmp_path / "shards") == checksums(tmp_path / "of_folder")
    assert opened(tmp_path / "shards").classes == ["n01", "n02", "n03"]


def test_archives_without_labels(archives, tmp_path):
    (archives / "ILSVRC2012_devkit_t12.tar.gz").unlink()
    pack(str(archives), str(tmp_path / "shards"), 10**6, 1, labels=False)
    with tarfile.open(tmp_path / "shards" / "train" / "train-000000.tar") as tar:
        assert tar.getnames() == [f"{number:08}.jpeg" for number in range(12)]


def test_broken_archives(archives, tmp_path):
    def told():
        with pytest.raises(DataFolderError) as error:
            pack(str(archives), str(tmp_path / "shards"), 10**6, 1)
        return str(error.value).removeprefix(f"{archives}/")

    devkit, val = archives / "ILSVRC2012_devkit_t12.tar.gz", archives / "ILSVRC2012_img_val.tar"
    content = val.read_bytes()
    val.write_bytes(content[: content.rindex(b"PNG") + 20])
    assert told() == "ILSVRC2012_img_val.tar cannot be read: unexpected end of data"
    write_tar(val, {"1.JPEG": b"1"})
    assert told().startswith("ILSVRC2012_img_val.tar has 1 images and ILSVRC2012_img_train.tar 3 ")
    devkit.write_bytes(b"<html>Sign in</html>")
    assert told() == "ILSVRC2012_devkit_t12.tar.gz cannot be read: not a gzip file"
    devkit.unlink()
    assert told() == "ILSVRC2012_devkit_t12.tar.gz cannot be read: No such file or directory"
    (archives / "ILSVRC2012_img_train.tar").write_bytes(b"")
    assert told() == "ILSVRC2012_img_train.tar cannot be read: empty file"
    assert not (tmp_path / "shards").exists()


# -- written by others ----------------------------------------------------------------


def test_shards_of_other_makers(tmp_path):
    long_name = "a/" * 60 + "long"
    write_tar(
        tmp_path / "in-train-000.tar",
        {
            "k1.cls": b"2\n",
            "k1.JPG": b"1",
            "k1.txt": b"a caption",
            f"{long_name}.jpeg": b"2",
            f"{long_name}.json": b'{"label": 1, "cls": 9}',
            "k3.json": b'{"label": 7}',
            "k3.cls": b"0",
            "k3.webp": b"3",
            "d.ir/k4.png": b"4",
            "README": b"",
        },
        tarfile.GNU_FORMAT,
    )
    write_tar(tmp_path / "in-train-001.tar", {"d.ir/k4.cls": b"0", "k5.cls": b"2", "k5.png": b"5"})
    write_tar(tmp_path / "in-validation-0.tar", {"v.png": png(9), "v.json": b'{"cls": 1}'})
    with pytest.raises(DataFolderError, match=r"in-train-000.tar: the image d.ir/k4 has no label"):
        opened(tmp_path)
    flags = {"train_shards": "in-train-{001..001}.tar"}
    assert split_of(tmp_path, "val", **flags) == (["v"], [1], [png(9)])
    write_tar(tmp_path / "in-train-001.tar", {"k5.cls": b"2", "k5.png": b"5", "k6.cls": b"0"})
    source = opened(tmp_path, train_shards="in-train-{001..001}.tar")
    assert str(source).endswith(
        "1 training, 1 validation images; 1 file left out (labels without an image 1)"
    )


NAMED = {"a.png": png(1), "a.cls": b"cat", "b.png": png(2), "b.json": b'{"label": "dog"}'}


def test_labels_by_name(tmp_path):
    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", NAMED)
    assert split_of(tmp_path, "train")[:2] == (["a", "b"], [0, 1])
    assert opened(tmp_path).classes == ["cat", "dog"]
    (tmp_path / "classes.txt").write_text("dog\nbird\ncat\n")
    assert split_of(tmp_path, "val")[:2] == (["a", "b"], [2, 0])
    assert opened(tmp_path).classes == ["dog", "bird", "cat"]
    (tmp_path / "classes.json").write_text(json.dumps(["cat"]))
    with pytest.raises(DataFolderError, match="has the label dog, which is missing from classes"):
        opened(tmp_path)
    (tmp_path / "classes.json").write_text('{"cat": 0}')
    with pytest.raises(DataFolderError, match=r"classes.json is not a list of class names"):
        opened(tmp_path)


GOOD = {"a.png": png(1), "a.cls": b"0"}


def test_hidden_files_and_further_images_of_samples(tmp_path):
    hidden = ("._a.png", "./._a.cls", "x/.ipynb_checkpoints/b.png", "x/PaxHeaders.7/b.png")
    files = {"./x/b.png": png(2), "./x/b.cls": b"0", "a.seg.png": b"", "a.depth.PNG": b""}
    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", dict.fromkeys(hidden, b"1") | GOOD | files)
        write_tar(tmp_path / split / "._0.tar", {})
    assert split_of(tmp_path, "train")[0] == ["a", "./x/b"]
    assert str(opened(tmp_path)).endswith("12 files left out (hidden 8, .seg.png 2, .depth.png 2)")


@pytest.mark.parametrize(
    ("train", "flags", "told"),
    [
        (GOOD | {"a.jpg": b""}, {}, "train/0.tar has two images with key a: remove one"),
        (GOOD | {"b.png": b""}, {}, "train/0.tar: the image b has no label: add b.cls, or b.json"),
        (
            GOOD | {"a.cls": b"-1"},
            {},
            "a.cls contains no label: -1 is neither a non-negative integer",
        ),
        (GOOD | {"a.cls": b"\xff"}, {}, "a.cls contains no label: 'utf-8' codec"),
        ({"a.png": b"", "a.json": b"[1"}, {}, "a.json contains no label: Expecting"),
        ({"a.png": b"", "a.json": b"[" * 200_000}, {}, "a.json contains no label: it is nested"),
        ({"a.png": b"", "a.json": b'["cls"]'}, {}, "a.json contains no label: it is not a JSON"),
        (GOOD | {"b.png": b"", "b.cls": b"cat"}, {}, "mix numbers and names, such as cat"),
        (NAMED, {}, "the class names in the train and val shards differ"),
        ({}, {}, "the shards contain no images"),
        (
            {"d/22.05.jpg": b"", "d/22.05.cls": b"0"},
            {},
            "0.tar: d/22.05.jpg does not belong to a sample: keys end at the first dot, so the "
            "image of key d/22 must be d/22.jpg; rename the files",
        ),
        (
            GOOD | {f"x{i}.{name}.jpg": b"" for i in range(2) for name in ("input", "target")},
            {},
            "x0.input.jpg does not .* must be x0.jpg; rename the files",
        ),
        (
            GOOD,
            {"train_shards": "t-{0..9}.tar"},
            "has no t-0.tar, which --train_shards t-{0..9}.tar includes",
        ),
        (GOOD, {"val_shards": "x*.tar"}, "has no shards x*.tar: set --val_shards"),
        (GOOD, {"val_shards": "*.tar"}, "train/0.tar in .* matches both train and val"),
    ],
)
def test_shards_that_cannot_be_used(train, flags, told, tmp_path):
    write_tar(tmp_path / "train" / "0.tar", train)
    write_tar(tmp_path / "val" / "0.tar", GOOD)
    with pytest.raises(DataFolderError) as error:
        opened(tmp_path, **flags)
    assert all(part in str(error.value) for part in told.split(" .* "))


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(DataFolderError, match=r"--data_dir \S+/none does not exist"):
        opened(tmp_path / "none")


@pytest.mark.parametrize("length", [0, 100, 512, 1024, 2048])
def test_a_shard_that_is_cut_off(length, tmp_path):
    """Wherever: tarfile takes some cuts, as of a copy that was interrupted, for an end."""
    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", GOOD)
    path = tmp_path / "train" / "0.tar"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataFolderError, match=r"train/0\.tar cannot be read: "):
        opened(tmp_path)


def test_a_shard_that_is_cut_off_later_is_as_broken_images(tmp_path):
    for split in ("train", "val"):
        write_tar(tmp_path / split / "0.tar", GOOD | {"b.png": png(2), "b.cls": b"1"})
    source = opened(tmp_path)
    path = tmp_path / "val" / "0.tar"
    path.write_bytes(path.read_bytes()[:2100])
    sample = source.splits["val"][SampleIndex(0, 1)]
    ((name, reason, _),) = sample.bad
    assert sample.fields.pop("target") == sample.fields.pop("index") == -1
    assert not sample.fields.pop("image").any()
    assert not sample.fields
    assert name == f"{path}: b"
    assert re.fullmatch(r"it is truncated: \d+ of \d+ bytes", reason)
