"""Images in tables, parquet files and saved data sets: each once an epoch, on both backends."""

import collections
import io
import itertools
import json
import pickle
import sys

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from data.batch import BatchShard
from data.config import DataConfig
from data.files import DataFolderError, open_system
from data.loader import WINDOW, RunSampler
from data.open import open_data
from data.source import DatasetRequest
from data.tables import ParquetSplit, split_files
from tests.support.cli import ROOT
from tests.support.loading import check_same_epochs, concatenated
from tests.support.marks import long
from tests.support.table_files import write_tables


@pytest.fixture(scope="session")
def tables(digits, tmp_path_factory):
    return write_tables(digits, tmp_path_factory.mktemp("tables"))


def wanted(root, source, **changes):
    values = {"data_dir": str(root), "data_source": source, "batch_size": 64, "num_workers": 0}
    return DatasetRequest(DataConfig(**values | changes), 3, (16, 16), 10, seed=3)


def opened(tables, source, **changes):
    folder = tables / {"parquet": "parquet", "huggingface": "saved"}[source]
    return open_data(wanted(folder, source, **changes))


@pytest.mark.parametrize("source", ["parquet", "huggingface"])
def test_images_are_the_digits(source, tables):
    expected = open_data(wanted("", "digits")).val_loader(100, BatchShard())
    found = opened(tables, source)
    assert found.classes == [str(digit) for digit in range(10)]
    assert (found.train_length, found.val_length) == (1438, 359)
    loader = pickle.loads(pickle.dumps(found)).val_loader(
        100, BatchShard()
    )  # as for other processes
    check_same_epochs(loader.epoch(0), expected.epoch(0))


@pytest.mark.parametrize("source", ["parquet", long("huggingface")])
def test_each_image_once_an_epoch_over_processes_workers_and_resumes(source, tables):
    alone = opened(tables, source, scale=(1, 1), ratio=(1, 1), hflip=0)
    batches = list(alone.train_loader(64, BatchShard()).epoch(1))
    images = concatenated(batches)["image"]
    names = collections.Counter(image.numpy().tobytes() for image in images)
    every = opened(tables, source, scale=(1, 1), ratio=(1, 1), hflip=0)
    whole = concatenated([*every.train_loader(1438, BatchShard()).epoch(1)])
    assert not names - collections.Counter(image.numpy().tobytes() for image in whole["image"])
    assert len(images) == 1438 // 64 * 64
    for workers, world, first in ((2, 2, 0), (0, 4, 9)):
        parts = [
            opened(tables, source, scale=(1, 1), ratio=(1, 1), hflip=0, num_workers=workers)
            .train_loader(64, BatchShard(rank, world))
            .epoch(1, first)
            for rank in range(world)
        ]
        check_same_epochs(map(concatenated, zip(*parts, strict=True)), batches[first:])


