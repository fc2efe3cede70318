"""The sources of images in tables: parquet files, and folders that Hugging Face's datasets saved.

``--data_source parquet``: files as on Hugging Face's hub, anywhere below a folder or a URL that
fsspec opens. The split of a file is in its name or its folder's: ``train-00000-of-00294.parquet``,
``val/0.parquet``. The smallest part of a file that can be read is a row group, of a hundred images
or a thousand. So training images are in a random order of runs (``RunSampler`` of
``data/loader.py``), and the row group that was read last stays in memory.

``--data_source huggingface``: a data set of the Hub (``data/hub.py``), or a folder that
``datasets.DatasetDict.save_to_disk`` has written. Arrow files are mapped into memory: any image is
read alone, so their order is as random as a folder's. ``datasets`` runs no code of either.
"""

from __future__ import annotations  # pyarrow may not be installed

import functools
import importlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
import xxhash

from config_fields import is_of
from data import files, hub
from data.config import DataConfig
from data.files import (
    BrokenImageError,
    DataFolderError,
    MissingSplitError,
    first_of,
    open_system,
    other_classes,
    reason_of,
)
from data.images import ImageSplit, SampleTransform, source_of_images, view_of_images
from data.loader import GlobalBatchSampler, RunSampler
from data.source import NO_VALUES, DatasetRequest, DataSource, Value

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
except ImportError:  # reported where a source needs it
    pa = pc = pq = None

_SPLITS = {"train": ("train",), "val": ("validation", "val", "valid", "test")}
"""The names of a split in tables, in the order in which they are looked for."""


def _named_split(config: DataConfig, split: str) -> str | None:
    return config.train_split if split == "train" else config.val_split


def split_names(config: DataConfig, split: str) -> tuple[str, ...]:
    """Return the names of which the first that exists is train or val."""
    named = _named_split(config, split)
    return (named,) if named else _SPLITS[split]


# -- what both have in common ----------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """The columns that are read, and the classes."""

    image: str
    label: str | None
    """None: the images have no labels."""
    classes: list[str] | None
    """The names of the classes by label, if the table has them."""
    values: Mapping[str, str]
    """The columns of other values (``View.values``), by name."""


_STRINGS = re.compile(r"(dictionary<values=)?(large_)?string")
"""The types of columns of strings."""


def choose_columns(
    features: Mapping[str, Any],
    given: Sequence[str] | None,
    where: str,
    *,
    labels: bool = True,
    values: Mapping[str, Value] = NO_VALUES,
) -> Columns:
    """Return the columns ``given`` (image, label), else the only ones that can be meant; without
    ``labels`` that of images alone; and those of other ``values``. ``features`` is the JSON of
    ``datasets.Features``; ``where`` names the table in a DataFolderError."""
    how, names = "set --columns IMAGE LABEL", ", ".join(features) or "no columns"
    of_type: dict[str, list[str]] = {
        "Image": [],
        "ClassLabel": [],
        "whole number": [],
        "string": [],
    }
    for name, feature in features.items():
        if isinstance(feature, Mapping):
            kind, dtype = feature.get("_type"), str(feature.get("dtype"))
            if kind == "Value" and dtype.startswith(("int", "uint")):
                kind = "whole number"
            elif kind == "Value" and _STRINGS.match(dtype):
                kind = "string"
            of_type.get(str(kind), []).append(name)
    images, numbers = of_type["Image"], of_type["ClassLabel"] + of_type["whole number"]
    label: str | None
    if given:
        if len(given) != 2 and (labels or len(given) != 1):
            raise DataFolderError(
                f"--columns takes the names of two columns, IMAGE LABEL, not {len(given)}"
            )
        image, label = given[0], given[-1]
    else:
        if len(images) != 1:
            several = f"several image columns ({', '.join(images)})"
            what = several if images else "no image column"
            raise DataFolderError(f"{where} has {what}: {how} (columns: {names})")
        by_name, strings = (
            [name for name in columns if name in ("label", "labels")]
            for columns in (numbers, of_type["string"])
        )
        candidates = by_name if len(by_name) == 1 else of_type["ClassLabel"] or strings
        if labels and len(candidates) != 1:
            raise DataFolderError(
                f"{where}: cannot tell which column contains the labels: {how} (columns: {names})"
            )
        image, label = images[0], candidates[0] if labels else None
    if not labels:
        label = None
    chosen = [(image, images, "images")]
    if label is not None:
        chosen.append((label, numbers + of_type["string"], "integers or strings"))
    for name, fitting, kind in chosen:
        if name not in features:
            raise DataFolderError(f"{where} has no column {name} (columns: {names})")
        if name not in fitting:
            raise DataFolderError(f"{where}: column {name} does not contain {kind}: {how}")
    classes = features[label].get("names") if label is not None else None
    if classes and not is_of(classes, list[str]):
        raise DataFolderError(f"{where}: the class names of column {label} are not a list of names")
    of_values = {
        name: choose_column(value, name, features, where) for name, value in values.items()
    }
    return Columns(image, label, classes or None, of_values)


