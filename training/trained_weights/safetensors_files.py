"""Which safetensors files hold a model's weights, and what they say of the run that made them.

A folder of them is in Hugging Face's layout: ``model.safetensors``, or shards that
``model.safetensors.index.json`` lists.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from training.checkpoints.content import Position, SavedRun

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_RUN = "training"
"""The name in a file's metadata of what our checkpoints call ``training.*``, as JSON."""


def safetensors_files(path: Path) -> list[Path]:
    """Return the files of a model that ``path`` stands for; none if it is no such file or folder.

    Raises ValueError for an index that names no files of its folder.
    """
    if path.is_file():
        return [path] if path.suffix == ".safetensors" else []
    if (path / INDEX).is_file():
        content = json.loads((path / INDEX).read_text())
        named = content.get("weight_map") if isinstance(content, Mapping) else None
        if not isinstance(named, Mapping) or not named:
            raise ValueError(f"{INDEX} has no weight_map")
        for name in named.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError(f"{INDEX} names {name!r}, which is no file of the folder")
        return [path / name for name in sorted(set(named.values()))]
    return [path / ONE_FILE] if (path / ONE_FILE).is_file() else []


def metadata_of(file: Path) -> dict[str, str]:
    """Return the strings that a file has beside its tensors. Raises anything if it is damaged."""
    with safe_open(file, framework="pt") as opened:
        return opened.metadata() or {}


def run_as_text(run: SavedRun) -> dict[str, str]:
    """Return what a file's metadata says of a run."""
    at = run.position
    content = {"step": at.step, "epoch": at.epoch, "images_in_epoch": at.images_in_epoch}
    told: dict[str, Any] = {**content, "arguments": run.arguments, "classes": run.classes}
    return {_RUN: json.dumps(told)}


def run_of(path: Path, metadata: Mapping[str, str]) -> SavedRun | None:
    """Return the run that ``run_as_text`` told of; None if it was another program's.

    Raises anything if it is damaged.
    """
    if _RUN not in metadata:
        return None
    try:
        told = json.loads(metadata[_RUN])
    except ValueError:  # another program's word
        return None
    if not isinstance(told, Mapping) or "arguments" not in told:
        return None
    at = Position(*(int(told[name]) for name in ("step", "epoch", "images_in_epoch")))
    return SavedRun(path, at, dict(told["arguments"]), told["classes"])
