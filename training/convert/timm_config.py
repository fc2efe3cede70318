"""What timm and Hugging Face want to know beside weights: the content of ``config.json``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import timm

from models.config import ModelConfig, VitConfig
from models.timm_names import EVA_NAMES
from models.timm_spec import TimmSpec
from training.checkpoints.content import SavedRun
from training.options.flag_rules import from_values
from training.options.resolve import model_of
from training.trained_weights.weights_preprocessing import preprocessing_of

_ANY_VIT = "vit_base_patch16_224"
"""The name that timm is given for a preset of ours: all its arguments stand beside it."""


def timm_config(run: SavedRun) -> dict[str, Any] | None:
    """Return what ``timm.create_model("local-dir:...")`` makes the run's model of, as timm writes
    it for Hugging Face; None for a model that is not timm's. Raises UsageError."""
    spec = model_of(from_values(ModelConfig, run.arguments))
    if not isinstance(spec, TimmSpec):
        return None
    if spec.name.startswith("timm/"):
        architecture = spec.name.removeprefix("timm/").partition(".")[0]
        names = [name if name in spec.settings else EVA_NAMES[name] for name in spec.overrides]
    else:
        architecture = spec.name if timm.is_model(spec.name) else _ANY_VIT
        names = [field.name for field in fields(VitConfig) if field.name != "weight_init"]
    arguments = {name: spec.settings[name] for name in names if spec.settings[name] is not None}
    sizes, how = spec.sizes, preprocessing_of(run)
    mean, std = how.of_channels(sizes.input_shape[0])
    config: dict[str, Any] = {
        "architecture": architecture,
        "num_classes": sizes.num_classes,
        "num_features": sizes.embed_dim,
        "model_args": arguments | {"num_classes": sizes.num_classes},
        "pretrained_cfg": {
            "input_size": list(sizes.input_shape),
            "fixed_input_size": True,
            "num_classes": sizes.num_classes,
            "mean": mean,
            "std": std,
            "crop_pct": how.crop_pct,
            "crop_mode": how.crop_mode,
            "interpolation": how.interpolation_of_val,
            "custom_load": False,
            "classifier": "head",
        },
    }
    if sizes.input_shape[0] == 3:  # else timm would sum its weights over the channels
        config["pretrained_cfg"]["first_conv"] = "patch_embed.proj"
    return config | ({"label_names": run.classes} if run.classes else {})
