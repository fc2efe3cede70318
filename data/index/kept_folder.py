"""Lists a split's images once: the index of many files is kept, and read as long as it is right."""

from __future__ import annotations

import functools
import os
import time
from collections import Counter

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

from data.config import DataConfig
from data.errors import printable
from data.index.folder_index import FolderIndex, class_folders, index_split
from data.index.index_file import VERSION, Kept, Table, is_worth_it, places
from data.index.strings import Paths, Strings
from data.storage import is_url

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