def choose_column(value: Value, name: str, columns: Collection[str], where: str) -> str:
    """Return which of the ``columns`` of a table has the value with this name. Raises
    DataFolderError."""
    found = next((each for each in value.names if each in columns), None)
    if found is None:
        there = first_of([*columns]) or "none"
        raise DataFolderError(
            f"{where} has no column {' or '.join(value.names)} for the {name} of an image: set "
            f"{value.flag} (columns: {there})"
        )
    return found


_Labels = tuple[np.ndarray, list[str] | None]
"""Labels, int64; and what they are the numbers of, if the table has strings instead."""


def _labels(values: Any, column: str, where: str) -> _Labels:
    """Return the labels in a column (``pyarrow.ChunkedArray``). Raises DataFolderError."""
    are_strings = _STRINGS.match(str(values.type)) is not None
    if are_strings:  # a null may be a row, or an entry of the dictionary
        values = values.cast(pa.large_string())
    if values.null_count:
        raise DataFolderError(
            f"{where}: {values.null_count:,} rows have no value in column {column}"
        )
    if not are_strings:
        return values.to_numpy().astype(np.int64), None
    encoded = values.combine_chunks().dictionary_encode()
    names = encoded.dictionary.to_pylist()
    if "" in names:
        raise DataFolderError(f"{where}: some rows have an empty string in column {column}")
    return encoded.indices.to_numpy().astype(np.int64), names


def _concatenated(parts: Sequence[_Labels], where: str) -> _Labels:
    """Return the labels of several parts of a split as one; names of classes become sorted. Raises
    DataFolderError if some are numbers and others strings."""
    named = [names for _, names in parts if names is not None]
    if named and len(named) < len(parts):
        raise DataFolderError(f"{where}: labels are strings in some files and integers in others")
    if not named:
        return np.concatenate([labels for labels, _ in parts]), None
    classes = sorted({*itertools.chain(*named)})
    number_of = {name: number for number, name in enumerate(classes)}
    numbers = [
        np.array([number_of[name] for name in names or ()], np.int64)[labels]
        for labels, names in parts
    ]
    return np.concatenate(numbers), classes


class TableSplit(ImageSplit):
    """One split of the rows of a table."""

    reading_threads = 1
    """A table is read row group by row group."""

    def __init__(
        self,
        request: DatasetRequest,
        name: str,
        transform: SampleTransform,
        columns: Columns,
        parts: Sequence[_Labels],
        where: str,
    ) -> None:
        """``parts``: the labels of consecutive rows. Raises DataFolderError for labels that do not
        fit."""
        labels, names = _concatenated(parts, where)
        if names is not None:
            columns = replace(columns, classes=names)
        super().__init__(request, name, transform, labels, columns.classes)
        self.columns, count = columns, request.num_classes
        request.check_classes(len(columns.classes or ()), where)
        if not len(labels):
            raise DataFolderError(f"{where} has no rows")
        for label in (labels.min(), labels.max()):
            if not 0 <= label < count:
                raise DataFolderError(
                    f"{where} has label {label}, but --num_classes {count} allows labels 0 to "
                    f"{count - 1}"
                )

    def stored(self, number: int) -> bytes | None:
        """Return what a row holds as its image; may raise anything."""
        raise NotImplementedError

    def stored_value(self, number: int, column: str) -> Any:
        """Return what a row holds in one of the columns of other values; may raise anything."""
        raise NotImplementedError

    def value(self, number: int, name: str) -> Any:
        try:
            return self.stored_value(number, self.columns.values[name])
        except Exception as error:  # as below
            raise BrokenImageError(reason_of(error)) from error

    def read(self, number: int, most: int | None = None) -> bytes:
        try:
            encoded = self.stored(number)
        except Exception as error:  # what pyarrow and file systems raise
            raise BrokenImageError(reason_of(error)) from error
        if encoded is None:
            raise BrokenImageError(f"column {self.columns.image} is empty in this row")
        return encoded


