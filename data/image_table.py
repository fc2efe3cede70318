"""The table of images, ``--labels``: a CSV or parquet file with their paths, labels and splits.

Paths are in ``--data_dir``, a folder or a URL, whose folders are listed once to find out which
images exist. Without a column ``split``, ``data/table_split.py`` chooses the validation images.
"""

from __future__ import annotations

import io
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from data import files, tables
from data.batch import class_counts
from data.class_order import in_order
from data.config import DataConfig
from data.csv_table import TextTable, open_csv
from data.decode import SUFFIXES
from data.files import DataFolderError, first_of, is_url
from data.index import SPLITS, FolderIndex
from data.index_file import StringLists, Strings
from data.source import NO_VALUES, DatasetRequest, Value
from data.table_split import choose_validation

SPLIT = "split"
"""The column with the split of an image."""


def index_table(
    request: DatasetRequest, suffixes: tuple[str, ...] = SUFFIXES
) -> dict[str, FolderIndex]:
    """Return the files of each requested split of the table, in the table's order. Raises
    DataFolderError for an unreadable or invalid table, and for files that do not exist."""
    config, file = request.config, request.config.labels
    several = request.multi_label and request.labels
    indices = read_table(
        config, suffixes, labels=request.labels, multi_label=several, values=request.view.values
    )
    if missing := [name for name in request.splits if name not in indices]:
        raise DataFolderError(
            f"{file} lists no files with split {missing[0]}: write {missing[0]} in its column "
            f"{SPLIT}, or set --{missing[0]}_split, or remove the column to split the images at "
            "random"
        )
    found = {name: indices[name] for name in request.splits}
    classes = next(iter(found.values())).classes or []
    if several and len(classes) != request.num_classes:
        raise DataFolderError(
            f"{file} has {len(classes)} labels, but --num_classes is {request.num_classes}: set "
            f"--num_classes {len(classes)}"
        )
    request.check_classes(len(classes), str(file), classes)
    return found


def read_table(
    config: DataConfig,
    suffixes: tuple[str, ...] = SUFFIXES,
    *,
    labels: bool = True,
    multi_label: bool = False,
    values: Mapping[str, Value] = NO_VALUES,
) -> dict[str, FolderIndex]:
    """Return the files of each split of the table that has any, with other ``values``, of which a
    file has one in each of its rows.

    Classes are numbered in sorted order, whole numbers by value, or by ``--class_map``. Without
    ``labels`` all files have label 0; with ``multi_label`` the labels are 0 and 1, (files,
    classes). Raises DataFolderError.
    """
    table = _open(config)
    columns = _Columns.of(table, config, labels=labels, multi_label=multi_label, values=values)
    rows = _read_rows(table, columns, config, suffixes)
    if not rows.paths:
        raise DataFolderError(f"{table.name} has no rows below the names of its columns")
    if not labels:
        classes, numbers = None, np.zeros(len(rows.paths), np.int32)
    elif multi_label:
        classes, numbers = _several_labels(table, columns, rows, config.class_map)
    else:
        classes, numbers = _one_label(table, rows, config.class_map)

    split_of = _splits(table, columns, rows, numbers, config)
    kept: dict[str, np.ndarray] = {name: np.flatnonzero(split_of == name) for name in SPLITS}
    if classes and len(kept["train"]):
        _check_learned(table.name, classes, numbers[kept["train"]], numbers[kept["val"]])
    others = Counter(name for name in split_of.tolist() if name not in SPLITS)
    root = config.data_dir.rstrip("/")
    result: dict[str, FolderIndex] = {}
    for name, chosen in kept.items():
        if len(chosen):
            paths = Strings.of((rows.paths[number] for number in chosen), root)
            left_out = others if not result else Counter[str]()
            of_split = {
                value: StringLists.of([found[number] for number in chosen])
                for value, found in rows.values.items()
            }
            result[name] = FolderIndex(classes, paths, numbers[chosen], left_out, values=of_split)
    return result


# -- the file --------------------------------------------------------------------------


