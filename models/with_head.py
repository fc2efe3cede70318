"""A timm model with more heads: for objectives that predict something besides classes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from models.config import ModelError
from models.spec import ModelSpec
from models.timm_models import TimmSpec


def with_head(trunk: ModelSpec, name: str, outputs: int) -> ModelSpec:
    """Return ``trunk`` with a linear layer ``name`` of ``outputs`` values, next to its classifier.

    The model returns (logits, values), (batch, classes) and (batch, outputs); both heads are given
    the same pooled tokens. If ``trunk`` is from this function, too, the model returns the values of
    each head, in the order in which they were added. Raises ModelError for a model that is not one
    of timm's VisionTransformer or Eva, and ValueError for a name that does not start with "head_"
    or is taken.
    """
    if not name.startswith("head_"):
        raise ValueError(f"with_head: {name!r} must start with 'head_', as in 'head_{name}'")
    if not isinstance(trunk, TimmSpec):
        raise ModelError(
            f"a head {name} requires a VisionTransformer or Eva model of timm, and {trunk.name} is "
            "neither"
        )
    earlier = trunk.heads if isinstance(trunk, _SpecWithHeads) else {}
    if name in earlier or hasattr(trunk.meta, name):
        raise ValueError(f"with_head: {trunk.name} has {name!r} already")
    return _SpecWithHeads(trunk, {**earlier, name: outputs})


class _SpecWithHeads(TimmSpec):
    def __init__(self, trunk: TimmSpec, heads: Mapping[str, int]) -> None:
        self.heads = heads
        given = (trunk.name, trunk.overrides, trunk.kind, trunk.arguments)
        super().__init__(*given, trunk.preprocessing)
        self.settings |= heads

    def build(self) -> nn.Module:
        model: Any = super().build()
        kind: Any = self.kind
        model.__class__ = _model_with_heads(kind)
        model.other_heads = tuple(self.heads)
        for name, outputs in self.heads.items():
            model.add_module(name, nn.Linear(model.num_features, outputs, device="meta"))
        return model


@functools.cache  # so that all models of a spec are of one class
def _model_with_heads(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of models with other heads, given that of the model without."""
    return type(f"{kind.__name__}WithHeads", (_WithHeads, kind), {})


class _WithHeads:
    """Computes the other heads, too."""

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pooled = self.forward_head(self.forward_features(x), pre_logits=True)
        return self.head(pooled), *(getattr(self, name)(pooled) for name in self.other_heads)