def _source(request: DatasetRequest, name: str, find: Callable[[str], TableSplit]) -> DataSource:
    """Return the source of the splits that ``find`` opens by name. Raises DataFolderError, also if
    their classes differ."""

    def find_named(split: str) -> TableSplit:
        try:
            return find(split)
        except MissingSplitError as error:
            if _named_split(request.config, split):  # so it is not optional
                raise DataFolderError(str(error)) from None
            raise

    splits = request.find_splits(find_named)
    one, other = (list(splits.values())[at].classes for at in (0, -1))
    if one != other:
        how = other_classes(one or [], other or []) or "their order differs"
        raise DataFolderError(f"{name}: the class names of train and val differ: {how}")
    return source_of_images(request, name, splits)


# -- parquet ---------------------------------------------------------------------------


def open_parquet(request: DatasetRequest) -> DataSource:
    """Index the files of the splits that are requested. Raises DataFolderError."""
    if pa is None:
        raise DataFolderError(
            "--data_source parquet requires the package pyarrow: python3 -m pip install pyarrow"
        )
    transforms = view_of_images(request).transforms(request)
    return _source(
        request,
        request.config.data_dir,
        lambda name: ParquetSplit(request, name, transforms[name]),
    )


class ParquetSplit(TableSplit):
    """One split of parquet files, whose rows are numbered one after another."""

    def __init__(self, request: DatasetRequest, name: str, transform: SampleTransform) -> None:
        """Read the metadata and labels of the split's files. Raises DataFolderError."""
        config, names = request.config, split_names(request.config, name)
        self._paths = split_files(config.data_dir, names)
        with ThreadPoolExecutor(16) as pool:  # each waits, a tenth of a second if it is far away
            index = functools.partial(
                _index, given=config.columns, labels=request.labels, values=request.view.values
            )
            self._metadata, columns, labels = zip(*pool.map(index, self._paths), strict=True)
        for path, others in zip(self._paths, columns, strict=True):
            if others != columns[0]:
                raise DataFolderError(
                    f"{self._paths[0]} and {path} have different columns or class names"
                )
        where = f"{config.data_dir} ({names[0]})"
        super().__init__(request, name, transform, columns[0], labels, where)

        self._groups = [
            (file, group)
            for file, metadata in enumerate(self._metadata)
            for group in range(metadata.num_row_groups)
            if metadata.row_group(group).num_rows
        ]
        """The row groups: the number of each one's file, and its number in the file."""
        self.groups = [self._metadata[f].row_group(group).num_rows for f, group in self._groups]
        """How many images each row group has."""
        self._ends = np.cumsum(self.groups)
        # By default a run is an eighth of the images of a row group.
        self._run_length = config.images_per_read or math.ceil(int(np.median(self.groups)) / 8)
        self._last: tuple[int, Mapping[str, pa.ChunkedArray]] = (-1, {})

    def sampler(self, batch_size: int, **how: Any) -> GlobalBatchSampler:
        return RunSampler(self.groups, self._run_length, batch_size, **how)

    def facts(self) -> dict[str, Any]:
        order = {"--images_per_read": self._run_length} if self.name == "train" else {}
        return super().facts() | order

    def name_of(self, number: int) -> str:
        """Return the file of a row, and the row's number in it, from 0 on."""
        file, _ = self._groups[np.searchsorted(self._ends, number, side="right")]
        before = sum(metadata.num_rows for metadata in self._metadata[:file])
        return f"{self._paths[file]} row {number - before}"

    def stored(self, number: int) -> bytes | None:
        """Return a row's image; its row group stays in memory until another is read."""
        return self._cell(number, self.columns.image)

    def stored_value(self, number: int, column: str) -> Any:
        return self._cell(number, column)

    def _cell(self, number: int, column: str) -> Any:
        group = int(np.searchsorted(self._ends, number, side="right"))
        last, columns = self._last
        if last != group:
            self._last = (-1, {})  # not two groups in memory at a time
            columns = self._read_group(*self._groups[group])
            self._last = group, columns
        return columns[column][number - int(self._ends[group]) + self.groups[group]].as_py()

    def _read_group(self, file: int, group: int) -> dict[str, pa.ChunkedArray]:
        """Return the images, and other values, of a row group by column."""
        path, image, others = self._paths[file], self.columns.image, self.columns.values.values()

        def read() -> dict[str, pa.ChunkedArray]:
            with _open(path, self._metadata[file]) as opened:
                is_struct = pa.types.is_struct(opened.schema_arrow.field(image).type)
                leaf = f"{image}.bytes" if is_struct else image
                table = opened.read_row_group(group, [leaf, *others], use_threads=False)
            chunks = table.column(image).chunks
            if is_struct:
                chunks = [chunk.field("bytes") for chunk in chunks]
            columns = {name: table.column(name) for name in others}
            return columns | {image: pa.chunked_array(chunks, chunks[0].type)}

        return files.with_retries(path, read)

    def digest(self) -> str:
        """Return a checksum of the rows' labels and of the sizes of the row groups' columns."""
        digest = xxhash.xxh3_64(np.asarray(self.labels).tobytes())
        for file, group in self._groups:
            rows = self._metadata[file].row_group(group)
            sizes = [rows.column(i).total_uncompressed_size for i in range(rows.num_columns)]
            digest.update(np.array([rows.num_rows, *sizes]).tobytes())
        return digest.hexdigest()


