"""The source of images in tar files, the shards of WebDataset, each read at its offset in a shard.

So training reads its images in the same order as from any other source, whatever shards they are
in: for any number of processes, and from any step on.

A sample is the files of one name, its key, up to the first dot after the last slash, as
https://github.com/webdataset/webdataset has it: KEY.jpg and KEY.cls, say. Other values of a sample
(``View.values``) are in files such as KEY.txt, or in fields of KEY.json.
"""

import fnmatch
import functools
import itertools
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, NamedTuple, Self

import numpy as np
import xxhash
from tqdm import tqdm

from data import files
from data.config import DataConfig
from data.decode import SUFFIXES
from data.files import (
    BrokenImageError,
    DataFolderError,
    MissingSplitError,
    is_url,
    other_classes,
    reason_of,
)
from data.images import ImageSplit, SampleTransform, source_of_images, view_of_images
from data.index_file import Strings, Table, load_or_build
from data.source import DatasetRequest, DataSource, Value

PACK_FILE = "packing.json"
"""Where ``data.pack`` says whether all shards are there that it writes to a URL."""
Listing = Mapping[str, Mapping[str, Any]]
"""What the file system knows of each file in ``--data_dir``, by its name there."""


def open_shards(request: DatasetRequest) -> DataSource:
    """Index the shards of the splits that are requested. Raises DataFolderError."""
    transforms = view_of_images(request).transforms(request)
    config, root = request.config, request.config.data_dir
    if not root:
        raise DataFolderError(
            "--data_dir is empty: set it to the folder or URL that contains the shards"
        )
    listing = files.find_files(root)
    if not listing and not is_url(root) and not os.path.isdir(root):
        raise DataFolderError(f"--data_dir {root} does not exist")
    if PACK_FILE in listing:
        try:
            state = files.read_bytes(os.path.join(root, PACK_FILE), limit=files.TEXT)
            complete = files.parse_object(state).get("complete")
        except (BrokenImageError, ValueError) as error:
            raise DataFolderError(
                f"{root}/{PACK_FILE} cannot be read: {reason_of(error)}"
            ) from None
        if not complete:
            raise DataFolderError(
                f"{root} is incomplete: run the same data.pack command again to resume"
            )
    chosen = request.find_splits(
        lambda split: choose_shards(config, split, listing, labels=request.labels)
    )
    twice = sorted(set(chosen.get("val", ())).intersection(chosen.get("train", ())))
    if twice:
        raise DataFolderError(
            f"{twice[0]} in {root} matches both train and val: set --train_shards and --val_shards"
        )
    tables = {split: _index(request, split, shards, listing) for split, shards in chosen.items()}
    classes = None
    file = next((name for name in ("classes.json", "classes.txt") if name in listing), None)
    if request.labels and file:
        with files.reporting(f"{root}/{file}", "read"):
            text = files.read_bytes(os.path.join(root, file), limit=files.TEXT).decode()
            classes = json.loads(text) if file.endswith(".json") else text.splitlines()
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise DataFolderError(f"{root}/{file} is not a list of class names")
    elif request.labels:
        names = [table.info["names"] or [] for table in tables.values()]
        classes = names[0] or None
        if difference := other_classes(names[0], names[-1]):
            raise DataFolderError(
                f"{root}: the class names in the train and val shards differ ({difference}): list "
                f"the names of all classes, in label order, in {root}/classes.txt"
            )
    splits = {
        split: ShardSplit(request, split, transforms[split], table, classes)
        for split, table in tables.items()
    }
    return source_of_images(request, root, splits)


