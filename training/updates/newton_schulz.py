"""Muon's arithmetic for whole matrices, by timm's functions: what no sharding changes."""

from __future__ import annotations

import torch
from timm.optim.muon import DEFAULT_NS_STEPS, get_lr_scale, zeropower_via_newtonschulz

from models.timm_private import MUON_COEFFICIENTS

MOMENTUM = 0.95
"""How much of the moving average of gradients a step keeps; timm's default."""


def ns_dtype(precision: str) -> torch.dtype:
    """Return the dtype that matrices are orthogonalized in: timm's bf16 where a run computes in
    bf16, else fp32."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def orthogonalized(matrices: torch.Tensor, eps: float) -> torch.Tensor:
    """Return matrices, (..., rows, columns) with at most one dimension before, made nearly
    orthogonal by as many Newton-Schulz iterations as ``timm.optim.Muon`` makes by default."""
    return zeropower_via_newtonschulz(
        matrices, DEFAULT_NS_STEPS, MUON_COEFFICIENTS, eps=eps, dtype=matrices.dtype
    )


def lr_factor(matrix: tuple[int, int]) -> float:
    """Return what the learning rate of a matrix is multiplied by: 0.2 times the root of its longer
    side, ``timm.optim.Muon``'s default, which makes an update as long as a typical one of AdamW."""
    return get_lr_scale(torch.Size(matrix))
