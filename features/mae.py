"""Masked autoencoding (MAE): ``--objective mae``."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from training.config import RunConfig
from training.feature import Feature, SmallSizes
from training.objectives.mae_config import MaeConfig

if TYPE_CHECKING:
    from models.spec import ModelSpec

_MASK_RATIOS = (0.1, 0.9)
"""Between which some of the small run's patches are masked, and some are not."""


class Mae(Feature):
    """The decoder, which is part of the model (``models/mae.py``), and its flags."""

    flags = MaeConfig
    objective = "training.objectives.mae:Reconstruction"
    turned_on_by = ("--objective mae",)
    choices = {"objective": {"mae": "masked autoencoding"}}
    loss_label = "squared error"
    saved_with_weights = True

    def extend_model(self, spec: ModelSpec, config: RunConfig) -> ModelSpec:
        from models import mae

        return mae.add_to(spec, asdict(config.of(MaeConfig)))

    def shrink(self, config: RunConfig, small: SmallSizes) -> RunConfig:
        mae, (least, most) = config.of(MaeConfig), _MASK_RATIOS
        return config.with_flags(
            replace(
                mae,
                mask_ratio=min(max(mae.mask_ratio, least), most),
                decoder_depth=min(mae.decoder_depth, small.depth),
                decoder_embed_dim=small.width,
                decoder_num_heads=small.heads,
            )
        )
