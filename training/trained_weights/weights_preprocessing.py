"""Which preprocessing goes with the weights; checkpoints keep it among the arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from data.image.preprocessing import CROP_MODES, INTERPOLATIONS, Preprocessing
from training.checkpoints.content import SavedRun
from training.errors import UsageError
from training.options.resolve import Run
from training.trained_weights.safetensors_files import metadata_of, safetensors_files
from training.trained_weights.weights import Weights

_NAMES = tuple(field.name for field in fields(Preprocessing))
_MOST_OF_VOLUMES = 1e30
"""Values of images are from 0 to 1, those of volumes any numbers: Hounsfield units, say."""
CONFIG_FILE = "config.json"  # beside the weights in a repository of timm's on Hugging Face


def with_preprocessing(run: Run, saved: SavedRun | None) -> Run:
    """Return the run with what was not asked as ``saved`` has it, or as for new weights.

    Raises UsageError if ``saved`` has values that cannot be.
    """
    new = Preprocessing.of_new_weights(run.config.data.data_source)
    base = _checked(saved.arguments, saved.path) if saved else new
    return _settled(run, base)


def with_preprocessing_of(weights: Weights, run: Run) -> tuple[Weights, Run]:
    """Return the weights with what is to be said of their preprocessing, and the run with it.

    Raises UsageError if they have values that cannot be.
    """
    if weights.run:
        return weights, with_preprocessing(run, weights.run)
    run, note = with_preprocessing_of_file(run, weights.path)
    return replace(weights, note=note), run


def with_preprocessing_of_file(run: Run, path: Path) -> tuple[Run, str]:
    """Return the run as a file of weights alone says, or as timm has it for the model.

    Returns a line, too, that tells what was taken from where; "" for the values of new weights.
    Raises UsageError for values that cannot be.
    """
    found, source = _told_by_file(path), f"{path} and its {CONFIG_FILE}"
    if found is None:
        found, source = run.model.preprocessing, f"timm's {run.model.name}"
    base = Preprocessing() if found is None else _checked(found, path)
    run = _settled(run, base)
    if found is None:
        return run, ""
    return run, f"preprocessing: {run.config.data.preprocessing} (as {source} has it)"


def preprocessing_of(saved: SavedRun) -> Preprocessing:
    """Return what a run's weights were trained with. Raises UsageError for what cannot be."""
    return _checked(saved.arguments, saved.path)


def _settled(run: Run, base: Preprocessing) -> Run:
    asked = run.config.data
    left = {name: value for name, value in asdict(base).items() if getattr(asked, name) is None}
    return run.with_data(**left)


def _checked(values: Mapping[str, Any], path: Path) -> Preprocessing:
    """Return the defaults with those of ``values`` over them."""
    given: dict[str, Any] = {n: values[n] for n in _NAMES if values.get(n) not in (None, "")}
    most = _MOST_OF_VOLUMES if values.get("data_source") == "volumes" else 1.0
    for name, value in given.items():
        if not _can_be(name, value, most):
            raise UsageError(f"{path} has {name} {value!r}, which is not known here: give --{name}")
    given |= {name: tuple(given[name]) for name in ("mean", "std") if name in given}
    return Preprocessing(**given)


def _can_be(name: str, value: Any, most: float) -> bool:
    if name in ("interpolation", "test_interpolation"):
        return value in INTERPOLATIONS
    if name == "crop_mode":
        return value in CROP_MODES
    if name == "crop_pct":
        return isinstance(value, (int, float)) and 0 < value <= 1
    low = 1e-6 if name == "std" else 0.0 if most == 1 else -most
    return (
        isinstance(value, (list, tuple))
        and len(value) == 3
        and all(isinstance(colour, (int, float)) and low <= colour <= most for colour in value)
    )


def _told_by_file(path: Path) -> Mapping[str, Any] | None:
    """Read timm's ``pretrained_cfg`` in the metadata of .safetensors files, or beside them."""
    files = safetensors_files(path)
    texts = [metadata_of(files[0]).get("pretrained_cfg", "")] if files else []
    config = path / CONFIG_FILE if path.is_dir() else path.with_name(CONFIG_FILE)
    if config.is_file():
        texts.append(config.read_text(errors="replace"))
    for text in texts:
        try:
            content = json.loads(text)
        except ValueError:
            continue
        if isinstance(content, Mapping):
            content = content.get("pretrained_cfg", content)
        if isinstance(content, Mapping) and any(name in content for name in _NAMES):
            return content
    return None
