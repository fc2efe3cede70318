"""The family of models with a name of this project: ``--model vit_10b``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from models.config import PRESETS, VitConfig, check_arguments, check_patches, check_taken

if TYPE_CHECKING:
    from models.spec import ModelSpec

_FINE_TUNED = ("img_size", "in_chans", "num_classes", "weight_init")
"""What fine-tuning may change without changing the preprocessing that timm's weights expect."""


def names() -> list[str]:
    return list(PRESETS)


def open_model(name: str, overrides: Mapping[str, Any]) -> ModelSpec | None:
    """Return the preset with ``overrides``, arguments of VisionTransformer, over its own; None if
    there is no such preset.

    Raises ModelError for an argument that a preset does not have, and for sizes that do not fit.
    """
    if name not in PRESETS:
        return None
    check_taken(name, overrides, VitConfig)
    config = replace(PRESETS[name], **overrides)
    check_patches(config.img_size, config.patch_size)
    check_arguments(asdict(config))
    # Imported only now: timm takes seconds, and a wrong size is reported before.
    from timm import get_pretrained_cfg
    from timm.models.vision_transformer import VisionTransformer

    from models.timm_models import TimmSpec, preprocessing_of

    trained = None
    if all(key in _FINE_TUNED or key.endswith("_rate") for key in overrides):
        trained = get_pretrained_cfg(name)
    return TimmSpec(name, overrides, VisionTransformer, asdict(config), preprocessing_of(trained))
