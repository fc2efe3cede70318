"""Attention for sequences that hold several images, with PyTorch's variable-length attention.

Its kernels compute only the scores within each image; masked attention computes those of all pairs
of tokens. They run on CUDA devices, in bf16 and fp16.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from models.blocks import Qkv, attentions, queries_keys_values, use_attend
from models.spec import ModelSpec

MODULE = "torch.nn.attention.varlen"


def is_available() -> bool:
    """Return whether this version of PyTorch has it: 2.10 or newer."""
    return importlib.util.find_spec(MODULE) is not None


def bounds_of(images: int, segments: torch.Tensor) -> torch.Tensor:
    """Return where the parts of all sequences end, one after the other, int32 (sequences x (images
    + 1) + 1,), the first one at 0: each sequence's images, of which some may have no tokens, and
    the padding behind them. ``segments``: ``segment_ids`` (``ModelSpec.segments``), of up to
    ``images`` images."""
    numbers = torch.arange(1, images + 2, device=segments.device)
    behind = torch.where(segments > 0, segments, images + 1)  # padding comes last
    lengths = (behind[:, None] == numbers[:, None]).sum(2, dtype=torch.int32)
    ends = lengths.flatten().cumsum(0, dtype=torch.int32)
    return nn.functional.pad(ends, (1, 0))


def attend(
    varlen_attn: Callable[..., torch.Tensor],
    attn: Any,
    qkv: Qkv,
    rope: torch.Tensor | None,
    bounds: torch.Tensor | None,
) -> torch.Tensor:
    """Compute an ``Attend`` of the tokens between ``bounds`` with each other."""
    assert bounds is not None
    by_head = queries_keys_values(attn, qkv, rope)
    batch, tokens = by_head[0].shape[:2]
    q, k, v = (x.to(by_head[2].dtype).flatten(0, 1) for x in by_head)
    # No part is longer than a sequence. How long the longest is only the device knows.
    y = varlen_attn(q, k, v, bounds, bounds, tokens, tokens)
    return y.unflatten(0, (batch, tokens)).flatten(2)


def use_varlen(model: Any, spec: ModelSpec) -> None:
    """Let the attention of all blocks compute by ``attend``."""
    assert spec.segments is not None
    model.mask_of = functools.partial(bounds_of, spec.segments)
    varlen_attn = importlib.import_module(MODULE).varlen_attn
    for attention in attentions(model.blocks):
        is_known = use_attend(attention, functools.partial(attend, varlen_attn))
        assert is_known
