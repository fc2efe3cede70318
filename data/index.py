"""Which files of a split are images of which class; and index files that spare finding it again.

The images are found in class folders, or anywhere below one folder if they have no labels
(``index_split``), or a CSV table lists them (``read_labels``). What was found among many files is
saved as arrays in an index file (``load_or_build``), which all processes map into memory.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import itertools
import json
import os
import re
import socket
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import safe_open
from safetensors.numpy import save
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

from data import files
from data.config import DataConfig
from data.files import (
    DataFolderError,
    MissingSplitError,
    first_of,
    is_url,
    other_classes,
    printable,
    reason_of,
)

SPLITS = ("train", "val")

# -- millions of names in two arrays ---------------------------------------------------


_ENCODING = "utf-8", "surrogateescape"  # file names may hold any byte


@dataclass(frozen=True)
class Strings:
    """Strings in one array of bytes, with a newline between each and the next.

    Loader processes share it. A list of strings would be copied into each of them, page by page:
    counting the references to a string writes to it.
    """

    content: np.ndarray
    """The bytes, uint8."""
    ends: np.ndarray
    """Where in them each string ends, int64."""
    folder: str = ""
    """A folder, or a URL, in which the strings are names of files; they are read as whole paths."""

    @classmethod
    def of(cls, strings: Iterable[str], folder: str = "") -> Strings:
        """Return these strings. No two of them are in memory at once if ``strings`` is lazy."""
        content, ends = bytearray(), array("q")
        for string in strings:
            if ends:
                content += b"\n"
            content += string.encode(*_ENCODING)
            ends.append(len(content))
        return cls(np.frombuffer(content, np.uint8), np.frombuffer(ends, np.int64), folder)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: int) -> str:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = self.ends[number - 1] + 1 if number else 0
        string = self.content[start : self.ends[number]].tobytes().decode(*_ENCODING)
        return os.path.join(self.folder, string)

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))


# -- index files -----------------------------------------------------------------------
#
# An index file is in safetensors' format. It is written under another name and renamed, so that
# nobody ever reads half of one. It is a cache: what cannot be trusted is built again.


VERSION = 2
MIN_IMAGES = 10_000
"""Images from which on an index is saved unasked; finding fewer takes less than a second."""


@dataclass(frozen=True)
class Table:
    """Arrays of numbers, and what else is known with them, as JSON has it."""

    arrays: dict[str, np.ndarray]
    info: dict[str, Any]


def load_or_build(
    config: DataConfig,
    name: str,
    of: str,
    build: Callable[[], Table],
    change: Callable[[Table], str | None],
    *,
    counted: str,
    beside: bool = True,
) -> Table:
    """Return the table in the index file ``name``; if it is unusable, build it, and save it.

    The file is in ``--index_dir``, or else beside the images, or else, as for URLs and without
    ``beside``, in the cache folder: in the first of them that can be written to. It is saved for
    many images (the array ``counted`` has a number for each), for those at a URL, and with
    ``--index_dir``; but not if the table's info has "settled": False. One process of this host
    builds it, and the others wait.

    ``of``: the folder or URL that is indexed. ``change`` returns what has changed there since a
    table was built, None if nothing has.

    Raises DataFolderError if ``--index_dir`` cannot be written to.
    """
    started, root = time.time(), config.data_dir
    # Where the file may be, the best place first.
    name = f"{name}-of-{config.data_source}"
    whose = root if is_url(root) else os.path.abspath(root)
    marked = f"{name}-{xxhash.xxh3_64(whose.encode(errors='surrogateescape')).hexdigest()}"
    if config.index_dir is not None:
        paths = [Path(config.index_dir) / marked]
    else:
        paths = [files.cache_folder() / marked]
        if beside and not is_url(root):
            paths.insert(0, Path(root) / ".vit_fsdp_index" / name)

    def load() -> tuple[Table | None, str | None]:
        """Return the saved table, or why it is unusable; neither if there is none."""
        why = None
        for path in paths:
            try:
                table = _read(path)
                if table.info["version"] != VERSION:
                    raise ValueError("it is of another version")
                if config.rebuild_index and table.info["built"] < started:
                    raise ValueError("--rebuild_index")
                if changed := change(table):
                    raise ValueError(changed)
                return table, None
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                why = reason_of(error)
        return None, why

    def log(line: str) -> None:
        print(printable(line), file=sys.stderr, flush=True)

    found, why = load()
    if found:
        return found
    with contextlib.ExitStack() as stack:
        # One process after the other, where the system can: NFS cannot lock a folder. That of the
        # images is locked, so that no file is left behind.
        for folder in (of, tempfile.gettempdir()):
            try:
                opened = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, opened)
                fcntl.flock(opened, fcntl.LOCK_EX)
                break
            except OSError:
                continue
        found, _ = load()  # what another process has just built
        if found:
            return found
        if why:
            log(f"note: the index of {of} is rebuilt: {why}")
        table = build()
        is_far_or_many = is_url(root) or len(table.arrays[counted]) >= MIN_IMAGES
        is_settled = table.info.get("settled", True)
        if not (is_settled and (is_far_or_many or config.index_dir is not None)):
            return table
        took = time.time() - started
        info = table.info | {"version": VERSION, "built": time.time()}
        info["checksum"] = _checksum(table.arrays, info)
        content = save(table.arrays, {"info": json.dumps(info)})
        for path in paths:
            unfinished = f"{socket.gethostname()}.{os.getpid()}"
            try:
                files.make_folder(path.parent)
                files.replace_file(path, content, unfinished=unfinished)
                saved = _read(path)  # mapped from its file
            except OSError as error:
                why = reason_of(error)
                with contextlib.suppress(OSError):
                    path.with_name(f"{path.name}.{unfinished}").unlink()
                continue
            log(f"note: the index of {of} was built in {took:.1f} s and saved as {path}")
            return saved
    if config.index_dir is not None:
        raise DataFolderError(f"--index_dir {config.index_dir} cannot be used: {why}")
    log(
        f"warning: the index of {of} cannot be saved ({why}): give a folder for it with --index_dir"
    )
    return table


def _read(path: Path) -> Table:
    """Return the table in a file, with its arrays mapped. Raises OSError, and ValueError if it is
    damaged."""
    try:
        with safe_open(path, "pt") as file:  # "numpy" would copy the arrays
            info = files.parse_object((file.metadata() or {})["info"])
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
        if info.pop("checksum") != _checksum(arrays, info):
            raise ValueError("its checksum is wrong")
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - safetensors and PyTorch fail in any way
        raise ValueError(reason_of(error)) from None
    return Table(arrays, info)


def _checksum(arrays: dict[str, np.ndarray], info: dict[str, Any]) -> str:
    digest = xxhash.xxh3_64(json.dumps(info, sort_keys=True).encode())
    for name, values in sorted(arrays.items()):
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


# -- images in <root>/<split>/<class>/ -------------------------------------------------


@dataclass(frozen=True)
class FolderIndex:
    """The images of one split, in the order of torchvision's ``ImageFolder``."""

    classes: list[str] | None
    """The names of the classes, by label; None for images without labels."""
    paths: Strings
    """The paths or URLs of the images, in their folder."""
    labels: np.ndarray
    """The label of each path, int32."""
    left_out: Counter[str] = field(default_factory=Counter)
    """How many files of the split are not images, by extension, and how many are hidden."""
    folders: Sequence[str] = ()
    """The folders that were listed."""

    def digest(self) -> str:
        """Return a checksum of the files' names below the split, in order."""
        return xxhash.xxh3_64(self.paths.content.data).hexdigest()


