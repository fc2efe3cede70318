"""The source of images in a folder that ``datasets.DatasetDict.save_to_disk`` has written.

Its Arrow files are mapped into memory: any image is read alone, so their order is as random as a
folder's. ``datasets`` runs no code that such a folder brings.
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
from data.source import SplitSource, Wanted
from data.transforms import BytesSplit, Transform, transforms_of

# ------------------------------------------------------------------------------------------------
# Finds a table's columns of images and labels, by what Hugging Face's ``datasets`` says of them.
#
# A description is the JSON of ``datasets.Features``: by column ``{"_type": "Image"}``, ``{"_type":
# "ClassLabel", "names": [...]}`` or ``{"_type": "Value", "dtype": "int64"}``.


TRAIN = ("train",)
VALIDATION = ("validation", "val", "valid", "test")
"""The names of a split, in the order in which they are looked for."""

_LABELS = ("label", "labels")
_HOW = "name the two by --columns IMAGE LABEL"


@dataclass(frozen=True)
class Columns:
    """Names the columns that are read, and the classes."""

    image: str
    label: str
    classes: list[str] | None
    """The names of the classes by label, where the table has them."""


def choose_columns(
    features: Mapping[str, Any], given: tuple[str, str] | None, where: str
) -> Columns:
    """Return the columns that were ``given``, else the only ones that can be meant.

    Raises DataFolderError, which names the table as ``where``.
    """
    image, label = given or (_only_image(features, where), _only_label(features, where))
    for name, fits, kind in ((image, _is_image, "images"), (label, _is_label, "whole numbers")):
        if name not in features:
            raise DataFolderError(f"{where} has no column {name}: it has {_names(features)}")
        if not fits(features[name]):
            raise DataFolderError(f"{where}: the column {name} does not hold {kind}; {_HOW}")
    names = features[label].get("names")
    return Columns(image, label, [str(name) for name in names] if names else None)


def check_classes(columns: Columns, num_classes: int, where: str) -> None:
    """Raises DataFolderError for more classes than the model has."""
    if columns.classes is not None and len(columns.classes) > num_classes:
        raise DataFolderError(
            f"{where} has {len(columns.classes)} classes, --num_classes is {num_classes}"
        )


def check_labels(labels: np.ndarray, num_classes: int, where: str) -> None:
    """Raises DataFolderError for labels that are no classes, and where there are none."""
    if not len(labels):
        raise DataFolderError(f"{where} has no rows")
    for label in (labels.min(), labels.max()):
        if not 0 <= label < num_classes:
            raise DataFolderError(
                f"{where} has the label {label}; with --num_classes {num_classes} labels are 0 to "
                f"{num_classes - 1}"
            )


def check_same_columns(train: Columns, val: Columns, where: str) -> None:
    """Raises DataFolderError where the classes of two splits differ."""
    if train.classes != val.classes:
        raise DataFolderError(f"the names of the classes of train and val differ in {where}")


def _only_image(features: Mapping[str, Any], where: str) -> str:
    found = [name for name, feature in features.items() if _is_image(feature)]
    if len(found) == 1:
        return found[0]
    what = f"several columns of images ({', '.join(found)})" if found else "no column of images"
    raise DataFolderError(f"{where} has {what}: {_HOW} (it has {_names(features)})")


def _only_label(features: Mapping[str, Any], where: str) -> str:
    labels = [name for name, feature in features.items() if _is_label(feature)]
    classes = [name for name in labels if features[name]["_type"] == "ClassLabel"]
    named = [name for name in labels if name in _LABELS]
    for found in (named, classes):
        if len(found) == 1:
            return found[0]
    raise DataFolderError(
        f"{where}: which column holds the labels cannot be told; {_HOW} (it has {_names(features)})"
    )


def _is_image(feature: Any) -> bool:
    return isinstance(feature, Mapping) and feature.get("_type") == "Image"


def _is_label(feature: Any) -> bool:
    if not isinstance(feature, Mapping):
        return False
    is_number = str(feature.get("dtype", "")).startswith(("int", "uint"))
    return feature.get("_type") == "ClassLabel" or (feature.get("_type") == "Value" and is_number)


def _names(features: Mapping[str, Any]) -> str:
    return ", ".join(features) or "no columns"


# ------------------------------------------------------------------------------------------------


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
            f"{root} holds a single data set: --data_dir requires a DatasetDict with train and "
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
        "--data_source huggingface requires the package datasets: python3 -m pip install datasets"
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
