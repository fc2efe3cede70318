"""Reads a table of files and their labels: CSV with the columns path, label and split."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence

import numpy as np

from data.errors import DataFolderError, reason_of
from data.index.folder_index import SPLITS, FolderIndex
from data.index.strings import Paths, Strings
from data.own_files import regular

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
                    f"{file} has no column {missing[0]}: --labels needs path,label,split in its "
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
