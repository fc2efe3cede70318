"""The source of images in parquet files, as Hugging Face's hub stores data sets.

The files are anywhere below a folder or a URL that fsspec opens. The split of a file is in its
name or its folder's: ``data/train-00000-of-00294.parquet``, ``val/0.parquet``.

The smallest part of a file that can be read is a row group, of a hundred images or a thousand. So
training images are in a random order of runs (``order_in_runs`` of ``data/loader.py``), and the
row group that was read last stays in memory.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import xxhash

from data.files import (
    BrokenImageError,
    DataFolderError,
    find_files,
    is_url,
    open_system,
    reason_of,
    regular,
    with_retries,
)
from data.huggingface import (
    TRAIN,
    VALIDATION,
    Columns,
    check_labels,
    check_same_classes,
    choose_columns,
    whole_numbers,
)
from data.loader import GlobalBatchSampler, RunSampler
from data.source import DatasetRequest, DataSource
from data.transforms import BytesSplit, Transform, transforms_of

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:
    raise DataFolderError(
        "--data_source parquet requires the package pyarrow: python3 -m pip install pyarrow"
    ) from None


def open_parquet(request: DatasetRequest) -> DataSource:
    """Index the files of the splits that are requested. Raises DataFolderError."""
    augment, plain = transforms_of(request)
    root = request.config.data_dir
    train = ParquetSplit(request, TRAIN, augment) if request.with_train else None
    val = ParquetSplit(request, VALIDATION, plain)
    if train is not None:
        check_same_classes(train.columns, val.columns, root)
    return ParquetSource(request, root, train, val, val.columns.classes)


class ParquetSource(DataSource):
    """A ``DataSource`` whose training images are in an order that seldom reads a row group."""

    def sampler(self, length: int, batch_size: int, **how: Any) -> GlobalBatchSampler:
        split = self._train if how["shuffle"] else self._val
        assert isinstance(split, ParquetSplit)
        return RunSampler(split.groups, split.run_length, batch_size, **how)

    def order(self) -> dict[str, Any]:
        if not isinstance(self._train, ParquetSplit):
            return {}
        return super().order() | {"--images_per_read": self._train.run_length}


class ParquetSplit(BytesSplit):
    """One split of images in parquet files: a dataset by (epoch, image index).

    The rows of all files are numbered one after another.
    """

    def __init__(
        self, request: DatasetRequest, names: tuple[str, ...], transform: Transform
    ) -> None:
        """Read the metadata and labels of the files of the split, which has one of ``names``.

        Raises DataFolderError.
        """
        config = request.config
        self._paths = split_files(config.data_dir, names)
        with ThreadPoolExecutor(16) as pool:  # each waits, a tenth of a second if it is far away
            files = list(pool.map(lambda path: _index(path, config.columns), self._paths))
        self._metadata = [metadata for metadata, *_ in files]
        self.columns = files[0][1]
        for path, (_, columns, _) in zip(self._paths, files, strict=True):
            if columns != self.columns:
                raise DataFolderError(
                    f"the columns or the names of the classes of {self._paths[0]} and {path} differ"
                )
        labels = np.concatenate([labels for *_, labels in files])
        where = f"{config.data_dir} ({names[0]})"
        check_labels(self.columns, labels, request.num_classes, where)
        super().__init__(request, labels, transform, substitutes=names == TRAIN)

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
        self.run_length = config.images_per_read or math.ceil(int(np.median(self.groups)) / 8)
        self._last: tuple[int, Any] = (-1, None)

    def name_of(self, number: int) -> str:
        """Return the file of a row, and the row's number in it, from 0 on."""
        file, _ = self._groups[np.searchsorted(self._ends, number, side="right")]
        before = sum(each.num_rows for each in self._metadata[:file])
        return f"{self._paths[file]} row {number - before}"

    def read(self, number: int) -> bytes:
        """Return the bytes of a row's image; its row group stays in memory until another is read.

        Raises BrokenImageError.
        """
        group = int(np.searchsorted(self._ends, number, side="right"))
        last, images = self._last
        if last != group:
            self._last = (-1, None)  # not two groups in memory at a time
            images = self._read_group(*self._groups[group])
            self._last = group, images
        found = images[number - int(self._ends[group]) + self.groups[group]].as_py()
        if found is None:
            raise BrokenImageError(f"the column {self.columns.image} has no bytes in this row")
        return found

    def _read_group(self, file: int, group: int) -> pa.ChunkedArray:
        path, name = self._paths[file], self.columns.image

        def read() -> pa.ChunkedArray:
            with _open(path, self._metadata[file]) as opened:
                is_struct = pa.types.is_struct(opened.schema_arrow.field(name).type)
                leaf = f"{name}.bytes" if is_struct else name
                found = opened.read_row_group(group, [leaf], use_threads=False).column(0)
            chunks = [each.field("bytes") for each in found.chunks] if is_struct else found.chunks
            return pa.chunked_array(chunks, chunks[0].type)

        try:
            return with_retries(path, read)
        except Exception as error:  # what pyarrow and file systems raise
            raise BrokenImageError(reason_of(error)) from error

    def digest(self) -> str:
        """Return a checksum of the rows' labels and of the sizes of the row groups' columns."""
        digest = xxhash.xxh3_64(np.asarray(self.labels).tobytes())
        for file, group in self._groups:
            found = self._metadata[file].row_group(group)
            sizes = [found.column(i).total_uncompressed_size for i in range(found.num_columns)]
            digest.update(np.array([found.num_rows, *sizes]).tobytes())
        return digest.hexdigest()


