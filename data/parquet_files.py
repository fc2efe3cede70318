"""Reads images out of parquet files, a row group at a time: the smallest part that can be read.

The files lie anywhere below a folder or a URL that fsspec opens. Which split one is of is in its
name or its folder's: ``data/train-00000-of-00294.parquet``, ``val/0.parquet``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from data.files import (
    BrokenImageError,
    DataFolderError,
    find_files,
    is_url,
    open_system,
    reason_of,
    regular,
    tried_again,
)
from data.huggingface import Columns, choose_columns

_READERS = 16  # footers are read at a time: of files far away each takes a tenth of a second


def split_files(root: str, names: Sequence[str]) -> list[str]:
    """Return the sorted paths below ``root`` of a split's files, which has one of ``names``.

    Those of the first name that any file has. Raises DataFolderError where there is none.
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


@dataclass(frozen=True)
class _File:
    """A file's table of contents, and the labels of its rows."""

    metadata: Any
    columns: Columns
    labels: np.ndarray


class ParquetFiles:
    """The rows of a split's files, numbered one after another."""

    def __init__(self, paths: list[str], given: tuple[str, str] | None) -> None:
        """Read the files' tables of contents and their labels. Raises DataFolderError."""
        self._paths = paths
        with ThreadPoolExecutor(_READERS) as pool:
            files = list(pool.map(lambda path: _index(path, given), paths))
        self.columns = files[0].columns
        for path, file in zip(paths, files, strict=True):
            if file.columns != self.columns:
                raise DataFolderError(
                    f"the columns or the names of the classes of {paths[0]} and {path} differ"
                )
        self._metadata = [file.metadata for file in files]
        self._groups = [
            (number, group)
            for number, file in enumerate(files)
            for group in range(file.metadata.num_row_groups)
            if file.metadata.row_group(group).num_rows
        ]
        self.group_lengths = [
            self._metadata[number].row_group(group).num_rows for number, group in self._groups
        ]
        self._ends = np.cumsum(self.group_lengths)
        self.labels = np.concatenate([file.labels for file in files])
        self._last: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return len(self.labels)

    def name_of(self, row: int) -> str:
        """Return the file and the number in it, from 0 on, of a row."""
        number, _ = self._groups[np.searchsorted(self._ends, row, side="right")]
        before = sum(each.num_rows for each in self._metadata[:number])
        return f"{self._paths[number]} row {row - before}"

    def read(self, row: int) -> bytes:
        """Return the bytes of a row's image; its row group stays in memory until another's is read.

        Raises BrokenImageError.
        """
        group = int(np.searchsorted(self._ends, row, side="right"))
        last, images = self._last
        if last != group:
            self._last = (-1, None)  # not two groups in memory at a time
            images = self._read_group(*self._groups[group])
            self._last = group, images
        found = images[row - int(self._ends[group]) + self.group_lengths[group]].as_py()
        if found is None:
            raise BrokenImageError(f"the column {self.columns.image} has no bytes in this row")
        return found

    def digest(self) -> str:
        """Return a checksum of the rows' labels and of the sizes of the row groups' columns."""
        digest = xxhash.xxh3_64(self.labels.tobytes())
        for number, group in self._groups:
            found = self._metadata[number].row_group(group)
            sizes = [found.column(i).total_uncompressed_size for i in range(found.num_columns)]
            digest.update(np.array([found.num_rows, *sizes]).tobytes())
        return digest.hexdigest()

    def _read_group(self, number: int, group: int) -> pa.ChunkedArray:
        path, name = self._paths[number], self.columns.image

        def read() -> pa.ChunkedArray:
            with _opened(path, self._metadata[number]) as file:
                is_struct = pa.types.is_struct(file.schema_arrow.field(name).type)
                leaf = f"{name}.bytes" if is_struct else name
                found = file.read_row_group(group, [leaf], use_threads=False).column(0)
            chunks = [each.field("bytes") for each in found.chunks] if is_struct else found.chunks
            return pa.chunked_array(chunks, chunks[0].type)

        try:
            return tried_again(path, read)
        except Exception as error:  # what pyarrow and file systems raise
            raise BrokenImageError(reason_of(error)) from error


def _opened(path: str, metadata: Any = None) -> pq.ParquetFile:
    """Open a file anew: neither a handle nor a connection may be shared by forked processes."""
    if not is_url(path):
        os.close(regular(path, os.O_RDONLY))
        return pq.ParquetFile(path, metadata=metadata, memory_map=True, pre_buffer=False)
    system, there = open_system(path)
    return pq.ParquetFile(system.open(there, cache_type="none"), metadata=metadata)


def _index(path: str, given: tuple[str, str] | None) -> _File:
    """Read a file's table of contents and its labels. Raises DataFolderError."""

    def read() -> _File:
        with _opened(path) as file:
            columns = choose_columns(_features(file.schema_arrow), given, path)
            labels = file.read([columns.label], use_threads=False).column(0)
            return _File(file.metadata, columns, _whole_numbers(labels, columns, path))

    try:
        return tried_again(path, read)
    except DataFolderError:
        raise
    except Exception as error:  # what pyarrow and file systems raise
        raise DataFolderError(f"{path} cannot be read: {reason_of(error)}") from error


def _features(schema: pa.Schema) -> dict[str, Any]:
    """Return the description of the columns that the file has, or one made from their types."""
    told = (schema.metadata or {}).get(b"huggingface")
    features = json.loads(told).get("info", {}).get("features", {}) if told else {}
    by_type = {field.name: _feature(field.type) for field in schema}
    return {
        name: told if (told := features.get(name, {})).get("_type") == "ClassLabel" else feature
        for name, feature in by_type.items()
    }


def _feature(kind: pa.DataType) -> dict[str, str]:
    is_struct = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    if is_struct or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return {"_type": "Image"}
    return {"_type": "Value", "dtype": str(kind)}


def _whole_numbers(labels: pa.ChunkedArray, columns: Columns, path: str) -> np.ndarray:
    if labels.null_count:
        raise DataFolderError(f"{path}: {labels.null_count:,} rows have no {columns.label}")
    return labels.to_numpy().astype(np.int64)
