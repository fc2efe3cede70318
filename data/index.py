"""Reads a table of files and their labels: CSV with the columns path, label and split."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import functools
import itertools
import json
import os
import socket
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

from data.config import DataConfig
from data.files import (
    DataFolderError,
    cache_folder,
    find_files,
    is_url,
    make_folder,
    printable,
    reason_of,
    regular,
    replace_file,
    subfolders,
)

# ------------------------------------------------------------------------------------------------
# Millions of names in two arrays: processes that share the arrays share the names.


_ENCODING = "utf-8", "surrogateescape"  # file names may hold any byte


class Strings:
    """Strings that lie in an array of bytes, a newline between each and the next.

    A list of them would be copied into each loader process, page by page: to count the references
    to a string is to write to it.
    """

    def __init__(self, content: np.ndarray, ends: np.ndarray) -> None:
        """Take the bytes (uint8), and where in them each string ends (int64)."""
        self.content, self.ends = content, ends

    @classmethod
    def of(cls, strings: Iterable[str]) -> Strings:
        """Return these strings. No two of them are in memory at once if ``strings`` is lazy."""
        content, ends = bytearray(), array("q")
        for string in strings:
            if ends:
                content += b"\n"
            content += string.encode(*_ENCODING)
            ends.append(len(content))
        return cls(np.frombuffer(content, np.uint8), np.frombuffer(ends, np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = self.ends[number - 1] + 1 if number else 0
        return self.content[start : self.ends[number]].tobytes().decode(*_ENCODING)

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))


class Paths:
    """The paths of files of one folder, or their URLs, made of its path and their names in it."""

    def __init__(self, top: str, names: Strings) -> None:
        self.top, self.names = top, names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> str:
        return os.path.join(self.top, self.names[number])

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))


# ------------------------------------------------------------------------------------------------
# Keeps what was found among many files in one file of arrays, which all processes map.
#
# The file is in safetensors' format. It is written under another name and renamed, so that nobody
# ever reads half of one; and it is read as a cache is: what cannot be trusted is made anew.


VERSION = 1
FROM = 10_000
"""Images from which on an index is kept unasked; to find fewer takes less than a second."""
_BESIDE = ".vit_fsdp_index"


@dataclass(frozen=True)
class Table:
    """Arrays of numbers, and what else is known with them, as JSON has it."""

    arrays: dict[str, np.ndarray]
    info: dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """Says where an index is kept, what it must be an index of, and whether to make it anew."""

    paths: Sequence[Path]
    """It is read from and written to the first of these where that can be done."""
    of: str
    """The folder or URL that it tells of."""
    info: dict[str, Any]
    """What its ``Table.info`` must have."""
    config: DataConfig

    def load(
        self,
        build: Callable[[], Table],
        change: Callable[[Table], str | None],
        is_worth_it: Callable[[Table], bool],
    ) -> Table:
        """Return the table that is kept; where it is not usable, build it, and keep it.

        ``change`` says what has changed since a table was built, None if nothing has;
        ``is_worth_it`` whether a table is kept. Of this host's processes one builds it, and
        the others wait. Raises DataFolderError if ``--index_dir`` cannot be written to.
        """
        began = time.time()
        found, why = self._usable(change, began)
        if found:
            return found
        with _one_at_a_time(self.of):
            found, _ = self._usable(change, began)  # what another has just built
            if found:
                return found
            if why:
                _say(f"the index of {self.of} is made anew: {why}")
            table = build()
            return self._keep(table, time.time() - began) if is_worth_it(table) else table

    def _usable(self, change: Callable, began: float) -> tuple[Table | None, str | None]:
        """Return the table that is kept, or why it is of no use; neither if there is none."""
        why = None
        for path in self.paths:
            try:
                table = _read(path)
                if not self.info.items() <= table.info.items():
                    raise ValueError("it is another version's")
                if self.config.rebuild_index and table.info["built"] < began:
                    raise ValueError("--rebuild_index")
                if said := change(table):
                    raise ValueError(said)
                return table, None
            except FileNotFoundError:
                continue
            except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
                why = reason_of(error)
        return None, why

    def _keep(self, table: Table, took: float) -> Table:
        """Write the table and return it as it is read: mapped from its file."""
        info = table.info | self.info | {"built": time.time()}
        info["checksum"] = _checksum(table.arrays, info)
        content = save(table.arrays, {"info": json.dumps(info)})
        for path in self.paths:
            unfinished = f"{socket.gethostname()}.{os.getpid()}"
            try:
                make_folder(path.parent)
                replace_file(path, content, unfinished=unfinished)
                kept = _read(path)
            except OSError as error:
                why = reason_of(error)
                with contextlib.suppress(OSError):
                    path.with_name(f"{path.name}.{unfinished}").unlink()
                continue
            _say(f"the index of {self.of} took {took:.1f} s, and is kept as {path}")
            return kept
        if self.config.index_dir is not None:
            raise DataFolderError(f"--index_dir {self.config.index_dir} cannot be used: {why}")
        _say(f"the index of {self.of} cannot be kept ({why}): --index_dir names a place for it")
        return table


def places(config: DataConfig, root: str, name: str) -> list[Path]:
    """Return where the index called ``name`` of what is in ``root`` may be, the best place first.

    That is ``--index_dir``; or else beside the images, or else, as for URLs, in the cache folder.
    """
    whose = root if is_url(root) else os.path.abspath(root)
    marked = f"{name}-{xxhash.xxh3_64(whose.encode(errors='surrogateescape')).hexdigest()}"
    if config.index_dir is not None:
        return [Path(config.index_dir) / marked]
    beside = [] if is_url(root) else [Path(root) / _BESIDE / name]
    return [*beside, cache_folder() / marked]


def is_worth_it(config: DataConfig, array: str, table: Table) -> bool:
    """Tell whether a table is kept: of many images (``array`` has a number of each), of those far
    away, and where it is asked for."""
    asked = config.index_dir is not None or is_url(config.data_dir)
    return asked or len(table.arrays[array]) >= FROM


def _read(path: Path) -> Table:
    """Return the table in a file, whose arrays lie in the file; raises what safetensors raises."""
    with safe_open(path, "pt") as file:  # "numpy" would copy the arrays
        info = json.loads((file.metadata() or {})["info"])
        arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    if info.pop("checksum") != _checksum(arrays, info):
        raise ValueError("its checksum is wrong")
    return Table(arrays, info)


def _checksum(arrays: dict[str, np.ndarray], info: dict[str, Any]) -> str:
    digest = xxhash.xxh3_64(json.dumps(info, sort_keys=True).encode())
    for name, values in sorted(arrays.items()):
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


@contextlib.contextmanager
def _one_at_a_time(of: str) -> Iterator[None]:
    """Let one process of this host after the other in, where the system can.

    The folder itself is locked, so that no file is left behind; NFS cannot do that.
    """
    with contextlib.ExitStack() as stack:
        for folder in (of, tempfile.gettempdir()):
            try:
                opened = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, opened)
                fcntl.flock(opened, fcntl.LOCK_EX)
                break
            except OSError:
                continue
        yield


def _say(line: str) -> None:
    print(f"note: {printable(line)}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------
# Finds which files of ``<root>/<split>/<class>/`` are images of which class, in one walk.


SPLITS = ("train", "val")
_SHOWN = 5  # names of many


@dataclass(frozen=True)
class FolderIndex:
    """Lists the images of one split, in the order of torchvision's ``ImageFolder``."""

    classes: list[str]
    """The names of the classes, by label."""
    paths: Paths
    labels: np.ndarray
    """Of each path, int32."""
    left_out: Counter[str] = field(default_factory=Counter)
    """How many files of the split are no images, by extension."""
    folders: Sequence[str] = ()
    """The folders that were looked into."""

    def digest(self) -> str:
        """Return a checksum of the files' names below the split, in order."""
        return xxhash.xxh3_64(self.paths.names.content.data).hexdigest()


