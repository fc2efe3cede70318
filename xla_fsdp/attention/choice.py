"""Which form the product of attention takes: ``--attention``, with auto resolved."""

from __future__ import annotations

import argparse

from training.arguments import model_config
from training.errors import UsageError
from xla_fsdp.options import device_type

FLASH_FROM = 1024
"""Tokens from which auto takes flash attention: from about there it lowers the peak of HBM and
the traffic, as the TPU compiler shows (docs/tpu.md)."""
WIDEST_HEAD = 256
"""The kernels hold blocks of rows this wide in a TPU core's vector memory."""


def attention_form(args: argparse.Namespace) -> str:
    """ "sdpa" or "flash"."""
    if args.attention != "auto":
        return args.attention
    long = model_config(args).num_tokens >= FLASH_FROM
    return "flash" if long and not _hinders_flash(args) else "sdpa"


def check_attention(args: argparse.Namespace) -> None:
    """Raises UsageError for ``--attention flash`` where the kernels cannot be used."""
    if args.attention == "flash" and _hinders_flash(args):
        raise UsageError(f"--attention flash {_hinders_flash(args)}: use --attention sdpa")


def describe_attention(args: argparse.Namespace) -> str:
    """For the line that describes a run; nothing where there is nothing to choose."""
    if args.attention == "sdpa" or _hinders_flash(args):
        return ""
    chosen = "flash" if attention_form(args) == "flash" else "PyTorch's"
    text = f", {chosen} attention"
    if args.attention == "auto":
        text += f" ({model_config(args).num_tokens:,} tokens; flash from {FLASH_FROM:,})"
    return text


def _hinders_flash(args: argparse.Namespace) -> str | None:
    config = model_config(args)
    width = config.embed_dim // config.num_heads
    if not args.compile_only and device_type() != "TPU":
        return "needs a TPU: its kernels run nowhere else"
    if config.attn_drop_rate:
        return f"has no dropout, here --att_dropout {config.attn_drop_rate}"
    if args.mesh_tensor > 1:
        return f"does not go with --mesh_tensor {args.mesh_tensor}"
    if width > WIDEST_HEAD:
        return f"takes heads up to {WIDEST_HEAD} wide, not --embed_dim / --num_heads = {width}"
    return None
