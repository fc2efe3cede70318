"""The model's state dict in what a training script saved, e.g. in nested dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from training.checkpoints import format as checkpoint
from training.weights.dcp_folder import StoredTensor
from training.weights.source import no_ema

SAVE = "save only the weights, with torch.save(model.state_dict(), FILE)"
"""Advice for content that is not loaded."""
_SAVE_WHOLE = (
    "save whole ones, those of torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True))"
)
_OF_ONE_CHIP = (
    "it has one chip's shards of the weights (PyTorch/XLA FSDP): join the files of all chips with "
    "python3 -m torch_xla.distributed.fsdp.consolidate_sharded_ckpts (docs/coming_from.md)"
)
_EMA_KEYS = (checkpoint.EMA, "state_dict_ema", "model_ema")
"""The name of the EMA in files made by ``dcp_to_torch`` and by timm."""
_MODEL_KEYS = ("model", "state_dict")
_I_JEPA = ("encoder", "target_encoder")
"""State dicts of I-JEPA, of which timm loads the first."""


def ema_of(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the EMA of the weights in a file's content. Raises UsageError if there is none."""
    content = _unwrapped(content)
    found = next((content[key] for key in _EMA_KEYS if key in content), None)
    if not isinstance(found, Mapping):
        raise no_ema(path)
    return found


def state_dict_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's part of the content of a file, or of a DCP folder, under the names there.

    Names from several state dicts, e.g. of a student and a teacher, start with the dict's key.
    Raises ValueError if there is none of whole tensors.
    """
    if content.get("shard_metadata") is not None:
        raise ValueError(_OF_ONE_CHIP)
    content = _unwrapped(content)
    if any(map(_is_tensor, content.values())):  # the model's, next to its optimizer
        content = {
            key: each
            for key, each in content.items()
            if not (isinstance(each, Mapping) and str(key).startswith("optim"))
        }
    inside = [content.get(key) for key in _MODEL_KEYS]
    dicts = {
        key: each
        for key, each in content.items()
        if isinstance(each, Mapping) and each and all(map(_is_tensor, each.values()))
    }
    if chosen := next((each for each in inside if isinstance(each, Mapping)), None):
        content = chosen
    elif dicts.keys() >= {*_I_JEPA}:
        content = dicts[_I_JEPA[0]]
    elif dicts and not any(map(_is_tensor, content.values())):
        content = {
            f"{key}.{name}": value for key, each in dicts.items() for name, value in each.items()
        }
    tensors = {name: value for name, value in content.items() if _is_tensor(value)}
    if not tensors or len(tensors) < len(content):
        raise ValueError(f"it contains no state dict of tensors: {SAVE}")
    if any(isinstance(value, DTensor) for value in tensors.values()):
        raise ValueError(f"it contains one process's parts of tensors: {_SAVE_WHOLE}")
    return tensors


def _unwrapped(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the dictionary with the model and its optimizer: the content or, as in
    ``{"app": {"model": ..., "optim": ...}}``, the only one inside it that has a model."""
    if any(isinstance(content.get(key), Mapping) for key in _MODEL_KEYS):
        return content
    inside = [
        each
        for each in content.values()
        if isinstance(each, Mapping)
        and any(isinstance(each.get(key), Mapping) for key in _MODEL_KEYS)
    ]
    return inside[0] if len(inside) == 1 else content


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | StoredTensor)
