"""The images of a split and their classes.

Images are found in class folders, or anywhere below a folder if they have no labels
(``index_split``). The result for large folders is saved in an index file.
"""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from tqdm import tqdm

from data import files
from data.class_order import in_order
from data.config import DataConfig
from data.decode import SUFFIXES
from data.files import (
    DataFolderError,
    MissingSplitError,
    first_of,
    is_url,
    other_classes,
    printable,
)
from data.index_file import StringLists, Strings, Table, load_or_build
from data.source import DatasetRequest

SPLITS = ("train", "val")

# -- images in <root>/<split>/<class>/ -------------------------------------------------


@dataclass(frozen=True)
class FolderIndex:
    """The images of one split, in the order of torchvision's ``ImageFolder``."""

    classes: list[str] | None
    """By label; None for images without labels."""
    paths: Strings
    labels: np.ndarray
    """The label of each path, int32; or for several labels an image 0 and 1, (paths, classes)."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of files of the split that are not images, by extension, and of hidden files."""
    folders: Sequence[str] = ()
    """The folders that were listed."""
    values: Mapping[str, StringLists] = field(default_factory=dict)
    """Other values of each image in a table, by name (``View.values``)."""

    def digest(self) -> str:
        """Return a checksum of the file names below the split, in order."""
        return xxhash.xxh3_64(self.paths.content.data).hexdigest()


def check_folder(
    root: str,
    num_classes: int,
    splits: Sequence[str] = SPLITS,
    suffixes: tuple[str, ...] = SUFFIXES,
    class_map: str | None = None,
) -> None:
    """Check class folders before images are listed. Raises DataFolderError for a missing or empty
    split, class folders that differ between splits or are missing from ``class_map``, or too many
    classes."""
    if not root:
        raise DataFolderError(
            "--data_dir is empty: set it to the folder that contains train/ and val/"
        )
    classes: dict[str, list[str]] = {}
    for split in splits:
        path, names = os.path.join(root, split), class_folders(root, split)
        if names is None:
            what = "is not a folder" if os.path.exists(path) else "does not exist"
            needed = " and ".join(f"{name}/<class>/*" for name in splits)
            raise DataFolderError(
                f"{path} {what}: --data_dir requires {needed} images (to split a folder: "
                "docs/tutorials/finetune_small_folder.md, step 2; to pack ImageNet's archives: "
                "docs/data.md)"
            )
        classes[split] = names
        if not names:
            raise DataFolderError(
                f"{path} contains no class folders: --data_dir requires {split}/<class>/* images"
            )
    if len(splits) > 1 and (difference := other_classes(classes["train"], classes["val"])):
        raise DataFolderError(f"{root}: the class folders of train and val differ: {difference}")
    count = len(in_order(classes[splits[0]], class_map=class_map))
    if count > num_classes:
        where = root if class_map is None else f"--class_map {class_map}"
        raise DataFolderError(f"{where} has {count} classes, but --num_classes is {num_classes}")


def folder_of_images(root: str, split: str) -> str:
    """Return the folder with the images of a split without labels: the one with the split's name,
    or for training the root if it has neither train/ nor val/. Raises MissingSplitError if there is
    none."""
    if not root:
        raise DataFolderError("--data_dir is empty: set it to the folder that contains the images")
    existing = {name for name in SPLITS if class_folders(root, name) is not None}
    if split in existing:
        return os.path.join(root, split)
    if existing or split != "train":
        raise MissingSplitError(
            f"{os.path.join(root, split)} is not a folder: put images without labels in {split}/, "
            "or all training images directly in a --data_dir without train/ and val/"
        )
    if class_folders(root, "") is None:
        raise DataFolderError(f"--data_dir {root} is not a folder")
    return root.rstrip("/")


def class_folders(root: str, split: str) -> list[str] | None:
    """Return the sorted names of a split's class folders; None if the split's folder does not
    exist."""
    path = os.path.join(root, split)
    if is_url(root):
        return files.subfolders(path)
    if not os.path.isdir(path):
        return None
    return [entry.name for entry in _scan(path, Counter()) if _is_folder(entry)]


