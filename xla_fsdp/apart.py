"""A barrier for XLA's fusions."""

from __future__ import annotations

import torch


def apart(x: torch.Tensor) -> torch.Tensor:
    """Let what computes ``x`` stay out of the products with it, which would repeat it for each of
    their tiles."""
    import torch_xla.core.xla_model as xm  # here: what uses this is read without XLA, too

    x = x * 1
    xm.optimization_barrier_([x])
    return x