def split_files(root: str, names: Sequence[str]) -> list[str]:
    """Return the sorted paths below ``root`` of a split's files: those of the first of ``names``
    that any file has.

    Raises DataFolderError if there is none.
    """
    found = sorted(path for path in find_files(root) if path.endswith(".parquet"))
    for name in names:
        is_of_split = re.compile(rf"(^|[/._-]){name}([/._-]|$)")
        chosen = [path for path in found if is_of_split.search(path)]
        if chosen:
            return [f"{root.rstrip('/')}/{path}" for path in chosen]
    what = f"no {' or '.join(f'{name}-*.parquet' for name in names)}" if found else "no .parquet"
    raise DataFolderError(
        f"{root} holds {what} files: --data_dir requires train-*.parquet and validation-*.parquet, "
        "or folders of these names"
    )


def _index(path: str, given: tuple[str, str] | None) -> tuple[pq.FileMetaData, Columns, np.ndarray]:
    """Return a file's metadata, its columns and its labels. Raises DataFolderError."""

    def read() -> tuple[pq.FileMetaData, Columns, np.ndarray]:
        with _open(path) as file:
            columns = choose_columns(_features(file.schema_arrow), given, path)
            labels = file.read([columns.label], use_threads=False).column(0)
            return file.metadata, columns, whole_numbers(labels, columns.label, path)

    try:
        return with_retries(path, read)
    except DataFolderError:
        raise
    except Exception as error:  # what pyarrow and file systems raise
        raise DataFolderError(f"{path} cannot be read: {reason_of(error)}") from error


def _open(path: str, metadata: Any = None) -> pq.ParquetFile:
    """Open a file again: forked processes must share neither a handle nor a connection."""
    if not is_url(path):
        os.close(regular(path, os.O_RDONLY))
        return pq.ParquetFile(path, metadata=metadata, memory_map=True, pre_buffer=False)
    system, there = open_system(path)
    return pq.ParquetFile(system.open(there, cache_type="none"), metadata=metadata)


def _features(schema: pa.Schema) -> dict[str, Any]:
    """Return the features of the columns for ``choose_columns``, made from their types.

    The names of classes are those that ``datasets`` has written into the file.
    """
    written = (schema.metadata or {}).get(b"huggingface")
    features = json.loads(written).get("info", {}).get("features", {}) if written else {}
    found: dict[str, Any] = {}
    for field in schema:
        kind = field.type
        is_struct = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        if features.get(field.name, {}).get("_type") == "ClassLabel":
            found[field.name] = features[field.name]
        elif is_struct or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            found[field.name] = {"_type": "Image"}
        else:
            found[field.name] = {"_type": "Value", "dtype": str(kind)}
    return found
