"""What ``--objective mae`` asks of the program."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from features.mae.config import MaeConfig
from training.config import RunConfig
from training.feature import Feature, SmallSizes

if TYPE_CHECKING:
    from models.spec import ModelSpec

_MASK_RATIOS = (0.1, 0.9)
"""Between which some of the small run's patches are masked, and some are not."""


class Mae(Feature):
    """The decoder, which is part of the model (``model.py``), and its flags."""

    flags = MaeConfig
    objective = "features.mae.objective:Reconstruction"
    turned_on_by = ("--objective mae",)
    excludes = {
        "--mesh_tensor": "",
        "--patch_drop_rate": "--mask_ratio of the patches are hidden",
        "--weight_init": "the paper has its own",
    }
    choices = {"objective": {"mae": "masked autoencoding"}}
    loss_label = "squared error"
    saved_with_weights = True
    parameters = ("mask_token", "decoder_")

    def extend_model(self, spec: ModelSpec, config: RunConfig) -> ModelSpec:
        from features.mae.model import add_to

        return add_to(spec, config.of(MaeConfig))

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