_MASKS = ("mask", "annotation", "label", "labels", "segmentation", "semantic_mask")
"""The names of a column of masks."""


def open_masks(
    request: DatasetRequest, name: str, transform: SampleTransform
) -> tuple[ParquetSplit, ParquetSplit]:
    """Return the images of a split of parquet files, and their masks, in another column. Raises
    DataFolderError."""
    if pa is None:
        raise DataFolderError(
            "--segment_dir with parquet files requires the package pyarrow: python3 -m pip "
            "install pyarrow"
        )
    root = request.config.data_dir
    path = split_files(root, _SPLITS[name])[0]
    with files.reporting(path, "read"), _open(path) as file:
        features = _features(file.schema_arrow)
    pictures = [column for column, feature in features.items() if feature["_type"] == "Image"]
    masks = [column for column in pictures if column in _MASKS]
    images = [column for column in pictures if column not in _MASKS]
    if len(masks) != 1 or len(images) != 1:
        raise DataFolderError(
            f"{path} must have one image column and one mask column, named {' or '.join(_MASKS)}; "
            f"its image columns are: {first_of(pictures) or 'none'}"
        )
    columns = (images[0], masks[0])
    image_split, mask_split = (
        ParquetSplit(
            replace(request, config=replace(request.config, columns=[*chosen])), name, transform
        )
        for chosen in (columns, columns[::-1])
    )
    return image_split, mask_split


def split_files(root: str, names: Sequence[str]) -> list[str]:
    """Return the sorted paths below ``root`` of a split's files: of the first of ``names`` that any
    file has. Raises MissingSplitError if there is none."""
    paths = sorted(path for path in files.find_files(root) if path.endswith(".parquet"))
    for name in names:
        is_of_split = re.compile(rf"(^|[/._-]){re.escape(name)}([/._-]|$)")
        if chosen := [path for path in paths if is_of_split.search(path)]:
            return [f"{root.rstrip('/')}/{path}" for path in chosen]
    what = f"no {' or '.join(f'{name}-*.parquet' for name in names)}" if paths else "no .parquet"
    raise MissingSplitError(
        f"{root} contains {what} files: --data_dir requires train-*.parquet and "
        "validation-*.parquet files, or files in folders with these names, or other names that "
        "--train_split and --val_split set"
    )