def index_split(root: str, split: str, suffixes: tuple[str, ...] = IMG_EXTENSIONS) -> FolderIndex:
    """Find the images of a split, in its class folders and any folder below them.

    The names of images end in one of ``suffixes``, in small or capital letters.

    Links to folders are followed. Raises DataFolderError for a folder that cannot be read, for
    a class without images, and where a link makes the same images count twice.
    """
    top, left_out = os.path.join(root, split), Counter[str]()
    if is_url(root):
        return _index(top, _listed(top, left_out), suffixes, left_out)
    real_top = os.path.realpath(top)
    reached = {real_top: top}
    entries = _scan(top)
    folders = [entry for entry in entries if _is_folder(entry)]
    _refuse_lost_links(entries)
    if len(entries) > len(folders):
        left_out["in no class folder"] = len(entries) - len(folders)

    def walked() -> Iterator[_Class]:
        for folder in tqdm(folders, f"listing {top}", unit=" classes", delay=5, disable=None):
            found = sorted(_walk(folder, real_top, reached), key=lambda found: found[0])
            yield folder.name, ((e.path, _may_be_read(e)) for _, files in found for e in files)

    index = _index(top, walked(), suffixes, left_out)
    return replace(index, folders=list(reached.values()))


_Class = tuple[str, Iterable[tuple[str, bool]]]
"""A class's name, and of each file in its order the path, and whether it may be an image."""


