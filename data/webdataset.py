"""The source of images in tar files, the shards of WebDataset, each read by its place in a shard.

So training takes its images in the order of any other source, whatever shards they are in: for
any number of processes, and from any step on.
"""

from __future__ import annotations

import fnmatch
import functools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xxhash

from data.config import DataConfig
from data.errors import BrokenImageError, DataFolderError, reason_of
from data.image.buckets import source_of
from data.image.transforms import transforms_of
from data.index.index_file import VERSION, Kept, Table, is_worth_it, places
from data.index.shard_index import index_shards
from data.index.strings import Strings
from data.loading.bytes_split import BytesSplit
from data.source import SplitSource, Wanted
from data.storage import HEAD, find_files, read_bytes

_NUMBERED = re.compile(r"(.*)\{(\d+)\.\.(\d+)\}(.*)")
_STAMPS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "created")
"""What file systems tell of a file that is another after a change; the first known is used."""
_CLASSES = ("classes.json", "classes.txt")


def open_shards(wanted: Wanted) -> SplitSource:
    """Index the shards of the splits that are wanted.

    Raises DataFolderError for shards that are missing or damaged, and for labels that do not fit.
    """
    augment, plain = transforms_of(wanted)
    config = wanted.config
    if not config.data_dir:
        raise DataFolderError("--data_dir is empty: give the folder or URL that holds the shards")
    files = find_files(config.data_dir)
    splits = ("train", "val") if wanted.with_train else ("val",)
    chosen = {split: choose_shards(config, split, files) for split in splits}
    twice = sorted(set(chosen["val"]).intersection(chosen.get("train", ())))
    if twice:
        raise DataFolderError(
            f"{twice[0]} in {config.data_dir} would be in train and in val: give --train_shards "
            "and --val_shards"
        )
    found = {split: _kept(config, split, chosen[split], files) for split in splits}
    classes = _classes(config.data_dir, found, files)
    how = {"train": augment, "val": plain}
    made = {
        split: ShardSplit(wanted, split, table, _labels(wanted, table, classes), how[split])
        for split, table in found.items()
    }
    left_out = sum((Counter(table.info["left_out"]) for table in found.values()), Counter[str]())
    return source_of(wanted, config.data_dir, made.get("train"), made["val"], classes, left_out)


class ShardSplit(BytesSplit):
    """One split (train or val) of shards: a dataset by (epoch, image index)."""

    def __init__(
        self, wanted: Wanted, split: str, table: Table, labels: np.ndarray, transform: Callable
    ) -> None:
        """Take what ``index_shards`` found, and the labels as numbers of the model's classes."""
        super().__init__(wanted, labels, transform, substitutes=split == "train")
        root, shards = wanted.config.data_dir, table.info["shards"]
        self._shards = [os.path.join(root, name) for name, _ in shards]
        self._places = table.arrays
        self._keys = Strings(table.arrays["keys"], table.arrays["ends of keys"])

    def name_of(self, number: int) -> str:
        return f"{self._shards[self._places['shard'][number]]}: {self._keys[number]}"

    def read(self, number: int) -> bytes:
        return self._read(number)

    def head(self, number: int) -> bytes:
        return self._read(number, HEAD)

    def _read(self, number: int, most: int | None = None) -> bytes:
        start, size = (int(self._places[name][number]) for name in ("start", "size"))
        size = min(size, most or size)
        return read_bytes(self._shards[self._places["shard"][number]], start, size)

    def digest(self) -> str:
        digest = xxhash.xxh3_64(self._keys.content.data)
        digest.update(np.ascontiguousarray(self.labels).data)
        return digest.hexdigest()


def choose_shards(config: DataConfig, split: str, files: Mapping[str, Any]) -> list[str]:
    """Return which of the files of ``--data_dir`` are the split's shards, sorted.

    Raises DataFolderError if there are none, or if one is missing that a pattern numbers.
    """
    pattern = config.train_shards if split == "train" else config.val_shards
    flag = f"--{split}_shards"
    if pattern and (numbered := _NUMBERED.fullmatch(pattern)):
        head, first, last, tail = numbered.groups()
        numbers = range(int(first), int(last) + 1)
        names = (f"{head}{number:0{len(first)}}{tail}" for number in numbers)
        chosen = []
        for name in names:
            if name not in files:
                raise DataFolderError(f"{config.data_dir} has no {name} of {flag} {pattern}")
            chosen.append(name)
        if chosen:
            return chosen
    patterns = [pattern] if pattern else [f"{split}/*.tar", f"*{split}*.tar"]
    for each in patterns:
        if chosen := sorted(fnmatch.filter(files, each)):
            return chosen
    raise DataFolderError(
        f"{config.data_dir} has no shards {' or '.join(patterns)}: {flag} says which they are"
    )


def _kept(config: DataConfig, split: str, shards: list[str], files: Mapping[str, Any]) -> Table:
    """Return the index of the shards, read from a file if they have not changed since."""
    stamps = [[shard, _stamp(files[shard])] for shard in shards]
    root = config.data_dir

    def build() -> Table:
        table = index_shards(root, shards)
        return Table(table.arrays, table.info | {"shards": stamps})

    def change(table: Table) -> str | None:
        return None if table.info["shards"] == stamps else "its shards have changed"

    kept = Kept(places(config, root, f"{split}-of-webdataset"), root, {"version": VERSION}, config)
    return kept.load(build, change, functools.partial(is_worth_it, config, "label"))


def _stamp(info: Mapping[str, Any]) -> str:
    changes = next((info[name] for name in _STAMPS if info.get(name) is not None), "")
    return f"{info.get('size')} {changes}"


def _classes(root: str, found: Mapping[str, Table], files: Mapping[str, Any]) -> list[str] | None:
    """Return the classes' names by label: of the file beside the shards, or else of the labels.

    None if neither names any. Raises DataFolderError.
    """
    for file in _CLASSES:
        if file not in files:
            continue
        try:
            text = read_bytes(os.path.join(root, file)).decode()
            names = json.loads(text) if file.endswith(".json") else text.splitlines()
        except (BrokenImageError, ValueError) as error:
            raise DataFolderError(f"{root}/{file} cannot be read: {reason_of(error)}") from None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataFolderError(f"{root}/{file} is no list of names, one of each class")
        return names
    named = [table.info["names"] for table in found.values()]
    if any(names != named[0] for names in named):
        raise DataFolderError(
            f"the classes that the shards of train and val name differ in {root}: put the names "
            "of all, by label, into classes.txt there"
        )
    return named[0]


def _labels(wanted: Wanted, table: Table, classes: list[str] | None) -> np.ndarray:
    """Return the labels as numbers of classes. Raises DataFolderError where they are none."""
    root, labels, names = wanted.config.data_dir, table.arrays["label"], table.info["names"]
    if not len(labels):
        raise DataFolderError(f"there is no image in the shards of {root}")
    if names is not None and names != classes:
        number_of = {name: number for number, name in enumerate(classes or ())}
        missing = [name for name in names if name not in number_of]
        if missing:
            raise DataFolderError(f"a label in {root} is {missing[0]}, which classes.* lacks")
        labels = np.array([number_of[name] for name in names], np.int32)[labels]
    count = len(classes) if classes else int(labels.max()) + 1
    if count > wanted.num_classes:
        raise DataFolderError(f"{root} has {count} classes, --num_classes is {wanted.num_classes}")
    if labels.max() >= count:
        raise DataFolderError(f"a label in {root} is {labels.max()}, of {count} classes by name")
    return labels
