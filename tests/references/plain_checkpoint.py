"""What a plain PyTorch user makes of a checkpoint: PyTorch's own tool, timm's own model."""

from pathlib import Path

import torch
from timm.models.vision_transformer import VisionTransformer

from tests.support.cli import run_program


def tiny_timm_model(patch_size: int = 4) -> VisionTransformer:
    """That of ``tests.support.cli.TINY_MODEL``."""
    return VisionTransformer(
        img_size=16,
        patch_size=patch_size,
        embed_dim=32,
        depth=2,
        num_heads=2,
        num_classes=10,
        class_token=False,
        global_pool="avg",
        fc_norm=False,
    )


def convert(step_folder: Path, target: Path) -> dict:
    """One plain file of a sharded checkpoint, and what is in it."""
    tool = ("-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch")
    done = run_program(*tool, str(step_folder), str(target))
    assert done.returncode == 0, done.stderr
    return torch.load(target, weights_only=True)