def index_folders(
    request: DatasetRequest, suffixes: tuple[str, ...] = SUFFIXES
) -> dict[str, FolderIndex]:
    """Return the images, with these ``suffixes``, of each requested split of ``--data_dir``. Raises
    DataFolderError."""
    config = request.config
    if request.labels:
        check_folder(
            config.data_dir, request.num_classes, request.splits, suffixes, config.class_map
        )
    return request.find_splits(
        lambda split: cached_split(config, split, suffixes, labels=request.labels)
    )


def cached_split(
    config: DataConfig,
    split: str,
    suffixes: tuple[str, ...] = SUFFIXES,
    *,
    labels: bool = True,
) -> FolderIndex:
    """Return the result of ``index_split``, from an index file if the split has not changed.

    A split on disk has changed if the modification time of a folder differs from when it was
    listed; a split at a URL, if its class folders differ. Raises DataFolderError.
    """
    root = config.data_dir
    top = os.path.join(root, split) if labels else folder_of_images(root, split)
    name = split if labels else f"{split}-without-labels"

    def build() -> Table:
        started = time.time()
        index = index_split(top, suffixes, labels=labels)
        folders = Strings.of(os.path.relpath(folder, top) for folder in index.folders)
        changed = np.array([os.stat(folder).st_mtime_ns for folder in index.folders], np.int64)
        # A file that is added right after a folder was listed may not change the folder's
        # modification time, so an index is not saved if a folder changed within the last 2 seconds.
        is_settled = not (changed > (started - 2) * 1e9).any()
        names = index.paths
        arrays = {"names": names.content, "ends of names": names.ends, "labels": index.labels}
        arrays |= {"folders": folders.content, "ends of folders": folders.ends, "changed": changed}
        # Without labels, folders at a URL are listed only to detect changes.
        listed = files.subfolders(top) if is_url(root) and not labels else index.classes
        info = {"classes": listed, "left_out": index.left_out, "settled": is_settled}
        return Table(arrays, info | {"suffixes": list(suffixes)})

    def change(table: Table) -> str | None:
        if table.info["suffixes"] != list(suffixes):
            return "the set of image file extensions has changed"
        if is_url(root):
            same = files.subfolders(top) == table.info["classes"]
            return None if same else "the class folders have changed"
        folders = Strings(table.arrays["folders"], table.arrays["ends of folders"])
        for folder, before in zip(folders, table.arrays["changed"].tolist(), strict=True):
            path, now = os.path.join(top, folder), None
            with contextlib.suppress(OSError):
                now = os.stat(path).st_mtime_ns
            if now != before:
                return f"{printable(os.path.normpath(path))} has changed"
        return None

    # If the images are in the root itself, writing an index there would change the folder.
    is_root = top == root.rstrip("/")
    table = load_or_build(config, name, top, build, change, counted="labels", beside=not is_root)
    paths = Strings(table.arrays["names"], table.arrays["ends of names"], top)
    left_out = Counter[str](table.info["left_out"])
    if not labels:
        return FolderIndex(None, paths, table.arrays["labels"], left_out)
    # The index stores the folders sorted, whatever the label order.
    folders, numbers = table.info["classes"], table.arrays["labels"]
    classes = in_order(folders, config.class_order, config.class_map)
    if classes != folders:
        label_of = {name: label for label, name in enumerate(classes)}
        numbers = np.array([label_of[name] for name in folders], np.int32)[numbers]
    return FolderIndex(classes, paths, numbers, left_out)


