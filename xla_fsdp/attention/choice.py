"""Which form the product of attention takes: ``--attention``, with auto resolved."""

from __future__ import annotations

from dataclasses import replace

from models.config import VitConfig
from training.config import RunConfig
from training.errors import UsageError
from xla_fsdp.config import XlaConfig

FLASH_FROM = 1024
"""Tokens from which auto takes flash attention: from about there it lowers the peak of HBM and
the traffic, as the TPU compiler shows (docs/tpu.md)."""
_NAMES = {"flash": "flash", "sdpa": "PyTorch's"}
WIDEST_HEAD = 256
"""The kernels hold blocks of rows this wide in a TPU core's vector memory."""


def resolve_attention(
    config: RunConfig, own: XlaConfig, model: VitConfig, *, on_tpu: bool
) -> tuple[XlaConfig, str]:
    """``--attention`` decided, and how the line that describes a run tells of it.

    Nothing is told where there is nothing to choose. Raises UsageError for ``--attention flash``
    where the kernels cannot be used.
    """
    hindered = _hinders_flash(config, model, on_tpu)
    if own.attention == "flash" and hindered:
        raise UsageError(f"--attention flash {hindered}: use --attention sdpa")
    form = own.attention
    if form == "auto":
        form = "flash" if model.num_tokens >= FLASH_FROM and not hindered else "sdpa"
    if own.attention == "sdpa" or hindered:
        return replace(own, attention=form), ""
    text = f", {_NAMES[form]} attention"
    if own.attention == "auto":
        text += f" ({model.num_tokens:,} tokens; flash from {FLASH_FROM:,})"
    return replace(own, attention=form), text


def _hinders_flash(config: RunConfig, model: VitConfig, on_tpu: bool) -> str | None:
    width = model.embed_dim // model.num_heads
    if not on_tpu:
        return "needs a TPU: its kernels run nowhere else"
    if model.attn_drop_rate:
        return f"has no dropout, here --att_dropout {model.attn_drop_rate}"
    if config.sharding.mesh_tensor > 1:
        return f"does not go with --mesh_tensor {config.sharding.mesh_tensor}"
    if width > WIDEST_HEAD:
        return f"takes heads up to {WIDEST_HEAD} wide, not --embed_dim / --num_heads = {width}"
    return None