_SIZE = files.SizeLimit("a table of labels", 2**30)
"""More than ten million files."""


def _open(config: DataConfig) -> TextTable:
    file = config.labels
    assert file is not None
    if not file.lower().endswith(".parquet"):
        return open_csv("--labels", file, _SIZE)
    with files.reporting(f"--labels {file}", "read"):
        return _parquet(file, files.read_bytes(file, limit=_SIZE))


def _parquet(file: str, content: bytes) -> TextTable:
    if tables.pq is None:
        raise DataFolderError(
            f"--labels {file} requires the package pyarrow: python3 -m pip install pyarrow"
        )
    opened = tables.open_file(io.BytesIO(content))

    def cell(value: object) -> str:
        if value is None or value != value:  # NaN is pandas' missing value
            return ""
        if isinstance(value, list):
            return "|".join(map(cell, value))
        return str(value).strip()

    def read(columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
        number = 0
        with files.reporting(f"--labels {file}", "read"):
            for batch in opened.iter_batches(columns=[*dict.fromkeys(columns)]):
                of_column = batch.to_pydict()
                for cells in zip(*(of_column[name] for name in columns), strict=True):
                    number += 1
                    yield f"row {number} of {file}", [cell(value) for value in cells]

    schema = opened.schema_arrow
    is_list, is_large_list = tables.pa.types.is_list, tables.pa.types.is_large_list
    lists = [each.name for each in schema if is_list(each.type) or is_large_list(each.type)]
    return TextTable(file, schema.names, read, lists)


# -- its columns -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Columns:
    """The columns that are read."""

    path: str
    labels: list[str]
    """[] if the images need none."""
    split: str | None
    group: str | None
    values: Mapping[str, str]
    """By name of the value."""

    @classmethod
    def of(
        cls,
        table: TextTable,
        config: DataConfig,
        *,
        labels: bool,
        multi_label: bool,
        values: Mapping[str, Value],
    ) -> _Columns:
        """Choose the columns. Raises DataFolderError if one is missing."""
        path, *of_labels = config.columns or ("path", "label")
        if not labels:
            of_labels = []
        elif not of_labels:
            raise DataFolderError(
                f"--columns {path} names no column of labels: use --columns PATH LABEL"
            )
        elif len(of_labels) > 1 and not multi_label:
            raise DataFolderError(
                f"--columns names {len(of_labels)} columns of labels: several labels an image "
                "require --multi_label and --bce_loss"
            )
        group = config.split_by
        for name in (path, *of_labels, *([group] if group else [])):
            if name in table.columns:
                continue
            there = f"the columns of its first line are: {first_of(table.columns) or 'none'}"
            how = "name the columns of paths and labels in the first line, or set --columns"
            if name == group:
                how = "set --split_by to one of its columns"
            raise DataFolderError(f"{table.name} has no column {name}; {there}: {how}")
        of_values = {
            name: tables.choose_column(value, name, table.columns, table.name)
            for name, value in values.items()
        }
        lists = [name for name in of_values.values() if name in table.lists]
        if lists:
            raise DataFolderError(
                f"{table.name}: column {lists[0]} has lists: write each of their entries in a row "
                "of its own"
            )
        used = [path, *of_labels, *of_values.values()]
        twice = next((name for name in used if table.columns.count(name) > 1), None)
        twice = twice or next((name for name in used if used.count(name) > 1), None)
        if twice:
            raise DataFolderError(f"{table.name}: column {twice} is there twice: rename one")
        split = SPLIT if SPLIT in table.columns and SPLIT not in used else None
        if split and config.val_fraction is not None:
            raise DataFolderError(
                f"--val_fraction {config.val_fraction:g}, but {table.name} has a column {SPLIT}, "
                "which decides: drop the flag, or rename the column"
            )
        return cls(path, of_labels, split, group, of_values)


# -- its rows --------------------------------------------------------------------------


@dataclass
class _Rows:
    """The rows, by column."""

    places: list[str]
    """Where each is in the file, for messages."""
    paths: list[str]
    """Relative to ``--data_dir``."""
    labels: list[list[str]]
    splits: list[str]
    groups: list[str]
    values: dict[str, list[list[str]]]
    """By name; with other values, several rows of the same path are one here."""

    def add_values(
        self, row: int, place: str, path: str, values: Sequence[str], others: Sequence[str]
    ) -> None:
        """Add the ``values`` in a further line about the file of a row. ``others``: the line's
        cells besides these. Raises DataFolderError unless they are the row's."""
        first = self.places[row].partition(" of ")[0]
        if not values:
            raise DataFolderError(
                f"{place}: {path} was already listed, in {first}; remove one of the two lines"
            )
        here = [*self.labels[row], *self.splits[row : row + 1], *self.groups[row : row + 1]]
        if here != others:
            raise DataFolderError(
                f"{place}: {path} was already listed, in {first}, with another label, split or "
                "group: write the same in both lines"
            )
        for of_name, value in zip(self.values.values(), values, strict=True):
            of_name[row].append(value)


def _read_rows(
    table: TextTable, columns: _Columns, config: DataConfig, suffixes: tuple[str, ...]
) -> _Rows:
    """Read the rows, and find their files. Raises DataFolderError."""
    rows = _Rows([], [], [], [], [], {name: [] for name in columns.values})
    wanted = [columns.path, *columns.values.values(), *columns.labels]
    wanted += [name for name in (columns.split, columns.group) if name]
    # Volumes have always been read from absolute paths anywhere.
    folder = _Folder(config.data_dir, suffixes, anywhere=config.data_source == "volumes")
    row_of: dict[str, int] = {}
    missing: list[tuple[str, str]] = []
    for place, (path, *cells) in table.read(wanted):
        if not path:
            raise DataFolderError(f"{place} has no {columns.path}")
        try:
            found = folder.find(path)
        except ValueError as error:
            raise DataFolderError(f"{place}: {path} {error}") from None
        if found is None:
            missing.append((place, path))
            continue
        values, others = cells[: len(columns.values)], cells[len(columns.values) :]
        if found in row_of:
            rows.add_values(row_of[found], place, path, values, others)
            continue
        row_of[found] = len(rows.paths)
        rows.places.append(place)
        rows.paths.append(found)
        for of_name, value in zip(rows.values.values(), values, strict=True):
            of_name.append([value])
        rows.labels.append(others[: len(columns.labels)])
        cell = iter(others[len(columns.labels) :])
        for column, of_column in ((columns.split, rows.splits), (columns.group, rows.groups)):
            if column:
                value = next(cell)
                if not value:
                    raise DataFolderError(f"{place} has no value in column {column}")
                of_column.append(value)
    if missing:
        (place, path), more = missing[0], len(missing) - 1
        others_too = f", and {more:,} more do not exist" if more else ""
        raise DataFolderError(
            f"{place} lists {folder.shown(path)}, which does not exist{others_too}: paths must be "
            "relative to --data_dir, or absolute"
        )
    return rows


class _Folder:
    """Finds the files of a folder or URL that a table names."""

    def __init__(self, root: str, suffixes: tuple[str, ...], *, anywhere: bool) -> None:
        """``anywhere``: whether absolute paths may lead to other folders."""
        if not root:
            raise DataFolderError("--data_dir is empty: set it to the folder with the images")
        self._root, self._suffixes, self._anywhere = root.rstrip("/") or "/", suffixes, anywhere
        self._listed: dict[str, set[str]] = {}
        self._stems: dict[str, dict[str, list[str]]] = {}
        self._tops = [self._root]
        if is_url(root):
            for path in files.find_files(root):
                folder, _, name = path.rpartition("/")
                self._listed.setdefault(folder, set()).add(name)
        elif not os.path.isdir(root):
            raise DataFolderError(f"--data_dir {root} is not a folder")
        else:
            self._tops = [os.path.abspath(root), os.path.realpath(root)]

    def shown(self, path: str) -> str:
        """Return a path of the table for a message."""
        return path if is_url(path) else os.path.join(self._root, path)

    def find(self, path: str) -> str | None:
        """Return a file's path in the folder; None if it does not exist. An extension may be left
        out, and folders may be separated as on Windows. Raises ValueError if it is outside of the
        folder, or not an image."""
        found = self._find(self._relative(path))
        if found is None and "\\" in path:
            found = self._find(self._relative(path.replace("\\", "/")))
        return found

    def _relative(self, path: str) -> str:
        name = path if is_url(path) else os.path.normpath(path)
        for top in self._tops:
            name = name.removeprefix(f"{top.rstrip('/')}/")
        is_absolute = is_url(name) or os.path.isabs(name)
        if name.split("/")[0] == ".." or (is_absolute and not self._anywhere):
            raise ValueError(
                f"is outside of --data_dir {self._root}: set --data_dir to a folder that contains "
                "all images"
            )
        return name

    def _find(self, name: str) -> str | None:
        folder, slash, file = name.rpartition("/")
        if name.startswith("/") and not folder:
            folder, slash = "/", ""
        there = self._names(folder)
        if file not in there:
            stems = self._stems.get(folder)
            if stems is None:
                stems = self._stems[folder] = {}
                for each in there:
                    if suffix := self._suffix(each):
                        stems.setdefault(each.removesuffix(suffix), []).append(each)
            candidates = sorted(stems.get(file, ()))
            if len(candidates) > 1:
                raise ValueError(f"may be {' or '.join(candidates)}: add the extension")
            if not candidates:
                return None
            (file,) = candidates
        if not self._suffix(file):
            raise ValueError(f"is not an image ({', '.join(self._suffixes)})")
        return f"{folder}{slash}{file}"

    def _suffix(self, file: str) -> str:
        """Return the extension of an image, as it is written; "" of another file."""
        length = max((len(s) for s in self._suffixes if file.lower().endswith(s)), default=0)
        return file[len(file) - length :]

    def _names(self, folder: str) -> set[str]:
        """Return the names of the files in a folder."""
        if folder in self._listed or is_url(self._root):
            return self._listed.get(folder, set())
        path, names = os.path.join(self._root, folder), set[str]()
        with files.reporting(path, "read"):
            try:
                with os.scandir(path) as entries:
                    names = {entry.name for entry in entries if not entry.is_dir()}
            except (FileNotFoundError, NotADirectoryError):
                pass
        self._listed[folder] = names
        return names


# -- labels ----------------------------------------------------------------------------

_NUMBER = re.compile(r"(\d+)(\.0*)?", re.ASCII)
_FLAGS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}
"""What says in a column of its own whether an image has a label, in small letters."""


