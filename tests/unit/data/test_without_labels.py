"""Images without labels: folders without classes, shards and tables of images alone."""

import io
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from data.batch import PADDING, BatchShard
from data.config import DataConfig
from data.files import DataFolderError
from data.open import open_data
from data.pack import main, pack
from data.source import DatasetRequest
from tests.support.loading import concatenated
from tests.support.memory_files import in_memory

pytestmark = pytest.mark.fast

GREYS = [10 * number for number in range(1, 8)]


def png(grey):
    content = io.BytesIO()
    Image.new("L", (16, 16), grey).save(content, "png")
    return content.getvalue()


def write(root, files):
    """Grey images of these names; returns the folder."""
    for name, grey in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(grey))
    return root


def opened(root, source="folder", **changes):
    how = {
        name: changes.pop(name) for name in ("with_train", "labels", "augment") if name in changes
    }
    config = DataConfig(
        data_dir=str(root), data_source=source, batch_size=4, num_workers=0, **changes
    )
    return open_data(DatasetRequest(config, 1, (16, 16), 2, seed=3, **{"labels": False} | how))


def greys(source, split, batch_size=4):
    """The grey value of each image of a split, read once in order, and all labels, if any."""
    loader = {"train": source.train_loader, "val": source.val_loader}[split](
        batch_size, BatchShard()
    )
    found = concatenated([*loader.epoch(0)])
    values = found["image"][:, 0, 0, 0].tolist()
    if "target" not in found:  # training images, of which none is padding
        assert found.keys() == {"image"}
        return values, None
    labels = found["target"].tolist()
    return [v for v, label in zip(values, labels, strict=True) if label != PADDING], labels


FLAT = {f"{number}.png": grey for number, grey in enumerate(GREYS)}
DEEP = {f"{'ab'[number % 2]}/c/{number}.png": grey for number, grey in enumerate(GREYS)}


@pytest.mark.parametrize("url", [False, True])
def test_folder_of_images_alone(url, tmp_path):
    for name, files, order in (
        ("train", FLAT, GREYS),
        ("", FLAT, GREYS),
        ("train", DEEP, GREYS[::2] + GREYS[1::2]),
        ("train", {"z.png": 7} | DEEP, [7, *GREYS[::2], *GREYS[1::2]]),
    ):
        root = tmp_path / f"{name}-{len(files)}-{order[1]}"
        write(root / name, files)
        where = in_memory(root) if url else root
        source = opened(where, augment=False)
        assert greys(source, "train") == (order, [0] * len(order) + [PADDING] * (-len(order) % 4))
        assert (source.classes, source.val_length) == (None, 0)
        assert str(source).endswith(f"{len(order)} training images")
        trained, labels = greys(opened(where, scale=(1, 1)), "train")
        assert labels is None
        assert len(trained) == len(order) // 4 * 4
        assert {round(grey, -1) for grey in trained} <= {round(grey, -1) for grey in order}
    write(root / "val", {"x/1.png": 99})
    assert greys(opened(root), "val") == ([99], [0] + [PADDING] * 3)
    assert greys(opened(root, with_train=False), "val")[0] == [99]


def test_labels_that_are_there_are_ignored(tmp_path):
    write(
        tmp_path,
        {f"{split}/{c}/1.png": 10 * i for split in ("train", "val") for i, c in enumerate("abcd")},
    )
    source = opened(tmp_path)
    assert greys(source, "val") == ([0, 10, 20, 30], [0] * 4)
    assert source.classes is None
    with pytest.raises(DataFolderError, match="has 4 classes, but --num_classes is 2"):
        opened(tmp_path, labels=True)
    digits = opened("", "digits")
    assert set(greys(digits, "val", 359)[1]) == {0}
    assert digits.classes is None


@pytest.mark.parametrize(
    ("files", "how", "message"),
    [
        (
            {"trian/1.png": 1, "val/1.png": 1},
            {},
            "train is not a folder: put images without labels",
        ),
        ({"train/notes.txt": 1}, {}, r"train contains no images \(.jpg"),
        ({"1.png": 1}, {}, "has 1 training images, fewer than one batch"),
    ],
)
def test_unusable_folders(files, how, message, tmp_path):
    with pytest.raises(DataFolderError, match=message):
        opened(write(tmp_path, files), **how)


@pytest.mark.parametrize("augment", [False, True])
def test_the_numbers_of_images(augment, tmp_path):
    source = opened(write(tmp_path, FLAT), augment=augment, scale=(1, 1), ratio=(1, 1))
    split, seen = source.splits["train"], []
    if augment:
        assert "index" not in split.fields
        split = split.with_index()
        assert "index" not in source.splits["train"].fields
    for rank in range(2):
        for batch in split.batches(4, BatchShard(rank, 2)).epoch(0):
            numbers = batch["index"].tolist()
            for image, number in zip(batch["image"], numbers, strict=True):
                assert number == PADDING or round(int(image[0, 0, 0]), -1) == GREYS[number]
            seen += [number for number in numbers if number != PADDING]
    assert len({*seen}) == len(seen) == (4 if augment else 7)