def _index(
    top: str, classes: Iterable[_Class], suffixes: tuple[str, ...], left_out: Counter[str]
) -> FolderIndex:
    """Return the index of these classes; ``left_out`` is added to."""
    names, labels, empty = [], array("i"), []

    def images() -> Iterator[str]:
        for label, (name, files) in enumerate(classes):
            names.append(name)
            before = len(labels)
            for path, may_be_read in files:
                if may_be_read and path.lower().endswith(suffixes):
                    labels.append(label)
                    yield path[len(top) + 1 :]
                else:
                    suffix = os.path.splitext(path)[1].lower()
                    left_out[suffix or "no extension"] += 1
            if len(labels) == before:
                empty.append(name)

    paths = Paths(top, Strings.of(images()))
    if empty:
        raise DataFolderError(
            f"{top} has class folders without images: {_some(empty)}; add images "
            f"({', '.join(suffixes)}) or remove them"
        )
    return FolderIndex(names, paths, np.array(labels, np.int32), left_out)


def _listed(top: str, left_out: Counter[str]) -> Iterator[_Class]:
    """Yield the classes at a URL, with their files in the order of a folder's."""
    by_class: dict[str, list[tuple[str, str]]] = {}
    for file in find_files(top):
        folder, _, name = file.rpartition("/")
        if folder:
            by_class.setdefault(folder.partition("/")[0], []).append((folder, name))
        else:
            left_out["in no class folder"] += 1
    for name in sorted(by_class):
        yield name, ((f"{top}/{folder}/{file}", True) for folder, file in sorted(by_class[name]))


def class_folders(root: str, split: str) -> list[str] | None:
    """Return the names of a split's classes by label; None if there is no such folder.

    Raises DataFolderError for a folder or URL that cannot be listed.
    """
    path = os.path.join(root, split)
    if is_url(root):
        return subfolders(path)
    if not os.path.isdir(path):
        return None
    return [entry.name for entry in _scan(path) if _is_folder(entry)]