def check_folder(
    root: str,
    num_classes: int,
    splits: Sequence[str] = SPLITS,
    suffixes: tuple[str, ...] = IMG_EXTENSIONS,
    class_map: str | None = None,
) -> None:
    """Refuse an unusable folder, in one line, before its images are listed.

    Raises DataFolderError for a missing or empty split, class folders that differ between the
    splits or are not in the file ``class_map``, or more classes than ``num_classes``.
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
    if len(splits) > 1 and (difference := other_classes(classes["train"], classes["val"])):
        raise DataFolderError(f"the class folders of train and val differ in {root}: {difference}")
    found = len(in_order(classes[splits[0]], class_map=class_map))
    if found > num_classes:
        where = root if class_map is None else f"--class_map {class_map}"
        raise DataFolderError(f"{where} has {found} classes, --num_classes is {num_classes}")


def in_order(
    folders: list[str], class_order: str | None = None, class_map: str | None = None
) -> list[str]:
    """Return the names of class folders, which are sorted, in the order of their labels: that of
    the file ``class_map``, or else ``class_order``.

    Raises DataFolderError for a file that cannot be read, or lacks one of them.
    """
    if class_map is None:
        return sorted(folders, key=_natural_key) if class_order == "natural" else folders
    try:
        with open(class_map, encoding="utf-8-sig", opener=files.regular) as file:
            names = [line.strip() for line in file.read().rstrip().split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise DataFolderError(f"--class_map {class_map}: {reason_of(error)}") from None
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise DataFolderError(
            f"--class_map {class_map} has {name or 'an empty line'} {times} times"
        )
    if missing := sorted(set(folders) - set(names)):
        raise DataFolderError(
            f"--class_map {class_map} has no {first_of(missing)}, which the images have: it needs "
            "the name of each class folder, one a line"
        )
    return names


def _natural_key(name: str) -> list[str | int]:
    """Return what timm sorts class folders by (``timm.utils.misc.natural_key``)."""
    return [int(s) if s.isdecimal() else s for s in re.split(r"(\d+)", name.lower())]


def folder_of_images(root: str, split: str) -> str:
    """Return the folder of a split's images that have no labels: they are anywhere below it.

    It is the one with the split's name or, without folders of train and val, the root itself, whose
    images are all for training. Raises MissingSplitError if there is none.
    """
    if not root:
        raise DataFolderError("--data_dir is empty: give the folder that holds the images")
    there = {name for name in SPLITS if class_folders(root, name) is not None}
    if split in there:
        return os.path.join(root, split)
    if there or split != "train":
        raise MissingSplitError(
            f"{os.path.join(root, split)} is not a folder: images without labels are in "
            f"{split}/, or all images for training in a --data_dir without train/ and val/"
        )
    if class_folders(root, "") is None:
        raise DataFolderError(f"--data_dir {root} is not a folder")
    return root.rstrip("/")


def class_folders(root: str, split: str) -> list[str] | None:
    """Return the names of a split's class folders, sorted; None if there is no such folder.

    Raises DataFolderError for a folder or URL that cannot be listed.
    """
    path = os.path.join(root, split)
    if is_url(root):
        return files.subfolders(path)
    if not os.path.isdir(path):
        return None
    return [entry.name for entry in _scan(path, Counter()) if _is_folder(entry)]


def cached_split(
    config: DataConfig,
    split: str,
    suffixes: tuple[str, ...] = IMG_EXTENSIONS,
    *,
    labels: bool = True,
) -> FolderIndex:
    """Return what ``index_split`` returns, read from an index file if the split has not changed.

    A split on disk has changed if a folder has another modification time than when it was listed,
    as it has when a file is added, removed or renamed in it; one at a URL, if it has other class
    folders. Raises DataFolderError, see ``index_split``, ``folder_of_images`` and
    ``load_or_build``.
    """
    root = config.data_dir
    top = os.path.join(root, split) if labels else folder_of_images(root, split)
    name = split if labels else f"{split}-without-labels"

    def build() -> Table:
        started = time.time()
        index = index_split(top, suffixes, labels=labels)
        folders = Strings.of(os.path.relpath(folder, top) for folder in index.folders)
        changed = np.array([os.stat(folder).st_mtime_ns for folder in index.folders], np.int64)
        # A file that is added right after a folder was listed may not change the folder's time:
        # an index of folders that changed within the last 2 seconds is not saved.
        is_settled = not (changed > (started - 2) * 1e9).any()
        names = index.paths
        arrays = {"names": names.content, "ends of names": names.ends, "labels": index.labels}
        arrays |= {"folders": folders.content, "ends of folders": folders.ends, "changed": changed}
        # Without labels the folders at a URL are listed only to see whether they have changed.
        listed = files.subfolders(top) if is_url(root) and not labels else index.classes
        info = {"classes": listed, "left_out": index.left_out, "settled": is_settled}
        return Table(arrays, info | {"suffixes": list(suffixes)})

    def change(table: Table) -> str | None:
        if table.info["suffixes"] != list(suffixes):
            return "other files count as images now"
        if is_url(root):
            same = files.subfolders(top) == table.info["classes"]
            return None if same else "the class folders are others"
        folders = Strings(table.arrays["folders"], table.arrays["ends of folders"])
        for folder, before in zip(folders, table.arrays["changed"].tolist(), strict=True):
            path, now = os.path.join(top, folder), None
            with contextlib.suppress(OSError):
                now = os.stat(path).st_mtime_ns
            if now != before:
                return f"{printable(os.path.normpath(path))} has changed"
        return None

    # Writing an index beside images would change their folder, if they are in the root itself.
    is_root = top == root.rstrip("/")
    table = load_or_build(config, name, top, build, change, counted="labels", beside=not is_root)
    paths = Strings(table.arrays["names"], table.arrays["ends of names"], top)
    left_out = Counter[str](table.info["left_out"])
    if not labels:
        return FolderIndex(None, paths, table.arrays["labels"], left_out)
    # The index has the folders sorted, however they are numbered.
    found: list[str] = table.info["classes"]
    classes = in_order(found, config.class_order, config.class_map)
    numbers = table.arrays["labels"]
    if classes != found:
        label_of = {name: label for label, name in enumerate(classes)}
        numbers = np.array([label_of[name] for name in found], np.int32)[numbers]
    return FolderIndex(classes, paths, numbers, left_out)


def index_split(
    top: str, suffixes: tuple[str, ...] = IMG_EXTENSIONS, *, labels: bool = True
) -> FolderIndex:
    """Find the images of the split in ``top``, a folder or URL, in one walk.

    They are in class folders and any folder below them; without ``labels`` in ``top`` and any
    folder below it, and have label 0. The names of images end in one of ``suffixes``, in small or
    capital letters. Links to folders are followed. Raises DataFolderError for a folder that cannot
    be read, for a class, or a folder, without images, and where a link makes the same images count
    twice.
    """
    left_out, reached = Counter[str](), dict[str, str]()
    names, labels_of, empty = [], array("i"), []

    def images() -> Iterator[str]:
        for label, (name, inside) in enumerate(_classes(top, left_out, reached, labels)):
            names.append(name)
            before = len(labels_of)
            for path, may_be_read in inside:
                if may_be_read and path.lower().endswith(suffixes):
                    labels_of.append(label)
                    yield path[len(top) + 1 :]
                else:
                    left_out[os.path.splitext(path)[1].lower() or "no extension"] += 1
            if len(labels_of) == before:
                empty.append(name)

    paths = Strings.of(images(), top)
    numbers, folders = np.array(labels_of, np.int32), [*reached.values()]
    if not labels:
        if not len(paths):
            raise DataFolderError(f"{top} holds no images ({', '.join(suffixes)})")
        return FolderIndex(None, paths, numbers, left_out, folders)
    if empty:
        raise DataFolderError(
            f"{top} has class folders without images: {first_of(empty)}; add images "
            f"({', '.join(suffixes)}) or remove them"
        )
    return FolderIndex(names, paths, numbers, left_out, folders)


_Class = tuple[str, Iterable[tuple[str, bool]]]
"""The name of a class; and its files in order: each one's path, and whether it can be read."""