def test_a_few_images(tmp_path):
    split = opened(write(tmp_path, FLAT), augment=False).splits["train"]
    parts = [
        next(split.batches_of([2, 0, 1], 4, BatchShard(rank, 2)).epoch(0)) for rank in range(2)
    ]
    found = concatenated(parts)
    assert found["index"].tolist() == [2, 0, 1, PADDING]
    assert found["target"].tolist() == [0, 0, 0, PADDING]
    assert found["image"][:3, 0, 0, 0].tolist() == [GREYS[number] for number in (2, 0, 1)]


# -- shards and tables -------------------------------------------------------------------


def test_packed_images_without_labels(tmp_path, capsys, monkeypatch):
    folder, target = write(tmp_path / "photos", FLAT), tmp_path / "shards"
    arguments = ["pack", str(folder), str(target), "--without_labels", "--shard_size", "14KB"]
    monkeypatch.setattr("sys.argv", [*arguments, "--workers", "1"])
    main()
    assert capsys.readouterr().out == f"3 shards: {target}\n"
    found = []
    for shard in sorted(target.glob("train/*.tar")):
        assert shard.stat().st_size <= 14_000
        with tarfile.open(shard) as tar:
            found += [(each.name, tar.extractfile(each).read()) for each in tar]
    assert found == [(f"{i:08}.png", png(grey)) for i, grey in enumerate(GREYS)]
    assert not (target / "classes.json").exists()
    assert not (target / "val").exists()
    assert greys(opened(target, "webdataset", augment=False), "train")[0] == GREYS
    with pytest.raises(DataFolderError, match=r"has no shards val/\*.tar"):
        opened(target, "webdataset", labels=True)
    with pytest.raises(DataFolderError, match="contains no class folders"):
        pack(str(write(tmp_path / "c" / "train", FLAT).parent), str(tmp_path / "d"), 10**6, 1)


def test_shards_whose_labels_are_broken_or_missing(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        with tarfile.open(tmp_path / split / "0.tar", "w") as tar:
            for name, content in {
                "a.png": png(10),
                "b.png": png(20),
                "b.cls": b"-5",
                "c.json": b"{",
                "c.png": png(30),
            }.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    source = opened(tmp_path, "webdataset", augment=False)
    for split in ("train", "val"):
        assert greys(source, split) == ([10, 20, 30], [0, 0, 0, PADDING])
    with pytest.raises(DataFolderError, match=r"b\.cls contains no label"):
        opened(tmp_path, "webdataset", labels=True)
    with pytest.raises(DataFolderError, match=r"has no v\*.tar of|has no shards v-\*"):
        opened(tmp_path, "webdataset", val_shards="v-*.tar")  # a name that was given must fit


def parquet(root, columns):
    (root / "data").mkdir(parents=True)
    pq.write_table(pa.table(columns), root / "data" / "train-0.parquet", row_group_size=3)
    return root


def test_parquet_of_images_alone(tmp_path):
    images = [{"bytes": png(grey), "path": None} for grey in GREYS]
    alone = parquet(tmp_path / "a", {"image": images})
    assert greys(opened(alone, "parquet", augment=False), "train")[0] == GREYS
    with pytest.raises(DataFolderError, match="cannot tell which column contains the labels"):
        opened(alone, "parquet", labels=True)
    labelled = parquet(tmp_path / "b", {"image": images, "label": [None, 9, -3, 1, 1, 1, 1]})
    source = opened(labelled, "parquet", augment=False)
    assert greys(source, "train") == (GREYS, [0] * len(GREYS) + [PADDING])
    two = parquet(tmp_path / "c", {"image": images, "mask": images[::-1], "label": GREYS})
    source = opened(two, "parquet", augment=False, columns=("mask", "label"))
    assert greys(source, "train")[0] == GREYS[::-1]


def test_saved_data_set_of_images_alone(tmp_path):
    datasets = pytest.importorskip("datasets")
    if getattr(datasets, "__file__", None) is None:
        pytest.skip("datasets is not installed")
    rows = {"image": [{"bytes": png(grey), "path": None} for grey in GREYS]}
    features = datasets.Features(image=datasets.Image())
    found = datasets.Dataset.from_dict(rows, features)
    datasets.DatasetDict(train=found).save_to_disk(tmp_path / "saved")
    source = opened(tmp_path / "saved", "huggingface", augment=False)
    assert greys(source, "train")[0] == GREYS
    assert source.val_length == 0