class ShardSplit(ImageSplit):
    """One split (train or val) of shards."""

    def __init__(
        self,
        request: DatasetRequest,
        split: str,
        transform: SampleTransform,
        table: Table,
        classes: list[str] | None,
    ) -> None:
        """``table``: what ``_index`` found. Raises DataFolderError."""
        root, shards = request.config.data_dir, table.info["shards"]
        labels, names = table.arrays["label"], table.info["names"]
        if not len(labels):
            raise DataFolderError(f"{root}: the shards contain no images")
        if names is not None and names != classes:
            number_of = {name: number for number, name in enumerate(classes or ())}
            missing = [name for name in names if name not in number_of]
            if missing:
                raise DataFolderError(
                    f"{root} has the label {missing[0]}, which is missing from classes.txt or "
                    "classes.json: add it"
                )
            labels = np.array([number_of[name] for name in names], np.int32)[labels]
        count = len(classes) if classes else int(labels.max()) + 1
        request.check_classes(count, root)
        if labels.max() >= count:
            raise DataFolderError(f"{root} has label {labels.max()}, but only {count} class names")
        left_out = Counter[str](table.info["left_out"])
        super().__init__(request, split, transform, labels, classes, left_out)
        self._shards = [os.path.join(root, name) for name, _ in shards]
        self._places, self._values = table.arrays, request.view.values
        self._keys = Strings(table.arrays["keys"], table.arrays["ends of keys"])

    def name_of(self, number: int) -> str:
        return f"{self._shards[self._places['shard'][number]]}: {self._keys[number]}"

    def read(self, number: int, most: int | None = None) -> bytes:
        start, size = (int(self._places[name][number]) for name in ("start", "size"))
        size = min(size, most or size)
        return files.read_bytes(self._shards[self._places["shard"][number]], start, size)

    def value(self, number: int, name: str) -> Any:
        which, start, size = self._places[f"value {name}"][number].tolist()
        if which == _MISSING:
            return None
        shard, names = self._shards[self._places["shard"][number]], self._values[name].names
        content = files.read_bytes(shard, start, size, limit=_VALUE)
        if which < len(names):
            return content
        try:
            fields = files.parse_object(content)
        except ValueError as error:
            raise BrokenImageError(f"its .json cannot be read: {reason_of(error)}") from None
        return next((fields[each] for each in names if each in fields), None)

    def digest(self) -> str:
        digest = xxhash.xxh3_64(self._keys.content.data)
        digest.update(np.ascontiguousarray(self.labels).data)
        return digest.hexdigest()


_VALUE = files.SizeLimit("a value of a sample", 2**20)
_MISSING = -1


def choose_shards(
    config: DataConfig, split: str, listing: Listing, *, labels: bool = True
) -> list[str]:
    """Return which of the files of ``--data_dir`` are the split's shards, sorted; without
    ``labels``, all are for training if no name says what they are for. Raises DataFolderError if
    there are none, or if one is missing that a pattern numbers."""
    pattern = config.train_shards if split == "train" else config.val_shards
    flag = f"--{split}_shards"
    if pattern and (numbered := re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", pattern)):
        head, first, last, tail = numbered.groups()
        numbers = range(int(first), int(last) + 1)
        chosen = [f"{head}{number:0{len(first)}}{tail}" for number in numbers]
        for name in chosen:
            if name not in listing:
                raise DataFolderError(
                    f"{config.data_dir} has no {name}, which {flag} {pattern} includes"
                )
        if chosen:
            return chosen
    patterns = [pattern] if pattern else [f"{split}/*.tar", f"*{split}*.tar"]
    for wildcards in patterns:
        if chosen := sorted(fnmatch.filter(listing, wildcards)):
            return chosen
    if not labels and not pattern and split == "train" and not config.val_shards:
        shards = sorted(fnmatch.filter(listing, "*.tar"))
        if shards and not fnmatch.filter(shards, "*val*"):
            return shards
    kind = DataFolderError if pattern else MissingSplitError
    raise kind(f"{config.data_dir} has no shards {' or '.join(patterns)}: set {flag}")


# -- the index: where each image is in the shards, and its label -----------------------


Label = int | str
"""A class's number, or its name."""
_KEY = re.compile(r"((?:.*/|)[^./]+)\.([^/]*)", re.DOTALL)
_LABEL_FIELDS = ("label", "cls")


def _index(request: DatasetRequest, split: str, shards: list[str], listing: Listing) -> Table:
    """Return where each image of the shards is, its label (0 if none is requested) and its values,
    from an index file if the shards have not changed. Info: "shards", "left_out", and "names" of
    the classes, sorted, if the labels are names. Raises DataFolderError."""
    config, labels, values = request.config, request.labels, request.view.values
    root = config.data_dir
    stamps = []
    # File systems differ in which field shows a change of a file: the first known is used.
    fields = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "created")
    for shard in shards:
        info = listing[shard]
        changed = next((info[name] for name in fields if info.get(name) is not None), "")
        stamps.append([shard, f"{info.get('size')} {changed}"])

    def build() -> Table:
        paths = [os.path.join(root, shard) for shard in shards]
        with ThreadPoolExecutor(16) as pool:  # mostly they wait, if shards are far away
            scanned = pool.map(functools.partial(_scan, labels=labels, values=values), paths)
            title = files.printable(f"reading {root}")
            bar = tqdm(scanned, title, len(paths), unit=" shards", delay=5, disable=None)
            found = [*bar]
        all_labels = [*itertools.chain(*(each.labels for each in found))]
        names = sorted({label for label in all_labels if isinstance(label, str)})
        number_of = {name: number for number, name in enumerate(names)}
        if names and any(isinstance(label, int) for label in all_labels):
            raise DataFolderError(
                f"{root}: the labels in the shards mix numbers and names, such as {names[0]}: use "
                "numbers for all"
            )
        numbers = [number_of[label] if isinstance(label, str) else label for label in all_labels]
        starts_and_sizes = np.concatenate([each.places for each in found])
        strings = Strings.of(itertools.chain(*(each.keys for each in found)))
        counts = [len(each.keys) for each in found]
        arrays = {
            "shard": np.repeat(np.arange(len(found), dtype=np.int32), counts),
            "start": np.ascontiguousarray(starts_and_sizes[:, 0]),
            "size": np.ascontiguousarray(starts_and_sizes[:, 1]),
            "label": np.array(numbers, np.int32),
            "keys": strings.content,
            "ends of keys": strings.ends,
        }
        for name in values:
            arrays[f"value {name}"] = np.concatenate([each.values[name] for each in found])
        total = sum((each.left_out for each in found), Counter[str]())
        return Table(arrays, {"names": names or None, "left_out": total, "shards": stamps})

    name = split if labels else f"{split}-without-labels"
    if values:
        of_values = json.dumps({each: [*value.names] for each, value in values.items()})
        name += f"-with-{xxhash.xxh3_64_hexdigest(of_values.encode())}"
    return load_or_build(
        config,
        name,
        root,
        build,
        lambda table: None if table.info["shards"] == stamps else "its shards have changed",
        counted="label",
    )