def _classes(
    top: str, left_out: Counter[str], reached: dict[str, str], labels: bool
) -> Iterator[_Class]:
    """Yield the classes in a folder or at a URL; without ``labels`` one class of all files.

    ``reached`` becomes the path of each real folder listed.
    """
    if is_url(top):  # the same files in the same order as of a folder
        by_class: dict[str, list[tuple[str, str]]] = {}
        for file in files.find_files(top, left_out):
            inside, _, name = file.rpartition("/")
            if inside or not labels:
                found = inside.partition("/")[0] if labels else ""
                by_class.setdefault(found, []).append((inside, name))
            else:
                left_out["in no class folder"] += 1
        for name in sorted(by_class):
            files_of = ("/".join(filter(None, each)) for each in sorted(by_class[name]))
            yield name, ((f"{top}/{file}", True) for file in files_of)
        return
    reached[os.path.realpath(top)] = top
    folders, files_here = list[os.DirEntry[str]](), list[os.DirEntry[str]]()
    for entry in _scan(top, left_out):
        (folders if _is_folder(entry) else files_here).append(entry)
    if not labels:
        below = (each for folder in folders for each in _walk(folder, reached, left_out))
        yield "", _files(itertools.chain([(top, files_here)], below))
        return
    for entry in files_here:
        # A class whose disk is not mounted would shift the labels of all after it.
        if entry.is_symlink() and not os.path.exists(entry.path):
            raise DataFolderError(
                f"{entry.path} is a link to {os.readlink(entry.path)}, which cannot be reached: "
                "mend or remove it"
            )
        left_out["in no class folder"] += 1
    for folder in tqdm(folders, f"listing {top}", unit=" classes", delay=5, disable=None):
        yield folder.name, _files(_walk(folder, reached, left_out))