def check_folder(
    root: str,
    num_classes: int,
    splits: Sequence[str] = SPLITS,
    suffixes: tuple[str, ...] = IMG_EXTENSIONS,
) -> None:
    """Refuse a folder that cannot be used, in one line, before its images are looked for.

    Raises DataFolderError for a missing or empty split, class folders that differ
    between the splits, or more classes than ``num_classes``.
    """
    if not root:
        raise DataFolderError("--data_dir is empty: give the folder that holds train/ and val/")
    classes: dict[str, list[str]] = {}
    for split in splits:
        path, names = os.path.join(root, split), class_folders(root, split)
        if names is None:
            what = "is not a folder" if os.path.exists(path) else "does not exist"
            needed = " and ".join(f"{name}/<class>/*" for name in splits)
            raise DataFolderError(f"{path} {what}: --data_dir requires {needed} images")
        classes[split] = names
        if not names:
            raise DataFolderError(
                f"{path} holds no class folders: --data_dir requires {split}/<class>/* images "
                f"({', '.join(suffixes)})"
            )
    for split, other in itertools.permutations(splits, 2):
        names = sorted(set(classes[split]) - set(classes[other]))
        if names:
            raise DataFolderError(
                f"the class folders of train and val differ in {root}: only {split} has "
                f"{_some(names)}"
            )
    found = len(classes[splits[0]])
    if found > num_classes:
        raise DataFolderError(f"{root} has {found} classes, --num_classes is {num_classes}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _scan(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DataFolderError(f"{path} cannot be read: {error.strerror}") from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads round in a circle, or to where nobody may look
        return False


def _may_be_read(entry: os.DirEntry[str]) -> bool:
    """Tell whether an entry is no pipe: reading it would wait for ever. A link is looked at when
    it is read."""
    return entry.is_symlink() or entry.is_file()


def _refuse_lost_links(entries: list[os.DirEntry[str]]) -> None:
    """Raise DataFolderError if a class is a link to nothing: a class whose disk is not mounted
    would shift the labels of all after it."""
    for entry in entries:
        if entry.is_symlink() and not os.path.exists(entry.path):
            raise DataFolderError(
                f"{entry.path} is a link to {os.readlink(entry.path)}, which cannot be reached: "
                "mend or remove it"
            )


def _walk(
    folder: os.DirEntry[str], real_parent: str, reached: dict[str, str]
) -> Iterator[tuple[str, list[os.DirEntry[str]]]]:
    """Yield ``folder`` and each folder below it: its path and its files, sorted by name.

    ``reached`` has the path by which each real folder was reached so far, and is added to.
    """
    linked = folder.is_symlink()
    real = os.path.realpath(folder.path) if linked else os.path.join(real_parent, folder.name)
    if linked and os.path.commonpath([real, real_parent]) == real:
        raise DataFolderError(
            f"{folder.path} is a link to {real}, a folder that it is in itself: images would "
            "count twice, remove the link"
        )
    if real in reached:
        raise DataFolderError(
            f"{folder.path} and {reached[real]} are the same folder, {real}: images would count "
            "twice, remove one"
        )
    reached[real] = folder.path
    files = []
    for entry in _scan(folder.path):
        if _is_folder(entry):
            yield from _walk(entry, real, reached)
        else:
            files.append(entry)
    yield folder.path, files


# ------------------------------------------------------------------------------------------------
# Lists a split's images once: the index of many files is kept, and read as long as it is right.


_SETTLED = 2  # seconds after which a folder that changes again has another time


def kept_split(
    config: DataConfig, split: str, suffixes: tuple[str, ...] = IMG_EXTENSIONS
) -> FolderIndex:
    """Return what ``index_split`` returns, read from a file if the split has not changed since.

    A folder has changed if a folder below it has another time of modification than when it
    was listed, as it has when a file is added, removed or renamed in it; what is at a URL, if it
    has other class folders. Raises DataFolderError, see ``index_split`` and ``Kept.load``.
    """
    root, top = config.data_dir, os.path.join(config.data_dir, split)
    info = {"version": VERSION, "suffixes": list(suffixes)}
    kept = Kept(places(config, root, f"{split}-of-{config.data_source}"), top, info, config)
    table = kept.load(
        functools.partial(_build, root, split, suffixes),
        functools.partial(_change, root, split),
        lambda table: table.info["settled"] and is_worth_it(config, "labels", table),
    )
    arrays = table.arrays
    names = Strings(arrays["names"], arrays["ends of names"])
    left_out = Counter(table.info["left_out"])
    return FolderIndex(table.info["classes"], Paths(top, names), arrays["labels"], left_out)


def _build(root: str, split: str, suffixes: tuple[str, ...]) -> Table:
    began = time.time()
    index = index_split(root, split, suffixes)
    top = index.paths.top
    folders = Strings.of(os.path.relpath(folder, top) for folder in index.folders)
    changed = np.array([os.stat(folder).st_mtime_ns for folder in index.folders], np.int64)
    info = {
        "classes": index.classes,
        "left_out": index.left_out,
        # A file that is added right after a folder was listed may not change the folder's time.
        "settled": not (changed > (began - _SETTLED) * 1e9).any(),
    }
    names = index.paths.names
    arrays = {"names": names.content, "ends of names": names.ends, "labels": index.labels}
    arrays |= {"folders": folders.content, "ends of folders": folders.ends, "changed": changed}
    return Table(arrays, info)


def _change(root: str, split: str, table: Table) -> str | None:
    """Return what has changed since the table was built; None if nothing has."""
    if is_url(root):
        same = class_folders(root, split) == table.info["classes"]
        return None if same else "the class folders are others"
    folders = Strings(table.arrays["folders"], table.arrays["ends of folders"])
    for folder, before in zip(folders, table.arrays["changed"].tolist(), strict=True):
        path = os.path.join(root, split, folder)
        try:
            now = os.stat(path).st_mtime_ns
        except OSError:
            now = None
        if now != before:
            return f"{printable(os.path.normpath(path))} has changed"
    return None


# ------------------------------------------------------------------------------------------------


_COLUMNS = ("path", "label", "split")


def read_labels(file: str, root: str, num_classes: int, splits: Sequence[str]) -> list[FolderIndex]:
    """Return the files of each of ``splits``, in the table's order; paths are relative to ``root``.

    Labels are numbered in the order of their sorted names, those of all splits together. Raises
    DataFolderError for a table that cannot be read or used.
    """
    rows = _rows(file)
    classes = sorted({label for _, label, _ in rows})
    if len(classes) > num_classes:
        raise DataFolderError(f"{file} has {len(classes)} labels, --num_classes is {num_classes}")
    number_of = {name: label for label, name in enumerate(classes)}
    found = []
    for split in splits:
        of_split = [row for row in rows if row[2] == split]
        if not of_split:
            raise DataFolderError(f"{file} has no file whose split is {split}")
        paths = Paths(root, Strings.of(path for path, *_ in of_split))
        labels = np.array([number_of[label] for _, label, _ in of_split], np.int32)
        found.append(FolderIndex(classes, paths, labels))
        first = paths[0]
        if not os.path.exists(first):
            raise DataFolderError(
                f"{file} names {first}, which is not there: its paths begin at --data_dir"
            )
    return found


def _rows(file: str) -> list[tuple[str, str, str]]:
    """Return path, label and split of each row."""
    rows: dict[str, tuple[str, str, str]] = {}
    try:
        with open(file, newline="", encoding="utf-8-sig", opener=regular) as stream:
            table = csv.DictReader(stream)
            missing = [name for name in _COLUMNS if name not in (table.fieldnames or ())]
            if missing:
                raise DataFolderError(
                    f"{file} has no column {missing[0]}: --labels requires path,label,split in its "
                    "first line"
                )
            for row in table:
                path, label, split = ((row[name] or "").strip() for name in _COLUMNS)
                where = f"line {table.line_num} of {file}"
                if not (path and label):
                    raise DataFolderError(f"{where} has no {'label' if path else 'path'}")
                if split not in SPLITS:
                    raise DataFolderError(f"{where} has the split {split!r}: it is train or val")
                if path in rows:
                    raise DataFolderError(f"{where} names {path} again: remove one of the two")
                rows[path] = path, label, split
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataFolderError(f"--labels {file} cannot be read: {reason_of(error)}") from None
    return list(rows.values())