class _Scanned(NamedTuple):
    """The images of a shard, in its order."""

    keys: list[str]
    places: np.ndarray
    """The offset and size of each in bytes, (n, 2), int64."""
    labels: list[Label]
    values: dict[str, np.ndarray]
    """By name, (n, 3), int64: which of ``Value.names`` each value has, or how many these are if it
    is in the ``.json``, or _MISSING; then the offset and size of its file."""
    left_out: Counter[str]
    """How many files are no images, by extension."""


def _scan(path: str, *, labels: bool, values: Mapping[str, Value]) -> _Scanned:
    """Return what is in a shard. Without ``labels`` none is read, and each is 0.

    Raises DataFolderError for a damaged shard, a key with two images, a sample whose images all
    have further dots in their names, an image without a label, and a shard without a value.
    """
    places: dict[str, tuple[int, int] | None] = {}
    label_of: dict[str, Label] = {}
    value_of: dict[str, dict[str, tuple[int, int, int]]] = {name: {} for name in values}
    left_out = Counter[str]()
    dotted: dict[str, str] = {}  # a file with a further dot in its name, by key
    with (
        files.reporting(path, "read"),
        _open(path) as file,
        tarfile.open(fileobj=file, mode="r:", tarinfo=MemberInfo) as tar,
    ):
        for member in regular_members(tar):
            if files.is_hidden(member.name):
                left_out["hidden"] += 1
                continue
            named = _KEY.fullmatch(member.name)
            if not named:
                continue
            key, suffix = named[1], f".{named[2].lower()}"
            is_value = False
            for name, value in values.items():
                if (which := _which(suffix, value.names)) is not None:
                    is_value, place = True, (which, member.offset_data, member.size)
                    value_of[name][key] = min(place, value_of[name].get(key, place))
            if suffix in SUFFIXES:
                if places.get(key):
                    raise DataFolderError(f"{path} has two images with key {key}: remove one")
                places[key] = member.offset_data, member.size
            elif suffix in (".cls", ".json"):
                places.setdefault(key, None)  # samples are in the order of their first files
                if labels and (suffix == ".cls" or key not in label_of):
                    files.TEXT.check(member.size, member.name)
                    content = tar.extractfile(member).read()  # type: ignore[union-attr]
                    label = _label(f"{path}: {member.name}", suffix, content)
                    if label is not None:
                        label_of[key] = label
            elif is_value:
                places.setdefault(key, None)
            else:
                left_out[suffix] += 1
                if suffix.endswith(SUFFIXES):
                    dotted.setdefault(key, member.name)
        file.seek(tar.offset)  # the end is zeros, or else tarfile took damage for the end
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("it is truncated or damaged")

    # Further files of a sample, such as KEY.seg.png, are left out; a whole sample is not.
    for key, name in dotted.items():
        if not places.get(key):
            suffix = os.path.splitext(name)[1]
            raise DataFolderError(
                f"{path}: {name} does not belong to a sample: keys end at the first dot, so the "
                f"image of key {key} must be {key}{suffix}; rename the files to have a single dot"
            )
    images = {key: place for key, place in places.items() if place}
    if len(images) < len(places):
        what = "samples" if values else "labels"
        left_out[f"{what} without an image"] = len(places) - len(images)
    for key in images:
        if labels and key not in label_of:
            raise DataFolderError(
                f"{path}: the image {key} has no label: add {key}.cls, or {key}.json with the "
                f"field {' or '.join(_LABEL_FIELDS)}"
            )
    for name, value in values.items():
        if images and not any(key in value_of[name] for key in images):
            key = next(iter(images))
            file_names = " or ".join(f"{key}.{each}" for each in value.names)
            raise DataFolderError(
                f"{path}: no image has a {name}: neither {file_names} exists, nor {key}.json: set "
                f"{value.flag}"
            )
    return _Scanned(
        [*images],
        np.array(list(images.values()), np.int64).reshape(-1, 2),
        [label_of.get(key, 0) for key in images],
        {name: _rows(found, images) for name, found in value_of.items()},
        left_out,
    )