_Listed = tuple[str, list[os.DirEntry[str]]]
"""The path of a folder, and the files in it, sorted by name."""


def _files(folders: Iterable[_Listed]) -> Iterator[tuple[str, bool]]:
    """Yield the files of ``folders``, as ``_Class`` has them."""
    for _, inside in sorted(folders, key=lambda found: found[0]):
        # Reading a pipe would wait for ever. What a link leads to is checked when it is read.
        yield from ((entry.path, entry.is_symlink() or entry.is_file()) for entry in inside)


def _walk(
    folder: os.DirEntry[str], reached: dict[str, str], left_out: Counter[str]
) -> Iterator[_Listed]:
    """Yield ``folder`` and each folder below it: its path and its files, sorted by name."""
    real, real_parent = (os.path.realpath(each) for each in (folder, os.path.dirname(folder)))
    if folder.is_symlink() and os.path.commonpath([real, real_parent]) == real:
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
    inside = []
    for entry in _scan(folder.path, left_out):
        if _is_folder(entry):
            yield from _walk(entry, reached, left_out)
        else:
            inside.append(entry)
    yield folder.path, inside


def _scan(path: str, left_out: Counter[str]) -> list[os.DirEntry[str]]:
    """Return what is in a folder, sorted by name; what is hidden is counted in ``left_out``."""
    try:
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise DataFolderError(f"{path} cannot be read: {error.strerror}") from None
    visible = [entry for entry in found if not files.is_hidden(entry.name)]
    left_out.update(["hidden"] * (len(found) - len(visible)))
    return visible


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circle of links, or a link to where this user may not look
        return False