def _index(
    path: str, given: Sequence[str] | None, *, labels: bool, values: Mapping[str, Value]
) -> tuple[pq.FileMetaData, Columns, _Labels]:
    """Return a file's metadata, its columns and its labels, zeros without ``labels``. Raises
    DataFolderError."""

    def read() -> tuple[pq.FileMetaData, Columns, _Labels]:
        with _open(path) as file:
            features = _features(file.schema_arrow)
            columns = choose_columns(features, given, path, labels=labels, values=values)
            _check_row_groups(file.metadata, [columns.image, *columns.values.values()])
            if columns.label is None:
                return file.metadata, columns, (np.zeros(file.metadata.num_rows, np.int64), None)
            column = file.read([columns.label], use_threads=False).column(0)
            return file.metadata, columns, _labels(column, columns.label, path)

    with files.reporting(path, "read"):
        return files.with_retries(path, read)


_ROW_GROUP = files.SizeLimit("the images of a row group, which is read whole", 2**32)
_MOST_ROWS = 2**27
"""The most rows of a file; a few bytes could claim any number of labels."""


def _check_row_groups(metadata: pq.FileMetaData, names: Sequence[str]) -> None:
    """Raise ValueError if a row group's columns with these names are too large for memory."""
    _check_rows(metadata)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = (group.column(column) for column in range(group.num_columns))
        prefixes = tuple(f"{name}." for name in names)
        read = [each for each in columns if f"{each.path_in_schema}.".startswith(prefixes)]
        for sizes in ("total_compressed_size", "total_uncompressed_size"):
            size = sum(getattr(column, sizes) for column in read)
            _ROW_GROUP.check(size, f"row group {number}")


def _check_rows(metadata: pq.FileMetaData) -> None:
    if metadata.num_rows > _MOST_ROWS:
        raise ValueError(f"it has {metadata.num_rows:,} rows; the limit is {_MOST_ROWS:,}")


def _open(path: str, metadata: Any = None) -> pq.ParquetFile:
    """Open a file again: forked processes must share neither a handle nor a connection."""
    if not files.is_url(path):
        with open(path, "rb", opener=files.regular) as file:
            _check_footer(file)
        return pq.ParquetFile(path, metadata=metadata, memory_map=True, pre_buffer=False)
    system, there = open_system(path)
    file = system.open(there, cache_type="none")
    if metadata is None:
        return open_file(file)
    return pq.ParquetFile(file, metadata=metadata)


def open_file(file: IO[bytes]) -> pq.ParquetFile:
    """Open a parquet file that may be damaged. Raises ValueError if it claims to be too large."""
    _check_footer(file)
    opened = pq.ParquetFile(file)
    _check_rows(opened.metadata)
    return opened


def _check_footer(file: IO[bytes]) -> None:
    """Raise ValueError if the metadata at the end of a parquet file is too long to be read."""
    file.seek(0, os.SEEK_END)
    if file.tell() > 8:  # its last bytes are the length and a mark
        file.seek(-8, os.SEEK_END)
        files.TEXT.check(int.from_bytes(file.read(4), "little"), "its footer")


def _features(schema: pa.Schema) -> dict[str, Any]:
    """Return the features of the columns for ``choose_columns``, made from their types, and from
    the names of classes that ``datasets`` has written into the file."""
    written = (schema.metadata or {}).get(b"huggingface")
    features = json.loads(written).get("info", {}).get("features", {}) if written else {}
    by_column: dict[str, Any] = {}
    for field in schema:
        kind = field.type
        is_struct = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        if features.get(field.name, {}).get("_type") == "ClassLabel":
            by_column[field.name] = features[field.name]
        elif is_struct or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            by_column[field.name] = {"_type": "Image"}
        else:
            by_column[field.name] = {"_type": "Value", "dtype": str(kind)}
    return by_column


# -- Hugging Face's datasets -----------------------------------------------------------


