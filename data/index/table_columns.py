"""Finds a table's columns of images and labels, by what Hugging Face's ``datasets`` says of them.

A description is the JSON of ``datasets.Features``: by column ``{"_type": "Image"}``, ``{"_type":
"ClassLabel", "names": [...]}`` or ``{"_type": "Value", "dtype": "int64"}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.errors import DataFolderError

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
