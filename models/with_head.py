"""A timm model with one more head: for objectives that predict something besides classes."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from models.config import ModelError
from models.spec import ModelSpec
from models.timm_models import TimmSpec


def with_head(trunk: ModelSpec, name: str, outputs: int) -> ModelSpec:
    """Return ``trunk`` with a linear layer ``name`` of ``outputs`` values, next to its classifier.

    The model returns (logits, values), (batch, classes) and (batch, outputs); both heads are given
    the same pooled tokens. ``name`` must start with "head_". Raises ModelError for a model that is
    not one of timm's VisionTransformer or Eva.
    """
    assert name.startswith("head_"), name
    if not isinstance(trunk, TimmSpec):
        raise ModelError(
            f"a head {name} requires a VisionTransformer or Eva model of timm, and {trunk.name} is "
            "neither"
        )
    return _SpecWithHead(trunk, name, outputs)


class _SpecWithHead(TimmSpec):
    def __init__(self, trunk: TimmSpec, name: str, outputs: int) -> None:
        self._head = name, outputs
        given = (trunk.name, trunk.overrides, trunk.kind, trunk.arguments)
        super().__init__(*given, trunk.preprocessing)
        self.settings[name] = outputs

    def build(self) -> nn.Module:
        model: Any = super().build()
        name, outputs = self._head
        model.__class__ = _EvaWithHead if self.kind is Eva else _VisionTransformerWithHead
        model.other_head = name
        model.add_module(name, nn.Linear(model.num_features, outputs, device="meta"))
        return model


class _WithHead:
    """Computes the other head, too."""

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.forward_head(self.forward_features(x), pre_logits=True)
        return self.head(pooled), getattr(self, self.other_head)(pooled)


class _VisionTransformerWithHead(_WithHead, VisionTransformer):
    pass


class _EvaWithHead(_WithHead, Eva):
    pass
