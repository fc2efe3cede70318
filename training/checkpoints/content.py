"""What a checkpoint holds, and what it says of the run that wrote it.

A checkpoint is a folder ``step_<n>`` in PyTorch's distributed checkpoint format, n the number of
optimizer steps of the run so far, with a manifest that is written last (``manifest.py``):

    model.<name>                                    weights
    ema.<name>                                      their moving average, with --model_ema
    optimizer.state.<name>.{step,exp_avg,exp_avg_sq}  AdamW
    training.{step,epoch,images_in_epoch}           position; the schedule follows from it
    training.rng                                    state of PyTorch's CPU generator
    training.arguments                              the flags, as UTF-8 JSON
    training.classes                                class names likewise, of an image folder
    training.order                                  what decides the images' order, likewise
    training.format                                 version of all this; 2 has a manifest

All entries are tensors: nothing in it is run by loading it. What is random on the
device is drawn anew each step from the seed and the step number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from training.backend import State

FORMAT = 2
WEIGHTS, EMA = "model", "ema"
"""What the names of weights, and of their moving average, begin with."""
POSITION = ("step", "epoch", "images_in_epoch")
OPTIONAL = ("classes", "order")
RNG = "rng"


def tree(state: State, training: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what DCP is to write or to read into: its entries' names are the path to a tensor.

    ``training`` holds the ``training.*`` entries, which are left out if there are none.
    """
    content: dict[str, Any] = {WEIGHTS: state.model}
    if state.ema is not None:
        content[EMA] = state.ema
    if state.optimizer is not None:
        content["optimizer"] = {"state": state.optimizer}
    return content | ({"training": dict(training)} if training else {})


def training_entry(name: str) -> str:
    """Return the full name of a ``training.*`` entry."""
    return f"training.{name}"


@dataclass(frozen=True)
class Position:
    """Says where a run stands: updates done, full epochs done, images into the current epoch."""

    step: int = 0
    epoch: int = 0
    images_in_epoch: int = 0


@dataclass(frozen=True)
class SavedRun:
    """Holds what a checkpoint says of itself, read without any device."""

    path: Path
    position: Position
    arguments: dict[str, Any]
    classes: list[str] | None = None
    """The names by label; None where the data had none, or an earlier version wrote the
    checkpoint."""
    order: dict[str, Any] | None = None
    """What decides, beside ``arguments``, the order of its training images (``DataSource.order``);
    None where an earlier version wrote the checkpoint."""


def training_tensors(
    position: Position,
    arguments: dict[str, Any],
    classes: list[str] | None,
    order: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the ``training.*`` entries of a checkpoint, except the random state."""
    tensors = {
        "step": torch.tensor(position.step),
        "epoch": torch.tensor(position.epoch),
        "images_in_epoch": torch.tensor(position.images_in_epoch),
        "arguments": _json_tensor(arguments),
        "format": torch.tensor(FORMAT),
    }
    for name, value in zip(OPTIONAL, (classes, order), strict=True):
        if value is not None:
            tensors[name] = _json_tensor(value)
    return tensors


def saved_run(path: Path, training: Mapping[str, torch.Tensor]) -> SavedRun:
    """Return what ``training_tensors`` were made of.

    Raises anything if they are not such tensors.
    """
    position = Position(*(int(training[name]) for name in POSITION))
    optional = {name: _from_json(training[name]) for name in OPTIONAL if name in training}
    return SavedRun(path, position, _from_json(training["arguments"]), **optional)


def _json_tensor(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_json(tensor: torch.Tensor) -> Any:
    return json.loads(bytes(tensor.tolist()))
