"""Formats of other programs' weights that features add (``Feature.weight_formats``).

They are asked whether or not their feature is on: of two towers, a run may want one alone.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import torch

from training.checkpoints.format import SavedRun
from training.feature_table import features
from training.weights.config_json import DescribedModel
from training.weights.sidecar import Sidecar


@dataclass(frozen=True)
class Exported:
    """What a folder in another program's format has."""

    tensors: dict[str, torch.Tensor]
    """By their names there."""
    files: Mapping[str, Mapping[str, Any]]
    """The content of JSON files, by name."""
    weights_name: str = "model"
    """The name of the .safetensors file, without its suffix."""
    sharded: bool = True
    """Whether the other program reads weights in several files."""
    note: str = ""
    """One line for the user about what the folder lacks."""


class WeightFormat(abc.ABC):
    """How another program stores a model: names of tensors, and the file that describes it."""

    name: ClassVar[str]
    """The word for it in ``tools.convert --names``."""
    config_file: ClassVar[str]
    """The file next to the weights that describes the model."""

    @abc.abstractmethod
    def reads(self, names: Collection[str]) -> bool:
        """Return whether weights with tensors of these names are in this format."""

    @abc.abstractmethod
    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors by the names here, views where possible. Tensors on meta give the shapes;
        tensors that are not known keep their names."""

    @abc.abstractmethod
    def described_model(
        self, about: Sidecar, processor: Sidecar, *, is_named: bool
    ) -> DescribedModel | None:
        """Do what ``config_json.described_model`` does, for the model without the feature's
        parts."""

    @abc.abstractmethod
    def preprocessing(self, about: Sidecar, processor: Sidecar) -> tuple[Mapping[str, Any], str]:
        """Return the preprocessing that the files say, by timm's names, {} if none, and the name of
        the file that says it. Raises UsageError for what no flag can do."""

    @abc.abstractmethod
    def export(self, run: SavedRun, tensors: Mapping[str, torch.Tensor]) -> Exported:
        """Return the model of a run in this format. Raises UsageError if the other program cannot
        compute it."""


@functools.cache
def _formats(names: tuple[str, ...]) -> tuple[WeightFormat, ...]:
    entries = (name.partition(":") for name in names)
    return tuple(getattr(import_module(module), kind)() for module, _, kind in entries)


def formats() -> tuple[WeightFormat, ...]:
    """Return all formats."""
    return _formats(tuple(name for feature in features() for name in feature.weight_formats))


def format_of(names: Collection[str]) -> WeightFormat | None:
    """Return the format of weights with tensors of these names; None if no feature adds it."""
    return next((each for each in formats() if each.reads(names)), None)