def _which(suffix: str, names: Sequence[str]) -> int | None:
    """Return which of the ``names`` a file with this extension has, or how many these are if it is
    a ``.json``, which may have any of them as a field; None: it has none."""
    extensions = [f".{name.lower()}" for name in names]
    if suffix in extensions:
        return extensions.index(suffix)
    return len(names) if suffix == ".json" else None


def _rows(found: Mapping[str, tuple[int, int, int]], keys: Iterable[str]) -> np.ndarray:
    places = [found.get(key, (_MISSING, 0, 0)) for key in keys]
    return np.array(places, np.int64).reshape(-1, 3)


_NEGATIVE = "it is damaged: a member's size is negative"


class MemberInfo(tarfile.TarInfo):
    """The header of a tar's member. Headers that hold a long name, for example, are checked before
    tarfile reads them whole."""

    _READ_WHOLE = (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )

    @classmethod
    def frombuf(cls, *arguments: Any) -> Self:
        member = super().frombuf(*arguments)
        if member.size < 0:
            raise tarfile.ReadError(_NEGATIVE)
        if member.type in cls._READ_WHOLE:
            files.TEXT.check(member.size, "a header in it")
        return member


def regular_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar that are files, at ``offset_data``. Raises ReadError for a sparse
    one: its content is not as long as its size."""
    for member in tar:
        if member.size < 0:  # as a pax header says
            raise tarfile.ReadError(_NEGATIVE)
        if member.issparse():
            raise tarfile.ReadError(
                f"{member.name} is a sparse member: pack the files again, without tar's --sparse"
            )
        if member.isreg():
            yield member


def _open(path: str) -> IO[bytes]:
    if not is_url(path):
        return open(path, "rb", opener=files.regular)
    system, name = files.open_system(path)
    return system.open(name, "rb")


def _label(name: str, suffix: str, content: bytes) -> Label | None:
    """Return the label that a file holds; None for JSON without one. Raises DataFolderError."""
    try:
        text = content.decode().strip()
        if suffix == ".json":
            fields = files.parse_object(text)
            field = next((name for name in _LABEL_FIELDS if name in fields), None)
            if field is None:
                return None
            label = fields[field]
        else:
            label = int(text) if re.fullmatch(r"-?\d+", text, re.ASCII) else text
        if isinstance(label, str) and label:
            return label
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < 2**31:
            return label
        raise ValueError(f"{label!r} is neither a non-negative integer nor a name")
    except (ValueError, TypeError) as error:
        raise DataFolderError(f"{name} contains no label: {reason_of(error)}") from None
