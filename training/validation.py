"""Checks that need no device: what is wrong is said in one line before anything starts."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path

from data.build import DataSource
from data.errors import DataFolderError, printable
from models.config import VitConfig
from training.arguments import MODEL_FLAG, model_config
from training.checkpoints.content import SavedRun
from training.errors import UsageError, is_first_of_torchrun


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
    if config.embed_dim * config.mlp_ratio < 1:
        raise UsageError(f"--mlp_ratio {config.mlp_ratio} leaves no MLP")
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
    if args.wandb:
        _check_wandb()
    for flag, (low, high) in (("--scale", args.scale), ("--ratio", args.ratio)):
        if low > high:
            raise UsageError(f"{flag} {low} {high}: the first must not be above the second")
    if args.scale[1] == 0:
        raise UsageError("--scale 0 0 leaves no image to crop")
    if Path(args.ckpt_dir).exists() and not Path(args.ckpt_dir).is_dir():
        raise UsageError(f"--ckpt_dir {args.ckpt_dir} is a file, not a folder")


def _check_wandb() -> None:
    """Raises UsageError without wandb, or a login for it; asks no server."""
    if importlib.util.find_spec("wandb") is None:
        raise UsageError("--wandb needs the package wandb: python3 -m pip install wandb")
    if not is_first_of_torchrun():  # the others do not log
        return
    from wandb.sdk import wandb_setup

    try:
        from wandb.sdk.lib.wbauth import authenticate_session
    except ImportError:  # another version: wandb itself will say so, later
        return
    try:
        settings = wandb_setup.singleton().settings
        logged_in = settings.mode in ("offline", "disabled", "dryrun") or authenticate_session(
            host=settings.base_url, source="--wandb", prompt=False, update_session=False
        )
    except TypeError:  # another version's function
        return
    except Exception as error:  # noqa: BLE001 - of a key or variable that cannot be
        raise UsageError("--wandb: " + ", ".join(str(error).splitlines()[:3])) from None
    if not logged_in:
        raise UsageError(
            "--wandb needs a login on this host: wandb login, or WANDB_API_KEY; WANDB_MODE=offline "
            "goes without"
        )


@contextlib.contextmanager
def bad_data_is_the_users() -> Iterator[None]:
    """Around what reads data: a folder that cannot be used is the user's to mend."""
    try:
        yield
    except DataFolderError as error:
        raise UsageError(str(error)) from None


def check_same_classes(classes: Sequence[str] | None, path: Path, data: DataSource) -> None:
    """Raises UsageError where ``classes``, by label those that the weights in ``path`` were trained
    on, are not those of ``data``; None: not known.

    Labels are positions among the folders: one folder less, and all after it are wrong.
    """
    if classes is None or data.classes is None:
        return
    for label, (there, here) in enumerate(zip_longest(classes, data.classes)):
        if there != here:
            raise UsageError(printable(
                f"{path} was trained on other classes than those of {data.name}/val: "
                f"number {label} is {there or 'none'} there, {here or 'none'} here"
            ))  # fmt: skip


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
