"""Every flag of the program, in one place, grouped as ``--help`` shows them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import NoReturn

from models.config import PRESETS, VitConfig

DEFAULT_MODEL = "vit_10b"


class _Parser(argparse.ArgumentParser):
    """Ends on a wrong argument with one line, without the page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


class _Formatter(argparse.HelpFormatter):
    """Adds the default to every help text that does not give one itself."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if "default" in text or action.default in (None, argparse.SUPPRESS):
            return text
        if action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction):
            return f"{text} (default: off)"
        return f"{text} (default: %(default)s)"


def _bounded(kind: type, low: float, high: float, *, open_high: bool = False) -> Callable:
    """An argparse type: a number from ``low`` to ``high`` (or below it)."""

    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {name}") from None
        if not low <= value <= high or (open_high and value == high):
            if high == float("inf"):
                raise argparse.ArgumentTypeError(f"{text} must be at least {low}")
            limit = "below" if open_high else "at most"
            raise argparse.ArgumentTypeError(f"{text} must be at least {low} and {limit} {high}")
        return value

    return convert


_INF = float("inf")
_positive = _bounded(int, 1, _INF)
_count = _bounded(int, 0, _INF)
_rate = _bounded(float, 0, 1, open_high=True)
_fraction = _bounded(float, 0, 1)
_non_negative = _bounded(float, 0, _INF)
_positive_number = _bounded(float, 1e-12, _INF)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="run_vit_training.py",
        description="Train Vision Transformers too big for one chip, on TPUs (PyTorch/XLA FSDP).",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    _add_run(parser.add_argument_group("run"))
    _add_data(parser.add_argument_group("data"))
    _add_model(parser.add_argument_group("model (timm's names; a flag overrides the preset)"))
    _add_optimization(parser.add_argument_group("optimization"))
    _add_checkpoints(parser.add_argument_group("checkpoints"))
    _add_reports(parser.add_argument_group("logging and evaluation"))
    _add_sharding(parser.add_argument_group("sharding and memory"))
    _add_xla(parser.add_argument_group("XLA"))
    return parser


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        choices=("auto", "xla", "cuda"),
        default="auto",
        help="auto: TPU if there is one, else CUDA, else XLA on the CPU",
    )
    group.add_argument("--seed", type=_count, default=0, help="of weights, shuffling, dropout")
    group.add_argument("--num_epochs", type=_positive, default=300, help="passes over train/")
    group.add_argument(
        "--max_steps",
        type=_positive,
        help="end the run after this many optimizer steps, counted over all resumed parts; "
        "checkpoint and evaluate as at the end (default: no limit)",
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
        type=_count,
        default=4,
        help="loader processes per training process; 0: load in it, between steps",
    )
    group.add_argument(
        "--batch_size",
        type=_positive,
        default=1024,
        help="images per optimizer step over all devices (global); the devices must divide it",
    )
    group.add_argument(
        "--scale",
        type=_fraction,
        nargs=2,
        default=(0.08, 1.0),
        metavar=("MIN", "MAX"),
        help="random-resized-crop area, as a share of the image (default: 0.08 1.0)",
    )
    group.add_argument(
        "--ratio",
        type=_positive_number,
        nargs=2,
        default=(3 / 4, 4 / 3),
        metavar=("MIN", "MAX"),
        help="random-resized-crop aspect ratio (default: 0.75 1.3333)",
    )
    group.add_argument(
        "--hflip", type=_fraction, default=0.5, help="probability of a horizontal flip"
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
    ("img_size", ("image_size", "img_size"), _positive, "image height and width, pixels"),
    ("patch_size", ("patch_size",), _positive, "patch height and width, pixels"),
    ("in_chans", ("in_chans",), _bounded(int, 1, 3), "image channels: 3 (RGB) or 1 (grey)"),
    ("num_classes", ("num_classes",), _positive, "classes"),
    ("embed_dim", ("embed_dim",), _positive, "width"),
    ("depth", ("num_blocks", "depth"), _positive, "transformer blocks"),
    ("num_heads", ("num_heads",), _positive, "attention heads"),
    ("mlp_ratio", ("mlp_ratio",), _positive_number, "MLP width as a multiple of the width"),
    ("global_pool", ("global_pool",), str, "pooling: token, avg, avgmax, max or map"),
    ("class_token", ("class_token",), bool, "prepend a class token"),
    ("reg_tokens", ("reg_tokens",), _count, "register tokens"),
    ("pos_embed", ("pos_embed",), str, "position embedding: learn or none"),
    ("no_embed_class", ("no_embed_class",), bool, "no position embedding for prefix tokens"),
    ("pool_include_prefix", ("pool_include_prefix",), bool, "pool over prefix tokens too"),
    ("qkv_bias", ("qkv_bias",), bool, "bias in the query, key and value projections"),
    ("qk_norm", ("qk_norm",), bool, "normalise queries and keys"),
    ("proj_bias", ("proj_bias",), bool, "bias in the attention output and MLP projections"),
    ("scale_attn_norm", ("scale_attn_norm",), bool, "norm after attention, before its projection"),
    ("scale_mlp_norm", ("scale_mlp_norm",), bool, "norm inside the MLP"),
    ("init_values", ("init_values",), _positive_number, "layer-scale initial value"),
    ("pre_norm", ("pre_norm",), bool, "norm before the blocks"),
    ("final_norm", ("final_norm",), bool, "norm after the blocks"),
    ("fc_norm", ("fc_norm",), bool, "final norm after pooling instead of before"),
    ("drop_rate", ("drop_rate",), _rate, "dropout before the head"),
    ("pos_drop_rate", ("pos_dropout", "pos_drop_rate"), _rate, "dropout after the embedding"),
    ("patch_drop_rate", ("patch_drop_rate",), _rate, "share of patches dropped in training"),
    ("proj_drop_rate", ("mlp_dropout", "proj_drop_rate"), _rate, "dropout in MLP and projections"),
    ("attn_drop_rate", ("att_dropout", "attn_drop_rate"), _rate, "dropout of attention weights"),
    ("drop_path_rate", ("drop_path_rate",), _rate, "stochastic depth, rising to this rate"),
    ("weight_init", ("weight_init",), str, "timm's scheme: '', jax, jax_nlhb, moco or reset"),
)

# The flag a person types, by timm's name.
MODEL_FLAG = {name: f"--{names[0]}" for name, names, _, _ in _MODEL_FLAGS}


def _add_optimization(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--lr", type=_non_negative, default=1e-3, help="peak learning rate (AdamW)")
    group.add_argument("--weight_decay", type=_non_negative, default=0.1, help="AdamW's")
    group.add_argument(
        "--betas",
        type=_rate,
        nargs=2,
        default=(0.9, 0.999),
        metavar=("BETA1", "BETA2"),
        help="AdamW's (default: 0.9 0.999)",
    )
    group.add_argument("--eps", type=_positive_number, default=1e-8, help="AdamW's")
    group.add_argument(
        "--clip_grad_norm",
        type=float,
        default=1.0,
        help="largest global gradient norm, over all shards; 0 or less: no clipping",
    )
    group.add_argument(
        "--warmup_steps",
        type=_count,
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
        metavar="auto|none|PATH",
        help="auto: newest complete checkpoint of --ckpt_dir, if any; none: start anew; "
        "PATH: a checkpoint, or another run's --ckpt_dir",
    )
    group.add_argument(
        "--resume_epoch",
        type=_count,
        default=0,
        help="resume from the checkpoint written after this epoch; 0: as --resume says",
    )
    group.add_argument("--ckpt_epoch_interval", type=_positive, default=10, help="epochs")
    group.add_argument(
        "--ckpt_step_interval", type=_count, default=0, help="steps; 0: only after epochs"
    )
    group.add_argument(
        "--keep_checkpoints", type=_count, default=0, help="newest ones to keep; 0: all"
    )


def _add_reports(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log_step_interval", type=_positive, default=20, help="steps; the first is always logged"
    )
    group.add_argument(
        "--test_epoch_interval",
        type=_positive,
        default=10,
        help="epochs between evaluations on val/; the last is always evaluated",
    )


def _add_sharding(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="of computation; weights and optimizer state stay fp32",
    )
    group.add_argument(
        "--no_grad_ckpt",
        action="store_false",
        dest="grad_ckpt",
        help="keep activations instead of recomputing each block (default: recompute)",
    )
    group.add_argument(
        "--run_without_fsdp", action="store_true", help="plain data parallel, for comparison"
    )


def _add_xla(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--cpu_devices",
        type=_positive,
        default=os.environ.get("CPU_NUM_DEVICES") or "1",
        help="virtual devices when XLA runs on the CPU "
        "(default: CPU_NUM_DEVICES of the environment, or 1)",
    )
    group.add_argument(
        "--xla_fsdp",
        choices=("auto", "spmd", "nested"),
        default="auto",
        help="spmd: one program over all devices; nested: XlaFullyShardedDataParallel, a process "
        "a device; auto: nested if one of the next three flags asks for it, else spmd",
    )
    group.add_argument(
        "--no_reshard_after_forward",
        action="store_false",
        dest="reshard_after_forward",
        help="nested: keep gathered weights from forward to backward (ZeRO-2) (default: ZeRO-3)",
    )
    group.add_argument(
        "--flatten_parameters", action="store_true", help="nested: one flat parameter per unit"
    )
    group.add_argument(
        "--shard_on_cpu",
        action="store_true",
        help="nested: cut each block into shards on the host, before it reaches the device",
    )
    group.add_argument(
        "--mark_step_after_forward",
        action="store_true",
        help="cut the graph between forward and backward (TPU smem limit of very large models)",
    )
    group.add_argument(
        "--mark_step_every_n_blocks",
        type=_count,
        default=0,
        help="cut the graph after every N blocks, forward and backward; 0: never",
    )
    group.add_argument(
        "--compile_cache_dir",
        help="folder that keeps compiled programs from run to run, on TPU (default: none)",
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
