"""What a plain PyTorch user makes of a checkpoint: PyTorch's own tool, timm's own model."""

from pathlib import Path

import torch
from timm.models.vision_transformer import VisionTransformer
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.cli import TINY_SIZES


def tiny_timm_model(patch_size: int = 4) -> VisionTransformer:
    """That of ``tests.support.cli.TINY_MODEL``."""
    return VisionTransformer(
        **TINY_SIZES | {"patch_size": patch_size},
        num_classes=10,
        class_token=False,
        global_pool="avg",
        fc_norm=False,
    )


def convert(step_folder: Path, target: Path) -> dict:
    """One plain file of a sharded checkpoint, and what is in it."""
    dcp_to_torch_save(step_folder, target)
    return torch.load(target, weights_only=True)
