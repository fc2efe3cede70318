"""Finds which files of ``<root>/<split>/<class>/`` are images of which class, in one walk."""

from __future__ import annotations

import itertools
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash
from torchvision.datasets.folder import IMG_EXTENSIONS
from tqdm import tqdm

from data.errors import DataFolderError
from data.index.strings import Paths, Strings
from data.storage import find_files, is_url, subfolders

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
            raise DataFolderError(f"{path} {what}: --data_dir needs {needed} images")
        classes[split] = names
        if not names:
            raise DataFolderError(
                f"{path} holds no class folders: --data_dir needs {split}/<class>/* images "
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
