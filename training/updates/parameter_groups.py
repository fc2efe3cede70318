"""How each parameter is updated: by which rule, how fast, with which decay, or not at all.

It follows from a parameter's name and shape in the plain model alone, whatever backend shards it.
Groups are timm's: ``timm.optim.param_groups_layer_decay``, ``param_groups_weight_decay`` and the
rule by which ``timm.optim.Muon`` leaves a parameter to AdamW.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from models.spec import ModelSpec
from models.timm_private import is_suitable_for_muon
from training.options.config import OptimizerConfig

Rule = Literal["adamw", "lion", "muon"]
MOMENTS: dict[Rule, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "muon": ("momentum_buffer",),
}
"""What each rule keeps of a parameter, in tensors like it, by the names in PyTorch's and timm's
optimizers and in checkpoints."""


@dataclass(frozen=True)
class Update:
    """Says how one parameter is updated."""

    rule: Rule
    weight_decay: float
    lr_scale: float = 1.0
    """What the learning rate is multiplied by."""
    matrix: tuple[int, int] | None = None
    """Rows and columns of the matrix that Muon takes the parameter for; None with other rules."""


Updates = Mapping[str, Update]
"""How each parameter that trains is updated, by its name in the plain model; those that are not
there keep their values."""


def updates_of(config: OptimizerConfig, model: ModelSpec) -> Updates:
    """Return how ``config`` updates each parameter of ``model``."""
    shapes = {name: parameter.shape for name, parameter in model.meta.named_parameters()}
    scales = lr_scales(model.layers, config.layer_decay)
    without = undecayed(shapes, config.no_decay or (), model.no_weight_decay)
    return {
        name: _update(
            config.optimizer,
            shape,
            0.0 if name in without else config.weight_decay,
            scales[name],
        )
        for name, shape in shapes.items()
        if not config.linear_probe or name in model.head_parameters
    }


def all_by_adamw(model: ModelSpec, weight_decay: float) -> Updates:
    """Return the updates of a model whose parameters are all treated alike."""
    return {name: Update("adamw", weight_decay) for name, _ in model.meta.named_parameters()}


def _update(optimizer: Rule, shape: torch.Size, weight_decay: float, lr_scale: float) -> Update:
    if optimizer == "muon":
        if is_suitable_for_muon(shape):
            return Update("muon", weight_decay, lr_scale, (shape[0], math.prod(shape[1:])))
        optimizer = "adamw"
    return Update(optimizer, weight_decay, lr_scale)


def lr_scales(layers: Mapping[str, int], layer_decay: float) -> dict[str, float]:
    """Return what each parameter's learning rate is multiplied by, given its layer's number.

    It is ``layer_decay`` to the power of how many layers lie between it and the last one.
    """
    last = max(layers.values())
    return {name: layer_decay ** (last - layer) for name, layer in layers.items()}


def undecayed(
    shapes: Mapping[str, torch.Size], kinds: Collection[str], embeddings: Collection[str]
) -> set[str]:
    """Return the parameters that are not decayed: those of these ``kinds``.

    "biases": whose names end with it; "norms": all others of one dimension, such as the scales of
    norms and of layers; "embeddings": whose names match one of the patterns ``embeddings``. All
    three together are what timm does not decay.
    """

    def kind(name: str, shape: torch.Size) -> str:
        if any(fnmatch.fnmatch(name, pattern) for pattern in embeddings):
            return "embeddings"
        if name.endswith("bias"):
            return "biases"
        return "norms" if len(shape) <= 1 else ""

    return {name for name, shape in shapes.items() if kind(name, shape) in kinds}