def _in_order(names: set[str], class_map: str | None) -> list[str]:
    """Return the classes by label."""
    if all(_NUMBER.fullmatch(name) for name in names):
        classes = sorted(names, key=lambda name: (int(name), name))
    else:
        classes = sorted(names)
    return in_order(classes, class_map=class_map)


def _one_label(
    table: TextTable, rows: _Rows, class_map: str | None
) -> tuple[list[str], np.ndarray]:
    """Return the classes, and the label of each row, (rows,), int32. Raises DataFolderError."""
    names = [label for (label,) in rows.labels]
    for place, name in zip(rows.places, names, strict=True):
        if not name:
            raise DataFolderError(f"{place} has no label")
        if "|" in name:
            raise DataFolderError(
                f"{place} has several labels ({name}), which require --multi_label and --bce_loss"
            )
    if all(_NUMBER.fullmatch(name) for name in names):  # pandas writes 1.0 if others are missing
        names = [name.partition(".")[0] for name in names]
    classes = _in_order({*names}, class_map)
    number_of = {name: number for number, name in enumerate(classes)}
    return classes, np.array([number_of[name] for name in names], np.int32)


def _several_labels(
    table: TextTable, columns: _Columns, rows: _Rows, class_map: str | None
) -> tuple[list[str], np.ndarray]:
    """Return the classes, and which labels each row has, (rows, classes), uint8: of one column,
    names between "|"; of several, those whose column has 1. Raises DataFolderError."""
    have: list[list[str]] = []
    if len(columns.labels) == 1:
        for (text,) in rows.labels:
            have.append([name.strip() for name in text.split("|") if name.strip()])
        names = {name for each in have for name in each}
    else:
        for place, cells in zip(rows.places, rows.labels, strict=True):
            for name, text in zip(columns.labels, cells, strict=True):
                if text.lower() not in _FLAGS:
                    what = repr(text) if text else "no value"
                    raise DataFolderError(
                        f"{place} has {what} in column {name}: write 0 or 1, or remove the row"
                    )
            pairs = zip(columns.labels, cells, strict=True)
            have.append([name for name, text in pairs if _FLAGS[text.lower()]])
        names = {*columns.labels}
    if not any(have):
        raise DataFolderError(f"{table.name}: no image has any label")
    classes = columns.labels if len(columns.labels) > 1 and not class_map else None
    classes = classes or _in_order(names, class_map)
    number_of = {name: number for number, name in enumerate(classes)}
    labels = np.zeros((len(have), len(classes)), np.uint8)
    for row, each in zip(labels, have, strict=True):
        row[[number_of[name] for name in each]] = 1
    return classes, labels


