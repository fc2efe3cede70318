"""Every flag of the program, in one place, grouped as ``--help`` shows them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from data.preprocessing import INTERPOLATIONS, Preprocessing
from models.config import PRESETS, VitConfig
from training.argument_types import (
    Formatter,
    Parser,
    bounded,
    channels,
    count,
    fraction,
    non_negative,
    number,
    positive,
    positive_number,
    rate,
    seconds,
    seed,
)
from training.backend_arguments import add_backend_groups

DEFAULT_MODEL = "vit_10b"


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="run_vit_training.py",
        description="Train Vision Transformers too big for one chip: on TPUs (PyTorch/XLA FSDP) "
        "and on NVIDIA GPUs (Megatron-FSDP, FSDP2).",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    _add_run(parser.add_argument_group("run"))
    _add_data(parser.add_argument_group("data"))
    _add_model(parser.add_argument_group("model (timm's names; a flag overrides the preset)"))
    _add_optimization(parser.add_argument_group("optimization"))
    _add_checkpoints(parser.add_argument_group("checkpoints"))
    _add_reports(parser.add_argument_group("logging and evaluation"))
    _add_inference(parser.add_argument_group("use a trained model instead of training"))
    add_backend_groups(parser)
    return parser


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        choices=("auto", "xla", "cuda"),
        default="auto",
        help="cuda: NVIDIA GPUs, or gloo on the CPU where there are none; auto: TPU if there is "
        "one, else CUDA, else XLA on the CPU",
    )
    group.add_argument("--seed", type=seed, default=0, help="of weights, shuffling, dropout")
    group.add_argument("--num_epochs", type=positive, default=300, help="passes over train/")
    group.add_argument(
        "--max_steps",
        type=positive,
        help="end the run after this many optimizer steps, counted over all resumed parts; "
        "checkpoint and evaluate as at the end (default: no limit)",
    )
    group.add_argument(
        "--self_check",
        action="store_true",
        help="train nothing: on the devices and with the flags of this run, but a small model, "
        "compare sharded updates with plain PyTorch on the CPU, and try collectives, a checkpoint "
        "in --ckpt_dir, free disk and the speed of --data_dir; prints a table, the exit code is 1 "
        "if a line fails (docs/self_check.md)",
    )


def _add_data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data_dir",
        default="/datasets/imagenet-1k",
        help="folder with train/<class>/* and val/<class>/* images",
    )
    group.add_argument(
        "--fake_data",
        action="store_true",
        help="all-zero images with label 0, as many as ImageNet has; no host work per step",
    )
    group.add_argument(
        "--num_workers",
        type=bounded(int, 0, 1024),
        default=4,
        help="loader processes per training process; 0: load in it, between steps",
    )
    group.add_argument(
        "--batch_size",
        type=positive,
        default=1024,
        help="images per optimizer step over all devices (global); the devices must divide it",
    )
    group.add_argument(
        "--grad_accum_steps",
        type=positive,
        default=1,
        help="micro-batches per optimizer step: --batch_size is cut into as many passes",
    )
    group.add_argument(
        "--scale",
        type=fraction,
        nargs=2,
        default=(0.08, 1.0),
        metavar=("MIN", "MAX"),
        help="random-resized-crop area, as a share of the image (default: 0.08 1.0)",
    )
    group.add_argument(
        "--ratio",
        type=bounded(float, 0.1, 10),
        nargs=2,
        default=(3 / 4, 4 / 3),
        metavar=("MIN", "MAX"),
        help="random-resized-crop aspect ratio (default: 0.75 1.3333)",
    )
    group.add_argument(
        "--hflip", type=fraction, default=0.5, help="probability of a horizontal flip"
    )
    group.add_argument(
        "--max_bad_images",
        type=count,
        default=100,
        metavar="N",
        help="image files that may be unreadable: in training another image takes the place of "
        "each, in validation they are left out; --ckpt_dir/bad_images.txt lists them; one more "
        "ends the program; 0: the first does",
    )
    _add_preprocessing(group)


def _add_preprocessing(group: argparse._ArgumentGroup) -> None:
    """Flags that default to None: what the weights were trained with, see training.preprocessing.

    Their names are those of data.preprocessing.Preprocessing.
    """
    for name, kind, text in (
        ("mean", fraction, "what is subtracted from each colour (0 to 1)"),
        ("std", bounded(float, 1e-3, 1), "what each colour is divided by, then"),
    ):
        default = " ".join(map(str, getattr(Preprocessing(), name)))
        group.add_argument(
            f"--{name}",
            type=kind,
            nargs=3,
            metavar=("R", "G", "B"),
            help=f"{text}; grey images: the mean of the three (default: that of the weights; "
            f"new ones: ImageNet's, {default})",
        )
    group.add_argument(
        "--crop_pct",
        type=bounded(float, 0.1, 1),
        metavar="SHARE",
        help="in validation, side of the centre crop as a share of the resized image's shorter "
        f"side (default: that of the weights; new ones: {Preprocessing.crop_pct})",
    )
    group.add_argument(
        "--interpolation",
        choices=INTERPOLATIONS,
        help="of resized images (default: that of the weights; new ones: "
        f"{Preprocessing.interpolation})",
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    """Model flags default to None (the preset's value); their dest is timm's name."""
    group.add_argument("--model", choices=sorted(PRESETS), default=DEFAULT_MODEL, help="preset")
    choices = {
        "global_pool": ("token", "avg", "avgmax", "max", "map"),
        "pos_embed": ("learn", "none"),
        "weight_init": ("", "jax", "jax_nlhb", "moco", "reset"),
    }
    for name, names, kind, text in _MODEL_FLAGS:
        preset = getattr(PRESETS[DEFAULT_MODEL], name)
        text = f"{text} (default: the preset's; {DEFAULT_MODEL}: {preset!r})"
        flags = [f"--{flag}" for flag in names]
        if kind is bool:
            group.add_argument(
                *flags, dest=name, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            group.add_argument(*flags, dest=name, type=kind, choices=choices.get(name), help=text)


# (timm's name, flags, type, help). The first flag is the one error messages use.
_MODEL_FLAGS: tuple[tuple[str, tuple[str, ...], Callable, str], ...] = (
    (
        "img_size",
        ("image_size", "img_size"),
        bounded(int, 1, 16384),
        "image height and width, pixels",
    ),
    ("patch_size", ("patch_size",), positive, "patch side, pixels"),
    ("in_chans", ("in_chans",), channels, "image channels: 3 (RGB) or 1 (grey)"),
    ("num_classes", ("num_classes",), bounded(int, 1, 10**7), "classes"),
    ("embed_dim", ("embed_dim",), bounded(int, 1, 2**20), "width"),
    ("depth", ("num_blocks", "depth"), bounded(int, 1, 1000), "transformer blocks"),
    ("num_heads", ("num_heads",), positive, "attention heads"),
    ("mlp_ratio", ("mlp_ratio",), bounded(float, 1e-3, 1000), "MLP width / width"),
    ("global_pool", ("global_pool",), str, "pooling: token, avg, avgmax, max or map"),
    ("class_token", ("class_token",), bool, "prepend a class token"),
    ("reg_tokens", ("reg_tokens",), bounded(int, 0, 2**20), "register tokens"),
    ("pos_embed", ("pos_embed",), str, "position embedding: learn or none"),
    ("no_embed_class", ("no_embed_class",), bool, "no position embedding for prefix tokens"),
    ("pool_include_prefix", ("pool_include_prefix",), bool, "pool over prefix tokens too"),
    ("qkv_bias", ("qkv_bias",), bool, "bias in the query, key and value projections"),
    ("qk_norm", ("qk_norm",), bool, "normalise queries and keys"),
    ("proj_bias", ("proj_bias",), bool, "bias in the attention output and MLP projections"),
    ("scale_attn_norm", ("scale_attn_norm",), bool, "norm after attention, before its projection"),
    ("scale_mlp_norm", ("scale_mlp_norm",), bool, "norm inside the MLP"),
    ("init_values", ("init_values",), positive_number, "layer-scale initial value"),
    ("pre_norm", ("pre_norm",), bool, "norm before the blocks"),
    ("final_norm", ("final_norm",), bool, "norm after the blocks"),
    ("fc_norm", ("fc_norm",), bool, "final norm after pooling instead of before"),
    ("drop_rate", ("drop_rate",), rate, "dropout before the head"),
    ("pos_drop_rate", ("pos_dropout", "pos_drop_rate"), rate, "dropout after the embedding"),
    ("patch_drop_rate", ("patch_drop_rate",), rate, "share of patches dropped in training"),
    ("proj_drop_rate", ("mlp_dropout", "proj_drop_rate"), rate, "dropout in MLP and projections"),
    ("attn_drop_rate", ("att_dropout", "attn_drop_rate"), rate, "dropout of attention weights"),
    ("drop_path_rate", ("drop_path_rate",), rate, "stochastic depth, rising to this rate"),
    ("weight_init", ("weight_init",), str, "timm's scheme: '', jax, jax_nlhb, moco or reset"),
)

# The flag a person types, by timm's name.
MODEL_FLAG = {name: f"--{names[0]}" for name, names, _, _ in _MODEL_FLAGS}


def _add_optimization(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--lr", type=non_negative, default=1e-3, help="peak learning rate (AdamW)")
    group.add_argument("--weight_decay", type=non_negative, default=0.1, help="AdamW's")
    group.add_argument(
        "--betas",
        type=rate,
        nargs=2,
        default=(0.9, 0.999),
        metavar=("BETA1", "BETA2"),
        help="AdamW's (default: 0.9 0.999)",
    )
    group.add_argument("--eps", type=positive_number, default=1e-8, help="AdamW's")
    group.add_argument(
        "--clip_grad_norm",
        type=number,
        default=1.0,
        help="largest global gradient norm, over all shards; 0 or less: no clipping",
    )
    group.add_argument(
        "--warmup_steps",
        type=count,
        default=10000,
        help="steps of linear warmup from 0; then cosine to 0 at the last step of --num_epochs",
    )


def _add_checkpoints(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ckpt_dir", default="/tmp/vit_fsdp", help="folder for checkpoints, metrics and plots"
    )
    group.add_argument(
        "--resume",
        default="auto",
        metavar="auto|none|best|lowest_loss|PATH",
        help="auto: newest complete checkpoint of --ckpt_dir, if any; none: start anew; best or "
        "lowest_loss: of its evaluated ones that with the highest top-1 or lowest val loss; "
        "PATH: a checkpoint, or another run's --ckpt_dir",
    )
    group.add_argument(
        "--resume_epoch",
        type=count,
        default=0,
        help="resume from the checkpoint written after this epoch; 0: as --resume says",
    )
    group.add_argument("--ckpt_epoch_interval", type=positive, default=10, help="epochs")
    group.add_argument(
        "--ckpt_step_interval", type=count, default=0, help="steps; 0: only after epochs"
    )
    group.add_argument(
        "--keep_checkpoints", type=count, default=0, help="newest ones to keep; 0: all"
    )
    group.add_argument(
        "--max_failed_saves",
        type=positive,
        default=2,
        help="checkpoints in a row that may fail to be written before the run ends, with code 4",
    )
    group.add_argument(
        "--no_verify_checkpoint",
        action="store_false",
        dest="verify_checkpoint",
        help="resume without comparing the files' checksums with the manifest (default: compared)",
    )
    group.add_argument(
        "--ckpt_best",
        action="store_true",
        help="also write one after each evaluation with the highest top-1 so far, and keep it",
    )


def _add_reports(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log_step_interval", type=positive, default=20, help="steps; the first is always logged"
    )
    group.add_argument(
        "--test_epoch_interval",
        type=positive,
        default=10,
        help="epochs between evaluations on val/; the last is always evaluated",
    )
    group.add_argument(
        "--test_step_interval", type=count, default=0, help="steps; 0: only after epochs"
    )
    group.add_argument(
        "--eval_batches",
        type=count,
        metavar="N",
        help="batches of an evaluation; 0: all of val/ (default: 0; with --fake_data as many as "
        "--max_steps)",
    )
    group.add_argument(
        "--max_bad_steps",
        type=count,
        default=10,
        help="steps in a row whose loss or gradient norm is not finite, and which are skipped, "
        "before the run ends, with code 3; 0: never",
    )
    group.add_argument(
        "--step_timeout_s",
        type=seconds,
        default=os.environ.get("STEP_TIMEOUT_S") or "0",
        help="seconds without the end of a step, a batch evaluated or a checkpoint after which the "
        "process prints its threads' stacks and ends with code 1; from the first step on; 0: never "
        "(default: STEP_TIMEOUT_S of the environment, or 0)",
    )
    group.add_argument(
        "--wandb",
        metavar="PROJECT",
        help="log to this Weights & Biases project too; needs the package wandb (default: none)",
    )


def _add_inference(group: argparse._ArgumentGroup) -> None:
    either = group.add_mutually_exclusive_group()
    either.add_argument(
        "--predict",
        nargs="+",
        metavar="IMAGE_OR_FOLDER",
        help="print the likeliest classes of these images; --resume names the weights: a "
        "checkpoint, or a file of torch.save or .safetensors; runs plain PyTorch on one GPU, or "
        "the CPU; unreadable images are left out with a line on stderr, and where one was named "
        "itself the exit code is 2 (default: none)",
    )
    either.add_argument(
        "--eval_only",
        action="store_true",
        help="print loss and accuracy on val/ with the weights of --resume, computed on the "
        "backend; write nothing",
    )
    group.add_argument(
        "--json", action="store_true", help="print the result as JSON, and nothing else on stdout"
    )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The parsed flags; ends the program with exit code 2 on a wrong one."""
    return build_parser().parse_args(argv)


def model_config(args: argparse.Namespace) -> VitConfig:
    """The preset with the single flags over it."""
    given = {f.name: getattr(args, f.name, None) for f in fields(VitConfig)}
    return replace(
        PRESETS[args.model], **{name: value for name, value in given.items() if value is not None}
    )
