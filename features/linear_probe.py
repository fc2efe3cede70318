"""A linear probe: ``--linear_probe`` trains only the head of a classifier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.config import RunConfig
from training.errors import UsageError
from training.feature import Feature
from training.resolve import model_flags

if TYPE_CHECKING:
    from models.spec import ModelSpec
    from training.resolve import Run


class LinearProbe(Feature):
    """What does not go with frozen blocks, which compute as in evaluation."""

    turned_on_by = ("--linear_probe",)
    excludes = {
        **dict.fromkeys(("--layer_decay", "--freeze_backbone_epochs"), "only the head is trained"),
        "--rope_rescale_coords": "frozen blocks compute as in evaluation",
        **dict.fromkeys(("--flatten_parameters", "--block", "--plan"), ""),
    }

    def resolve_model(self, config: RunConfig, model: ModelSpec) -> RunConfig:
        for name, rate in model.settings.items():
            if name.endswith("_rate") and name != "drop_rate" and rate:
                flag = model_flags()[name]
                raise UsageError(
                    f"--linear_probe is incompatible with {flag} {rate:g}: set {flag} 0"
                )
        return config

    def train_flops(self, run: Run, model: ModelSpec, flops: float) -> float:
        """Without those of the backward pass, of which there is (almost) none."""
        return flops / 3
