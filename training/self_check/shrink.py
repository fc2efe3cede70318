"""The user's run made small: the same flags and form, a model and a batch of seconds."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, replace
from typing import Any

from models.config import VitConfig
from training.arguments import model_config

_GRID, _PATCH = 4, 4
_DEPTH = 3
"""Blocks: a first one, a last one, and one that is neither."""
_CLASSES = 11
"""Divisible by hardly any number of devices: parameters are cut unevenly, or not at all, too."""
_HEADS = 2
_HEAD_WIDTH = 8
_WIDTH = 32
_MICRO_BATCHES = 3
_ROWS, _FEW_ROWS, _FROM_REPLICAS = 4, 2, 8
"""Images a replica and pass; the smaller number from so many replicas on."""
_FP8_MULTIPLE = 32
_LAYER_SCALE = 0.1


def shrink(args: argparse.Namespace, devices: int) -> argparse.Namespace:
    """The arguments of the small run.

    What depends on random masks is left out: dropout of all kinds.
    """
    config = _small_model(model_config(args), args, devices)
    small = argparse.Namespace(**vars(args) | asdict(config))
    small.grad_accum_steps = min(args.grad_accum_steps, _MICRO_BATCHES)
    small.mark_step_every_n_blocks = min(args.mark_step_every_n_blocks, 1)
    replicas = devices // args.mesh_tensor
    most = args.batch_size // (replicas * args.grad_accum_steps)
    rows = min(most, _ROWS if replicas < _FROM_REPLICAS else _FEW_ROWS)
    if args.fp8 != "none":
        rows = _FP8_MULTIPLE
    small.batch_size = replicas * small.grad_accum_steps * rows
    return small


def _small_model(config: VitConfig, args: argparse.Namespace, devices: int) -> VitConfig:
    heads = args.mesh_tensor if args.mesh_tensor > 1 else min(config.num_heads, _HEADS)
    # All devices hold a part of each large parameter, as of the real model's.
    step = math.lcm(heads * _HEAD_WIDTH, devices, 1 if args.fp8 == "none" else _FP8_MULTIPLE)
    width = step * -(-_WIDTH // step)
    part = math.lcm(args.mesh_tensor, 1 if args.fp8 == "none" else _FP8_MULTIPLE)
    hidden = part * max(1, round(width * config.mlp_ratio / part))
    grid = min(config.img_size // config.patch_size, _GRID)
    patch = min(config.patch_size, _PATCH)
    without_dropout: dict[str, Any] = {
        name: 0.0 for name in asdict(config) if name.endswith("_rate")
    }
    return replace(
        config,
        **without_dropout,
        img_size=grid * patch,
        patch_size=patch,
        embed_dim=width,
        num_heads=heads,
        depth=min(config.depth, _DEPTH),
        mlp_ratio=(hidden + 0.5) / width,  # of which timm takes the whole part
        num_classes=_CLASSES,
        reg_tokens=min(config.reg_tokens, 2),
        init_values=None if config.init_values is None else _LAYER_SCALE,
    )