def index_split(
    top: str, suffixes: tuple[str, ...] = SUFFIXES, *, labels: bool = True
) -> FolderIndex:
    """Find the images of the split in ``top``, a folder or URL, in one walk.

    Images are anywhere below class folders or, without ``labels``, anywhere below ``top``, with
    label 0. Their names end in one of ``suffixes``, in lower or upper case. Links to folders are
    followed. Raises DataFolderError for an unreadable folder, for a class without images, and if a
    link would make images count twice.
    """
    left_out, walked = Counter[str](), dict[str, str]()
    classes, image_labels, empty = [], array("i"), []

    def images() -> Iterator[str]:
        for label, (name, class_files) in enumerate(_list_classes(top, left_out, walked, labels)):
            classes.append(name)
            before = len(image_labels)
            for folder, file in sorted(class_files):
                if file.lower().endswith(suffixes):
                    image_labels.append(label)
                    yield f"{folder}/{file}" if folder else file
                else:
                    left_out[os.path.splitext(file)[1].lower() or "no extension"] += 1
            if len(image_labels) == before:
                empty.append(name)

    paths = Strings.of(images(), top)
    numbers, folders = np.array(image_labels, np.int32), [*walked.values()]
    if not labels:
        if not len(paths):
            raise DataFolderError(f"{top} contains no images ({', '.join(suffixes)})")
        return FolderIndex(None, paths, numbers, left_out, folders)
    if empty:
        raise DataFolderError(
            f"{top} has class folders without images: {first_of(empty)}; add images "
            f"({', '.join(suffixes)}) or remove the folders"
        )
    return FolderIndex(classes, paths, numbers, left_out, folders)


_Files = list[tuple[str, str]]
"""Files below a split's folder, as (folder relative to the split, name)."""


def _list_classes(
    top: str, left_out: Counter[str], walked: dict[str, str], labels: bool
) -> Iterator[tuple[str, _Files]]:
    """Yield the name and files of each class in a folder or at a URL; without ``labels``, a single
    class with all files. Local folders that are listed are added to ``walked``, by real path."""
    if is_url(top):
        by_class: dict[str, _Files] = {}
        for path in files.find_files(top, left_out):
            folder, _, name = path.rpartition("/")
            if labels and not folder:
                left_out["in no class folder"] += 1
                continue
            by_class.setdefault(folder.partition("/")[0] if labels else "", []).append(
                (folder, name)
            )
        yield from sorted(by_class.items())
        return
    if not labels:
        yield "", _walk(top, "", left_out, walked)
        return
    walked[os.path.realpath(top)] = top
    classes = []
    for entry in _scan(top, left_out):
        if _is_folder(entry):
            classes.append(entry.name)
            continue
        # A class folder on an unmounted disk would shift the labels of all classes after it.
        if entry.is_symlink() and not os.path.exists(entry.path):
            raise DataFolderError(
                f"{entry.path} is a link to {os.readlink(entry.path)}, which cannot be reached: "
                "fix or remove the link"
            )
        left_out["in no class folder"] += 1
    for name in tqdm(classes, printable(f"listing {top}"), unit=" classes", delay=5, disable=None):
        yield name, _walk(os.path.join(top, name), name, left_out, walked)


def _walk(path: str, below: str, left_out: Counter[str], walked: dict[str, str]) -> _Files:
    """Return the files in the folder ``path``, named ``below`` in the split, and in its
    subfolders."""
    real, real_parent = os.path.realpath(path), os.path.realpath(os.path.dirname(path))
    if os.path.islink(path) and os.path.commonpath([real, real_parent]) == real:
        raise DataFolderError(
            f"{path} is a link to {real}, which contains it, so its images would count twice: "
            "remove the link"
        )
    if real in walked:
        raise DataFolderError(
            f"{path} and {walked[real]} are the same folder, {real}, so its images would count "
            "twice: remove one of the two"
        )
    walked[real] = path
    names = []
    for entry in _scan(path, left_out):
        if _is_folder(entry):
            inside = f"{below}/{entry.name}" if below else entry.name
            names += _walk(entry.path, inside, left_out, walked)
        elif entry.is_symlink() or entry.is_file():  # a link is checked when it is read
            names.append((below, entry.name))
        else:  # reading a pipe would wait for ever
            left_out["not a file"] += 1
    return names


def _scan(path: str, left_out: Counter[str]) -> list[os.DirEntry[str]]:
    """Return a folder's entries sorted by name; hidden ones are counted in ``left_out``."""
    with files.reporting(path, "read"), os.scandir(path) as scanned:
        entries = sorted(scanned, key=lambda entry: entry.name)
    visible = [entry for entry in entries if not files.is_hidden(entry.name)]
    left_out.update(["hidden"] * (len(entries) - len(visible)))
    return visible


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a circle of links, or a link to where this user may not look
        return False
