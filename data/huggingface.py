"""The source of images in a folder that ``datasets.DatasetDict.save_to_disk`` has written.

Its Arrow files are mapped into memory: any image is read alone, so their order is as random as a
folder's. ``datasets`` runs no code that such a folder brings. ``choose_columns`` and
``check_labels`` also serve parquet files (``data/parquet.py``).
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from data.files import BrokenImageError, DataFolderError, reason_of, regular
from data.source import DatasetRequest, DataSource
from data.transforms import BytesSplit, Transform, transforms_of

TRAIN = ("train",)
VALIDATION = ("validation", "val", "valid", "test")
"""The names of a split, in the order in which they are looked for."""

# -- the columns of a table ------------------------------------------------------------


@dataclass(frozen=True)
class Columns:
    """The columns that are read, and the classes."""

    image: str
    label: str
    classes: list[str] | None
    """The names of the classes by label, if the table has them."""


def choose_columns(
    features: Mapping[str, Any], given: tuple[str, str] | None, where: str
) -> Columns:
    """Return the columns ``given`` (image, label), else the only ones that can be meant.

    ``features`` is the JSON of ``datasets.Features``: for each column ``{"_type": "Image"}``,
    ``{"_type": "ClassLabel", "names": [...]}`` or ``{"_type": "Value", "dtype": "int64"}``. Raises
    DataFolderError, which names the table as ``where``.
    """
    how, names = "name the two by --columns IMAGE LABEL", ", ".join(features) or "no columns"
    images = [name for name, feature in features.items() if _is_image(feature)]
    labels = [name for name, feature in features.items() if _is_label(feature)]
    if given:
        image, label = given
    else:
        if len(images) != 1:
            several = f"several columns of images ({', '.join(images)})"
            what = several if images else "no column of images"
            raise DataFolderError(f"{where} has {what}: {how} (it has {names})")
        by_name = [name for name in labels if name in ("label", "labels")]
        by_type = [name for name in labels if features[name]["_type"] == "ClassLabel"]
        found = by_name if len(by_name) == 1 else by_type
        if len(found) != 1:
            raise DataFolderError(
                f"{where}: which column holds the labels is unclear; {how} (it has {names})"
            )
        image, label = images[0], found[0]
    for name, fitting, kind in ((image, images, "images"), (label, labels, "whole numbers")):
        if name not in features:
            raise DataFolderError(f"{where} has no column {name}: it has {names}")
        if name not in fitting:
            raise DataFolderError(f"{where}: the column {name} does not hold {kind}; {how}")
    classes = features[label].get("names")
    return Columns(image, label, [str(name) for name in classes] if classes else None)


def _is_image(feature: Any) -> bool:
    return isinstance(feature, Mapping) and feature.get("_type") == "Image"


def _is_label(feature: Any) -> bool:
    if not isinstance(feature, Mapping):
        return False
    is_number = str(feature.get("dtype", "")).startswith(("int", "uint"))
    return feature.get("_type") == "ClassLabel" or (feature.get("_type") == "Value" and is_number)


def check_labels(columns: Columns, labels: np.ndarray, num_classes: int, where: str) -> None:
    """Raises DataFolderError for more classes than the model has, for labels that are not classes,
    and if there are none."""
    if columns.classes is not None and len(columns.classes) > num_classes:
        raise DataFolderError(
            f"{where} has {len(columns.classes)} classes, --num_classes is {num_classes}"
        )
    if not len(labels):
        raise DataFolderError(f"{where} has no rows")
    for label in (labels.min(), labels.max()):
        if not 0 <= label < num_classes:
            raise DataFolderError(
                f"{where} has the label {label}; with --num_classes {num_classes} labels are 0 to "
                f"{num_classes - 1}"
            )


def whole_numbers(labels: Any, column: str, where: str) -> np.ndarray:
    """Return a column of labels (``pyarrow.ChunkedArray``) as int64.

    Raises DataFolderError for rows without a label.
    """
    if labels.null_count:
        raise DataFolderError(f"{where}: {labels.null_count:,} rows have no {column}")
    return labels.to_numpy().astype(np.int64)


def check_same_classes(train: Columns, val: Columns, where: str) -> None:
    """Raises DataFolderError if the classes of two splits differ."""
    if train.classes != val.classes:
        raise DataFolderError(f"the names of the classes of train and val differ in {where}")


# -- the source ------------------------------------------------------------------------


def open_huggingface(request: DatasetRequest) -> DataSource:
    """Open the splits that are requested.

    Raises DataFolderError, also if the package ``datasets`` is not installed.
    """
    augment, plain = transforms_of(request)
    root, datasets = request.config.data_dir, _package()
    try:
        for folder, _, files in os.walk(root):
            for name in files:
                os.close(regular(os.path.join(folder, name), os.O_RDONLY))
        datasets.disable_progress_bars()
        found = datasets.load_from_disk(root)
    except Exception as error:  # it raises what it likes
        raise DataFolderError(
            f"{root} is not a folder that datasets.DatasetDict.save_to_disk wrote "
            f"({reason_of(error)})"
        ) from error
    if not isinstance(found, datasets.DatasetDict):
        raise DataFolderError(
            f"{root} holds a single data set: --data_dir requires a DatasetDict with train and "
            "validation"
        )

    def split(names: tuple[str, ...], transform: Transform) -> HuggingFaceSplit:
        for name in names:
            if name in found:
                return HuggingFaceSplit(request, found[name], os.path.join(root, name), transform)
        raise DataFolderError(
            f"{root} has no split {' or '.join(names)}: it has {', '.join(found)}"
        )

    train = split(TRAIN, augment) if request.with_train else None
    val = split(VALIDATION, plain)
    if train is not None:
        check_same_classes(train.columns, val.columns, root)
    return DataSource(request, root, train, val, val.columns.classes)


def _package() -> Any:
    """Return the package ``datasets``. A folder of that name, as this program has, is imported
    too, but as a package without a file.

    Raises DataFolderError if it is not installed.
    """
    with contextlib.suppress(ImportError):
        found = importlib.import_module("datasets")
        if found.__file__ is not None:
            return found
    raise DataFolderError(
        "--data_source huggingface requires the package datasets: python3 -m pip install datasets"
    )


class HuggingFaceSplit(BytesSplit):
    """One split of a saved ``datasets.Dataset``: a dataset by (epoch, image index)."""

    def __init__(
        self, request: DatasetRequest, table: Any, where: str, transform: Transform
    ) -> None:
        """Read the labels of the data set ``table``. Raises DataFolderError."""
        self.columns = choose_columns(table.features.to_dict(), request.config.columns, where)
        self._where = where
        column = self.columns.label
        found = table.select_columns([column]).with_format("arrow")[:].column(column)
        labels = whole_numbers(found, column, where)
        check_labels(self.columns, labels, request.num_classes, where)
        is_train = os.path.basename(where) in TRAIN
        super().__init__(request, labels, transform, substitutes=is_train)
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