@pytest.mark.parametrize("run_length", [1, 8, 1000])
def test_the_order_in_runs(run_length):
    """A permutation, of runs out of one group; batches of any size are cut out of one order."""
    groups = [100, 37, 1, 64] * WINDOW  # four windows
    ends = np.cumsum(groups)

    def order(seed):
        sampler = RunSampler(groups, run_length, 1, shuffle=True)
        return sampler.shuffled(torch.Generator().manual_seed(seed))

    found = order(5)
    assert sorted(found.tolist()) == list(range(sum(groups)))
    assert found.equal(order(5))
    assert not found.equal(order(6))
    of_group = np.searchsorted(ends, found.numpy(), side="right")
    changes = 1 + int((of_group[1:] != of_group[:-1]).sum())
    assert changes <= sum(-(-each // run_length) for each in groups)
    if run_length == 8:  # an eighth of the readings of a full permutation, and well mixed
        assert changes > sum(groups) / 8
        assert len(set(of_group[:512])) > WINDOW / 2
        assert not (np.diff(found.numpy()) == 1).mean() > 0.05

    def batches(size, first=0):
        sampler = RunSampler(groups, run_length, size, shuffle=True, seed=1)
        sampler.set_position(2, first)
        return [at.index for batch in sampler for at in batch]

    assert batches(64)[64 * 4 :] == batches(128, 2)[: 64 * (len(batches(64)) // 64 - 4)]


def test_a_row_group_is_read_once_for_a_run(tables, monkeypatch):
    source = opened(tables, "parquet", images_per_read=20)
    read = []
    monkeypatch.setattr(
        ParquetSplit,
        "_read_group",
        lambda self, *at, real=ParquetSplit._read_group: (read.append(at), real(self, *at))[1],
    )
    list(source.train_loader(64, BatchShard()).epoch(0))
    runs = sum(-(-each // 20) for each in source.splits["train"].groups)
    assert len(read) <= runs
    loader = opened(tables, "parquet", num_workers=2).train_loader(80, BatchShard())
    assert {len(part) for part in loader._parts} == {64, 16}  # not 40, of as many runs


def test_names_of_files_and_splits(tmp_path):
    names = [
        "a/train/0.parquet",
        "a/train/1.parquet",
        "b/constraint.parquet",
        "data/test-00000.parquet",
        "data/validation-00000.parquet",
        "val.txt",
    ]
    for name in (*names, "a/train/._0.parquet", ".ipynb_checkpoints/train-0.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    found = split_files(str(tmp_path), ("train",))
    assert [path.removeprefix(f"{tmp_path}/") for path in found] == names[:2]
    found = split_files(f"file://{tmp_path}/", ("validation", "val", "test"))
    assert [path.removeprefix(f"file://{tmp_path}/") for path in found] == names[4:5]
    with pytest.raises(
        DataFolderError, match=r"contains no dev-\*.parquet files: --data_dir requires"
    ):
        split_files(str(tmp_path), ("dev",))
    for root in (str(tmp_path / "none"), "nothing://here"):
        with pytest.raises(DataFolderError, match=r"no .parquet files|does not support"):
            split_files(root, ("train",))


def test_a_url(tables, monkeypatch):
    calls = itertools.count()

    def unsteady(url):
        if next(calls) % 2 == 0:
            raise ConnectionError("reset by peer")
        return open_system(url)

    monkeypatch.setattr("data.tables.open_system", unsteady)
    monkeypatch.setattr("data.files.RETRY_WAITS_S", (0, 0))
    there = fsspec.filesystem("memory")
    for path in (tables / "parquet" / "data").iterdir():
        there.pipe_file(f"/digits/{path.name}", path.read_bytes())
    expected = opened(tables, "parquet")
    found = open_data(wanted("memory://digits", "parquet"))
    check_same_epochs(
        *(source.train_loader(64, BatchShard()).epoch(0) for source in (found, expected))
    )


def png():
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "PNG")
    return file.getvalue()


def write(root, split="train", metadata=None, **columns):
    """Write a table of a split beside one that is in order."""
    values = {"image": [png()] * 100, "label": list(range(10)) * 10}
    for name, chosen in (("train", values), ("val", values), (split, columns)):
        table = pa.table(chosen).replace_schema_metadata(metadata)
        pq.write_table(table, root / f"{name}.parquet", row_group_size=30)


@pytest.mark.parametrize(
    ("columns", "flags", "message"),
    [
        ({"image": [png()] * 100}, {}, r"train.parquet: cannot tell which column"),
        ({"a": [1] * 9, "label": [1] * 9}, {}, "no image column: set --columns"),
        ({"a": [b""], "b": [b""], "label": [1]}, {}, r"several image columns \(a, b\)"),
        ({"a": [b""], "n": [1]}, {"columns": ("a", "m")}, r"no column m \(columns: a, n\)"),
        ({"a": [b""], "n": [1.5]}, {"columns": ("a", "n")}, "column n does not contain integers"),
        ({"image": [png()] * 2, "label": [3, None]}, {}, "1 rows have no value in column label"),
        (
            {"image": [png()] * 2, "label": [3, -1]},
            {},
            r"label -1, but --num_classes 10 allows labels 0 to 9",
        ),
        (
            {"image": pa.array([], pa.binary()), "label": pa.array([], pa.int64())},
            {},
            r"train\) has no rows",
        ),
    ],
)
def test_tables_that_cannot_be_used(tmp_path, columns, flags, message):
    write(tmp_path, **columns)
    with pytest.raises(DataFolderError, match=message) as raised:
        open_data(wanted(tmp_path, "parquet", **flags))
    assert "\n" not in str(raised.value)


def test_columns_that_are_chosen_and_bytes_that_are_none(tmp_path):
    images = [png()] * 99 + [None]
    write(tmp_path, img=images, other=images, fine=[1] * 100, coarse=[2] * 100)
    with pytest.raises(DataFolderError, match="several image columns"):
        open_data(wanted(tmp_path, "parquet"))
    table = pa.table({"img": images, "other": images, "fine": [1] * 100, "coarse": [2] * 100})
    pq.write_table(table, tmp_path / "val.parquet")
    found = open_data(wanted(tmp_path, "parquet", columns=("img", "coarse")))
    train, val = found.train_loader(100, BatchShard()), found.val_loader(100, BatchShard())
    assert next(train.epoch(0))["target"].unique().tolist() == [2]
    assert next(val.epoch(0))["target"].tolist() == [2] * 99 + [-1]
    for loader in (train, val):
        ((name, reason, _),) = loader.bad_images()
        assert name.endswith(".parquet row 99")
        assert reason == "column img is empty in this row"


def test_classes_by_their_names(tmp_path):
    def told(names):
        label = {"_type": "ClassLabel", "names": names}
        features = {"image": {"_type": "Image"}, "label": label}
        return {"huggingface": json.dumps({"info": {"features": features}})}

    write(tmp_path, metadata=told(list("abcdefghij")), image=[png()] * 99, label=[0] * 99)
    assert open_data(wanted(tmp_path, "parquet")).classes == list("abcdefghij")
    table = pa.table({"image": [png()], "label": [0]}).replace_schema_metadata(told(["z"]))
    pq.write_table(table, tmp_path / "val.parquet")
    with pytest.raises(DataFolderError, match="the class names of train and val differ"):
        open_data(wanted(tmp_path, "parquet"))
    write(tmp_path, metadata=told([str(i) for i in range(11)]), image=[png()], label=[0])
    with pytest.raises(DataFolderError, match="has 11 classes, but --num_classes is 10"):
        open_data(wanted(tmp_path, "parquet"))
    pq.write_table(table, tmp_path / "train-0.parquet")
    with pytest.raises(DataFolderError, match=r"/train-0.parquet and .* have different"):
        open_data(wanted(tmp_path, "parquet"))


NAMES = ["dog", "Ant", "cat"]
"""Labels of a split, in its rows' order."""
AS_NUMBERS = [2, 0, 1]
"""The same by their places in the sorted names."""


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string()), "huggingface"],
    ids=str,
)
def test_strings_are_labels(kind, tmp_path):
    pictures, source = [png()] * 3, "parquet"
    if kind == "huggingface":
        source = kind
        columns = {"image": [{"bytes": each, "path": None} for each in pictures], "label": NAMES}
        features = datasets.Features(image=datasets.Image(), label=datasets.Value("string"))
        part = datasets.Dataset.from_dict(columns, features)
        datasets.DatasetDict(train=part, validation=part).save_to_disk(tmp_path)
    else:
        for split in ("train", "val"):
            for number, rows in enumerate((slice(0, 2), slice(2, 3))):
                labels = pa.array(NAMES[rows]).cast(kind)
                table = pa.table({"image": pictures[rows], "label": labels})
                pq.write_table(table, tmp_path / f"{split}-{number}.parquet")
    found = open_data(wanted(tmp_path, source, batch_size=3))
    assert found.classes == ["Ant", "cat", "dog"]
    assert next(found.val_loader(3, BatchShard()).epoch(0))["target"].tolist() == AS_NUMBERS
    assert found.splits["train"].labels.tolist() == AS_NUMBERS


def test_columns_of_strings_that_are_chosen(tmp_path):
    same = {"image": [png()] * 3, "text": ["x", "y", "z"]}
    for other, columns, classes in (
        ({"label": NAMES}, None, ["Ant", "cat", "dog"]),
        ({"label": NAMES, "labels": [3, 4, 5]}, None, None),
        ({"label": [3, 4, 5]}, None, None),
        ({"label": [3, 4, 5]}, ("image", "text"), ["x", "y", "z"]),
    ):
        for split in ("train", "val"):
            pq.write_table(pa.table(same | other), tmp_path / f"{split}.parquet")
        found = open_data(wanted(tmp_path, "parquet", batch_size=3, columns=columns))
        assert found.classes == classes


STRINGS = {"image": [png()] * 3, "label": NAMES}


@pytest.mark.parametrize(
    ("train", "told"),
    [
        ({"label": ["dog", None, "cat"]}, "train.parquet: 1 rows have no value in column label"),
        (
            {"label": ["dog", "", "cat"]},
            "train.parquet: some rows have an empty string in column label",
        ),
        ({"label": [b"dog", b"Ant", b"cat"]}, "several image columns (image, label)"),
        (
            {"label": ["dog", "Ant", "cats"]},
            "{root}: the class names of train and val differ: only train has cats",
        ),
    ],
)
def test_strings_that_cannot_be_labels(train, told, tmp_path):
    pq.write_table(pa.table(STRINGS | train), tmp_path / "train.parquet")
    pq.write_table(pa.table(STRINGS), tmp_path / "val.parquet")
    with pytest.raises(DataFolderError) as error:
        open_data(wanted(tmp_path, "parquet", batch_size=3))
    assert told.format(root=tmp_path) in str(error.value)


def test_strings_in_one_file_and_numbers_in_another(tmp_path):
    pq.write_table(pa.table(STRINGS), tmp_path / "train-0.parquet")
    pq.write_table(pa.table(STRINGS | {"label": [1, 2, 3]}), tmp_path / "train-1.parquet")
    with pytest.raises(DataFolderError, match="are strings in some files and integers in others"):
        open_data(wanted(tmp_path, "parquet"))


def test_wrong_folders(tables, tmp_path):
    damaged, single, partial = (tmp_path / name for name in ("damaged", "single", "partial"))
    damaged.mkdir()
    whole = (tables / "parquet" / "data" / "train-00000-of-00002.parquet").read_bytes()
    (damaged / "train-0.parquet").write_bytes(whole[: len(whole) // 2])
    datasets.load_from_disk(tables / "saved")["train"].save_to_disk(single)
    datasets.DatasetDict(train=datasets.load_from_disk(single)).save_to_disk(partial)
    for folder, message in (
        (single, "is a single dataset: --data_dir requires a DatasetDict"),
        (partial, "has no validation or val or valid or test split; its splits are train"),
        (damaged, "was not saved by datasets.DatasetDict.save_to_disk"),
    ):
        with pytest.raises(DataFolderError, match=message):
            open_data(wanted(folder, "huggingface"))
    with pytest.raises(DataFolderError, match=r"train-0.parquet cannot be read: "):
        open_data(wanted(damaged, "parquet"))


def test_without_the_packages(tables, tmp_path, monkeypatch):
    """A folder named datasets is not the package: this program has one."""
    (tmp_path / "datasets").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "datasets")
    with pytest.raises(DataFolderError, match="requires the package datasets: python3 -m pip"):
        opened(tables, "huggingface")
    for name in ("data.tables",):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    with pytest.raises(DataFolderError, match="requires the package pyarrow: python3 -m pip"):
        opened(tables, "parquet")


def test_a_damaged_row_group(tables, tmp_path):
    for path in (tables / "parquet" / "data").iterdir():
        content = bytearray(path.read_bytes())
        if path.name.startswith("train-00000"):
            content[100:2000] = bytes(1900)
        (tmp_path / path.name).write_bytes(content)
    loader = open_data(wanted(tmp_path, "parquet")).train_loader(64, BatchShard())
    batches = list(itertools.islice(loader.epoch(0), 22))
    assert all((batch["target"] >= 0).all() for batch in batches)
    names = {name for name, *_ in loader.bad_images()}
    assert 0 < len(names) <= 20
