"""The source of images in a folder that ``datasets.DatasetDict.save_to_disk`` has written.

Its Arrow files are mapped into memory: any image is read alone, so their order is as random as a
folder's. ``datasets`` runs no code that such a folder brings.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

import numpy as np
import xxhash

from data.errors import BrokenImageError, DataFolderError, reason_of
from data.image.transforms import Transform, transforms_of
from data.index.table_columns import (
    TRAIN,
    VALIDATION,
    Columns,
    check_classes,
    check_labels,
    check_same_columns,
    choose_columns,
)
from data.loading.bytes_split import BytesSplit
from data.own_files import regular
from data.source import SplitSource, Wanted


def open_huggingface(wanted: Wanted) -> SplitSource:
    """Open the splits that are wanted.

    Raises DataFolderError, also where the package ``datasets`` is not installed.
    """
    augment, plain = transforms_of(wanted)
    root = wanted.config.data_dir
    splits = _load(root)
    train = _split(wanted, splits, TRAIN, augment) if wanted.with_train else None
    val = _split(wanted, splits, VALIDATION, plain)
    if train is not None:
        check_same_columns(train.columns, val.columns, root)
    return SplitSource(wanted, root, train, val, val.columns.classes)


def _load(root: str) -> dict[str, Any]:
    """Return the data sets of the splits by their names."""
    datasets = _package()
    try:
        for folder, _, files in os.walk(root):
            for name in files:
                os.close(regular(os.path.join(folder, name), os.O_RDONLY))
        datasets.disable_progress_bars()
        found = datasets.load_from_disk(root)
    except Exception as error:  # it raises what it likes
        raise DataFolderError(
            f"{root} is no folder that datasets.DatasetDict.save_to_disk wrote ({reason_of(error)})"
        ) from error
    if not isinstance(found, datasets.DatasetDict):
        raise DataFolderError(
            f"{root} holds a single data set: --data_dir needs a DatasetDict with train and "
            "validation"
        )
    return dict(found)


def _package() -> Any:
    """Return ``datasets``; a folder of that name, such as this program's, would be found as well.

    Raises DataFolderError where the package is not installed.
    """
    with contextlib.suppress(ImportError):
        found = importlib.import_module("datasets")
        if found.__file__ is not None:
            return found
    raise DataFolderError(
        "--data_source huggingface needs the package datasets: python3 -m pip install datasets"
    )


def _split(
    wanted: Wanted, splits: dict[str, Any], names: tuple[str, ...], transform: Transform
) -> HuggingFaceSplit:
    root = wanted.config.data_dir
    for name in names:
        if name in splits:
            return HuggingFaceSplit(wanted, splits[name], os.path.join(root, name), transform)
    raise DataFolderError(f"{root} has no split {' or '.join(names)}: it has {', '.join(splits)}")


class HuggingFaceSplit(BytesSplit):
    """One split of a saved ``datasets.Dataset``: a dataset by (epoch, image index)."""

    def __init__(self, wanted: Wanted, table: Any, where: str, transform: Transform) -> None:
        """Read the labels of the data set ``table``. Raises DataFolderError."""
        self.columns: Columns = choose_columns(
            table.features.to_dict(), wanted.config.columns, where
        )
        self._where = where
        check_classes(self.columns, wanted.num_classes, where)
        labels = _labels(table, self.columns.label, where)
        check_labels(labels, wanted.num_classes, where)
        is_train = os.path.basename(where) in TRAIN
        super().__init__(wanted, labels, transform, substitutes=is_train)
        images = table.select_columns([self.columns.image])
        self._images = images.cast_column(self.columns.image, _package().Image(decode=False))

    def read(self, number: int) -> bytes:
        try:
            found = self._images[number][self.columns.image]["bytes"]
        except Exception as error:  # what pyarrow raises
            raise BrokenImageError(reason_of(error)) from error
        if found is None:
            raise BrokenImageError(f"the column {self.columns.image} has no bytes in this row")
        return found

    def name_of(self, number: int) -> str:
        return f"{self._where} row {number}"

    def digest(self) -> str:
        """Return a checksum of the labels in order and of the images' size together."""
        size = np.array([self._images.data.nbytes])
        return xxhash.xxh3_64(np.asarray(self.labels).tobytes() + size.tobytes()).hexdigest()


def _labels(table: Any, column: str, where: str) -> np.ndarray:
    found = table.select_columns([column]).with_format("arrow")[:].column(column)
    if found.null_count:
        raise DataFolderError(f"{where}: {found.null_count:,} rows have no {column}")
    return found.to_numpy().astype(np.int64)
