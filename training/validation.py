"""Checks that need no device: what is wrong is said in one line before anything starts."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import asdict, replace
from pathlib import Path

from models.config import VitConfig
from training.arguments import MODEL_FLAG, model_config
from training.checkpoint import SavedRun
from training.errors import UsageError


def check_model(config: VitConfig) -> None:
    """Raises UsageError for a model that cannot be built."""
    if config.img_size % config.patch_size:
        raise UsageError(
            f"--image_size {config.img_size} is not a multiple of --patch_size {config.patch_size}"
        )
    if config.embed_dim % config.num_heads:
        raise UsageError(
            f"--embed_dim {config.embed_dim} is not a multiple of --num_heads {config.num_heads}"
        )
    if config.global_pool == "token" and not config.class_token:
        raise UsageError("--global_pool token needs --class_token")
    if config.patch_drop_rate and int(config.num_patches * (1 - config.patch_drop_rate)) < 1:
        raise UsageError(f"--patch_drop_rate {config.patch_drop_rate} leaves no patch")


def check_run(args: argparse.Namespace, device_count: int) -> None:
    """Raises UsageError for flags that cannot go together on this many devices."""
    micro_batches, together = args.grad_accum_steps, args.mesh_tensor
    if args.batch_size % (device_count // together * micro_batches):
        parts = f"{device_count} devices" + (f" / --mesh_tensor {together}" if together > 1 else "")
        passes = f" x --grad_accum_steps {micro_batches}" if micro_batches > 1 else ""
        raise UsageError(
            f"--batch_size {args.batch_size} (global) is no multiple of the {parts}{passes}"
        )
    if args.wandb and importlib.util.find_spec("wandb") is None:
        raise UsageError("--wandb needs the package wandb: python3 -m pip install wandb")
    for flag, (low, high) in (("--scale", args.scale), ("--ratio", args.ratio)):
        if low > high:
            raise UsageError(f"{flag} {low} {high}: the first must not be above the second")
    if args.scale[1] == 0:
        raise UsageError("--scale 0 0 leaves no image to crop")
    if Path(args.ckpt_dir).exists() and not Path(args.ckpt_dir).is_dir():
        raise UsageError(f"--ckpt_dir {args.ckpt_dir} is a file, not a folder")


def check_same_model(saved: SavedRun, config: VitConfig) -> None:
    """Raises UsageError naming the first model argument that differs from the checkpoint's.

    Dropout rates and the scheme of initialisation may change: weights fit all the same.
    """
    before = model_config(argparse.Namespace(**saved.arguments))
    free = {name: getattr(config, name) for name in asdict(config)
            if name.endswith("_rate") or name == "weight_init"}  # fmt: skip
    before = replace(before, **free)
    for name, value in asdict(config).items():
        old = getattr(before, name)
        if old != value:
            raise UsageError(
                f"{saved.path} was trained with {MODEL_FLAG[name]} {old}, not {value}: "
                f"give {MODEL_FLAG[name]} {old}, or train anew in another --ckpt_dir"
            )