def open_huggingface(request: DatasetRequest) -> DataSource:
    """Open the splits that are requested. Raises DataFolderError."""
    config, transforms = request.config, view_of_images(request).transforms(request)
    cache: tuple[str, ...] = ()
    if name := hub.name_on_hub(config.data_dir, config.data_source):
        if name.path is not None:
            raise DataFolderError(
                f"--data_dir {name}: use --data_dir {name.repository}, or --data_source parquet"
            )
        name, configuration = hub.resolve(name, config.dataset_config_name)
        root, tables, cache = str(name), hub.open_dataset(name, configuration), hub.cache_folders()
    else:
        root, tables = config.data_dir, _saved(config.data_dir)
        if config.dataset_config_name:
            raise DataFolderError(
                f"--dataset_config_name is for data sets on the Hub, and {root} is a folder"
            )

    def find(split: str) -> HuggingFaceSplit:
        names = split_names(config, split)
        found = next((name for name in names if name in tables), None)
        if found is None:
            raise MissingSplitError(
                f"{root} has no {' or '.join(names)} split; its splits are {', '.join(tables)}: "
                f"choose one with --{split}_split"
            )
        where = os.path.join(root, found)
        return HuggingFaceSplit(request, split, transforms[split], tables[found], where, cache)

    return _source(request, root, find)


def _saved(root: str) -> Any:
    """Return the ``datasets.DatasetDict`` in a folder. Raises DataFolderError."""
    datasets = hub.import_datasets()
    for folder, _, names in os.walk(root):  # what load_from_disk would wait for or read whole
        for path in (os.path.join(folder, name) for name in names):
            with files.reporting(path, "read"), open(path, "rb", opener=files.regular) as file:
                if path.endswith(".json"):
                    files.TEXT.check(os.fstat(file.fileno()).st_size)
    try:
        saved = datasets.load_from_disk(root)
    except Exception as error:  # it raises what it likes
        raise DataFolderError(
            f"{root} was not saved by datasets.DatasetDict.save_to_disk ({reason_of(error)})"
        ) from error
    if not isinstance(saved, datasets.DatasetDict):
        raise DataFolderError(
            f"{root} is a single dataset: --data_dir requires a DatasetDict with train and "
            "validation splits"
        )
    return saved


class HuggingFaceSplit(TableSplit):
    """One split of a ``datasets.Dataset``."""

    def __init__(
        self,
        request: DatasetRequest,
        name: str,
        transform: SampleTransform,
        table: Any,
        where: str,
        cache: tuple[str, ...],
    ) -> None:
        """Read the labels of the data set ``table``. ``cache``: the folders of image files that
        rows may name. Raises DataFolderError."""
        columns = choose_columns(
            table.features.to_dict(),
            request.config.columns,
            where,
            labels=request.labels,
            values=request.view.values,
        )
        labels: _Labels = np.zeros(len(table), np.int64), None
        if columns.label is not None:
            of_labels = table.select_columns([columns.label]).with_format("arrow")[:]
            labels = _labels(of_labels.column(columns.label), columns.label, where)
        super().__init__(request, name, transform, columns, [labels], where)
        self._where, self._cache, images = where, cache, table.select_columns([columns.image])
        as_bytes = importlib.import_module("datasets").Image(decode=False)
        self._images = images.cast_column(columns.image, as_bytes)
        self._others = table.select_columns([*columns.values.values()])

    def stored(self, number: int) -> bytes | None:
        image = self._images[number][self.columns.image]
        path = os.path.abspath(image["path"] or "")
        if image["bytes"] is None and path.startswith(self._cache):
            return files.read_bytes(path)
        return image["bytes"]

    def stored_value(self, number: int, column: str) -> Any:
        return self._others[number][column]

    def name_of(self, number: int) -> str:
        return f"{self._where} row {number}"

    def digest(self) -> str:
        """Return a checksum of the labels in order and of the images' sizes: in a saved folder, of
        all together; on the Hub, where the cache may be written by any version, of each, and of the
        names of image files."""
        digest = xxhash.xxh3_64(np.asarray(self.labels).tobytes())
        if not self._cache:
            digest.update(np.array([self._images.data.nbytes]).tobytes())
            return digest.hexdigest()
        for chunk in self._images.data.column(self.columns.image).chunks:
            content, paths = chunk.field("bytes"), chunk.field("path")
            sizes = pc.binary_length(content).fill_null(-1).to_numpy(zero_copy_only=False)
            digest.update(sizes.astype(np.int64).tobytes())
            for path in paths.filter(content.is_null()).to_pylist():
                digest.update(f"{os.path.basename(path or '')}/".encode())
        return digest.hexdigest()
