"""Finds where in tar files, the shards of WebDataset, each image lies, and its label.

A sample is the files of one name, its key, up to the first dot after the last slash, as
https://github.com/webdataset/webdataset has it: KEY.jpg and KEY.cls, say.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from array import array
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

from data.errors import DataFolderError, reason_of
from data.index.index_file import Table
from data.index.strings import Strings
from data.own_files import regular
from data.storage import is_url, open_system

_KEY = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)", re.DOTALL)
_LABEL_FIELDS = ("label", "cls")
_AT_ONCE = 16  # shards, which are waited for most of the time where they are far away
Label = int | str
"""A class's number, or its name."""


@dataclass
class _Sample:
    start: int | None = None
    """Where in the shard the image begins, in bytes."""
    size: int = 0
    label: Label | None = None


@dataclass
class _Shard:
    """The samples of one shard, in its order."""

    keys: list[str] = field(default_factory=list)
    starts: array = field(default_factory=lambda: array("q"))
    sizes: array = field(default_factory=lambda: array("q"))
    labels: list[Label] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def index_shards(root: str, shards: Sequence[str]) -> Table:
    """Return where the images of these shards are, in their order, by reading all their headers.

    Its arrays: of each image the "shard"'s number, "start" and "size" in it in bytes, "label"; and
    the keys, as ``Strings``. Its info: "names", which the labels are numbers of, sorted; None if
    the labels were numbers. Raises DataFolderError for a shard that is damaged, and for an image
    without a label.
    """
    paths = [os.path.join(root, shard) for shard in shards]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        scanned = pool.map(_scan, paths)
        bar = tqdm(scanned, f"reading {root}", len(paths), unit=" shards", delay=5, disable=None)
        found = list(bar)
    labels = [label for shard in found for label in shard.labels]
    numbers, names = _numbered(root, labels)
    keys = Strings.of(key for shard in found for key in shard.keys)
    counts = [len(shard.keys) for shard in found]
    arrays = {
        "shard": np.repeat(np.arange(len(found), dtype=np.int32), counts),
        "start": np.concatenate([np.array(shard.starts, np.int64) for shard in found]),
        "size": np.concatenate([np.array(shard.sizes, np.int64) for shard in found]),
        "label": numbers,
        "keys": keys.content,
        "ends of keys": keys.ends,
    }
    left_out = sum((shard.left_out for shard in found), Counter[str]())
    return Table(arrays, {"names": names, "left_out": left_out})


def _numbered(root: str, labels: list[Label]) -> tuple[np.ndarray, list[str] | None]:
    """Return the labels as int32, and the names that they are numbers of, if they were names."""
    names = sorted({label for label in labels if isinstance(label, str)})
    if not names:
        return np.array(labels, np.int32), None
    if any(isinstance(label, int) for label in labels):
        raise DataFolderError(
            f"the labels in the shards of {root} are numbers, but also names, such as {names[0]}: "
            "give them all as numbers"
        )
    number_of = {name: number for number, name in enumerate(names)}
    return np.array([number_of[label] for label in labels], np.int32), names  # type: ignore[index]


def _scan(path: str) -> _Shard:
    """Return what is in a shard. Raises DataFolderError."""
    try:
        with _opened(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            left_out = Counter[str]()
            samples = _samples(path, tar, left_out)
            file.seek(tar.offset)  # of what ended it: zeros, or else tarfile took damage for an end
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("it is cut off or damaged")
            return _shard(path, samples, left_out)
    except DataFolderError:
        raise
    except Exception as error:  # each file system raises what it likes
        raise DataFolderError(f"{path} cannot be read: {reason_of(error)}") from error


def _opened(path: str) -> IO[bytes]:
    if not is_url(path):
        return open(path, "rb", opener=regular)
    system, there = open_system(path)
    return system.open(there, "rb")


def _samples(path: str, tar: tarfile.TarFile, left_out: Counter[str]) -> dict[str, _Sample]:
    """Return what a shard has of each key; ``left_out`` is added to. Raises DataFolderError."""
    samples: dict[str, _Sample] = {}
    for member in tar:
        named = _KEY.fullmatch(member.name)
        if not (named and member.isreg()):
            continue
        key, suffix = named[1], f".{named[2].lower()}"
        if suffix in IMG_EXTENSIONS:
            sample = samples.setdefault(key, _Sample())
            if sample.start is not None:
                raise DataFolderError(f"{path} has two images of the name {key}: remove one")
            sample.start, sample.size = member.offset_data, member.size
        elif suffix in (".cls", ".json"):
            sample = samples.setdefault(key, _Sample())
            if suffix == ".cls" or sample.label is None:
                content = tar.extractfile(member).read()  # type: ignore[union-attr]
                sample.label = _label(f"{path}: {member.name}", suffix, content)
        else:
            left_out[suffix] += 1
    return samples


def _shard(path: str, samples: dict[str, _Sample], left_out: Counter[str]) -> _Shard:
    """Return the samples that have an image. Raises DataFolderError for one without a label."""
    shard = _Shard(left_out=left_out)
    for key, sample in samples.items():
        if sample.start is None:
            shard.left_out["labels without an image"] += 1
            continue
        if sample.label is None:
            raise DataFolderError(
                f"{path}: the image {key} has no label: {key}.cls, or {key}.json with the field "
                f"{' or '.join(_LABEL_FIELDS)}, is needed beside it"
            )
        shard.keys.append(key)
        shard.starts.append(sample.start)
        shard.sizes.append(sample.size)
        shard.labels.append(sample.label)
    return shard


def _label(name: str, suffix: str, content: bytes) -> Label | None:
    """Return the label that a file holds; None for JSON without one. Raises DataFolderError."""
    try:
        text = content.decode().strip()
        if suffix == ".json":
            fields = json.loads(text)
            return next((_checked(fields[each]) for each in _LABEL_FIELDS if each in fields), None)
        return _checked(int(text) if re.fullmatch(r"-?\d+", text, re.ASCII) else text)
    except (ValueError, TypeError) as error:
        raise DataFolderError(f"{name} holds no label: {reason_of(error)}") from None


def _checked(label: Label) -> Label:
    if isinstance(label, str) and label:
        return label
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < 2**31:
        return label
    raise ValueError(f"{label!r} is neither a number from 0 on nor a name")