# -- images listed by a CSV table ------------------------------------------------------


_COLUMNS = ("path", "label", "split")


def read_labels(file: str, root: str, num_classes: int, splits: Sequence[str]) -> list[FolderIndex]:
    """Return the files of each of ``splits``, in the table's order; paths are relative to ``root``.

    Labels are numbered in the order of their sorted names, those of all splits together. Raises
    DataFolderError for a table that cannot be read or used.
    """
    rows: dict[str, tuple[str, str, str]] = {}
    try:
        with open(file, newline="", encoding="utf-8-sig", opener=files.regular) as stream:
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

    classes = sorted({label for _, label, _ in rows.values()})
    if len(classes) > num_classes:
        raise DataFolderError(f"{file} has {len(classes)} labels, --num_classes is {num_classes}")
    number_of = {name: label for label, name in enumerate(classes)}
    found = []
    for wanted in splits:
        of_split = [row for row in rows.values() if row[2] == wanted]
        if not of_split:
            raise DataFolderError(f"{file} has no file whose split is {wanted}")
        paths = Strings.of((path for path, *_ in of_split), root)
        labels = np.array([number_of[label] for _, label, _ in of_split], np.int32)
        found.append(FolderIndex(classes, paths, labels))
        if not os.path.exists(paths[0]):
            raise DataFolderError(
                f"{file} names {paths[0]}, which is not there: its paths start at --data_dir"
            )
    return found
