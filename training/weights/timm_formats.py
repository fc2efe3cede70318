"""Published weights that timm converts on loading, with its function for the model: OpenCLIP, CLIP,
AIMv2, BEiT-3, RADIO, DINOv2 and DINOv3 by their own names, EVA, Perception Encoder and others.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from models.spec import ModelSpec
from models.timm_private import checkpoint_filter
from training.weights.source import Source

_RADIO = "radio_model.model.patch_generator.embedder.weight"


class Unconverted(Exception):
    """timm does not convert the tensors for the model."""


class _Unsized:
    """The model as timm's function sees it: with the patches of the file and without positions, so
    that it resamples neither. ``adapt`` does, and says so."""

    def __init__(self, model: nn.Module, patches: torch.Tensor | None) -> None:
        self._model, self.pos_embed = model, None
        if patches is not None:
            self.patch_embed = SimpleNamespace(proj=SimpleNamespace(weight=patches))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def convert(tensors: Mapping[str, torch.Tensor], spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return a file's tensors by timm's names, as timm converts them for the model: views of them
    where possible. Tensors on meta give the shapes. Raises Unconverted.

    Positions keep their grid, except RADIO's, which timm crops to the model's.
    """
    model: Any = spec.meta
    if _RADIO not in tensors:
        model = _Unsized(model, next((each for each in tensors.values() if each.dim() == 4), None))
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints tensors that it leaves out
            return checkpoint_filter(spec.name.removeprefix("timm/"))(dict(tensors), model)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise Unconverted(str(error)) from None


def how(source: Source, spec: ModelSpec) -> str:
    """Return how timm converts the weights, for the log."""
    text = "names converted by timm"
    if _RADIO in source.layouts:
        grid = " x ".join(map(str, spec.sizes.grid))
        text += f"; pos_embed resampled by timm to {grid} patches, as RADIO does"
    return text