# -- splits ----------------------------------------------------------------------------

VAL_FRACTION = 0.2
"""The default of ``--val_fraction``."""


def _splits(
    table: TextTable, columns: _Columns, rows: _Rows, labels: np.ndarray, config: DataConfig
) -> np.ndarray:
    """Return the split of each row: train, val, or "split NAME" for others. Raises
    DataFolderError."""
    if columns.split is None:
        fraction = VAL_FRACTION if config.val_fraction is None else config.val_fraction
        is_val = choose_validation(
            rows.paths, labels, rows.groups or None, fraction, config.split_seed
        )
        if not is_val.any():
            of = f"value of {columns.group}" if columns.group else "image"
            raise DataFolderError(
                f"{table.name}: each class has a single {of}, so none is left for validation: add "
                f"images, or a column {SPLIT} with train and val"
            )
        return np.where(is_val, "val", "train")
    names = [name.casefold() for name in rows.splits]
    there, renamed = {*names}, dict[str, str]()
    for split in SPLITS:
        wanted = [name.casefold() for name in tables.split_names(config, split)]
        if found := next((name for name in wanted if name in there), None):
            renamed[found] = split
    if not renamed:
        raise DataFolderError(
            f"{table.name}: column {SPLIT} has {first_of(sorted(there))}, neither train nor val: "
            "set --train_split and --val_split"
        )
    if columns.group:
        _check_apart(columns.group, rows, [renamed.get(name) for name in names])
    return np.array([renamed.get(name, f"split {name}") for name in names])


def _check_apart(column: str, rows: _Rows, splits: Sequence[str | None]) -> None:
    """Raise DataFolderError if a group is in both splits."""
    first: dict[str, int] = {}
    for number, (group, split) in enumerate(zip(rows.groups, splits, strict=True)):
        if split is not None and splits[first.setdefault(group, number)] != split:
            raise DataFolderError(
                f"{rows.places[number]}: {column} {group} is in both splits, in {split} here and "
                f"in {splits[first[group]]} in {rows.places[first[group]].partition(' of ')[0]}: "
                "move all its images to one of them, or drop --split_by to allow that"
            )


def _check_learned(file: str, classes: list[str], train: np.ndarray, val: np.ndarray) -> None:
    """Raise DataFolderError if validation images have classes that no training image has."""
    in_train, in_val = (class_counts(labels, len(classes)) for labels in (train, val))
    if lost := [classes[n] for n in np.flatnonzero((in_val > 0) & (in_train == 0))]:
        raise DataFolderError(
            f"{file}: only val has {first_of(lost)}, which cannot be learned without training "
            "images: move some of these images to train, or remove them"
        )
