"""Finds and counts, on the device, the steps whose loss or gradient norm is not finite.

Nothing is read by the host: a backend computes these beside the step and hands the counts out, the
loop reads them with a log step's loss.
"""

from __future__ import annotations

import torch

COUNTS = ("total", "in_a_row", "longest_row")
"""The names of the elements of the counts, in their order."""


def not_finite(loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Return 1.0 if either scalar is infinite or not a number, else 0.0, as float32."""
    both = torch.stack([loss.detach().float(), norm.detach().float()])
    return 1.0 - torch.isfinite(both).all().float()


def no_counts() -> torch.Tensor:
    """Return the counts before the first step: zeros, float32 (3,), on the CPU."""
    return torch.zeros(len(COUNTS))


def count_skipped(counts: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
    """Return the counts after one more step, a new tensor (3,); ``skipped`` is 1.0 or 0.0."""
    total, row, longest = counts.unbind()
    row = (row + 1) * skipped
    return torch.stack([total + skipped, row, torch.maximum(longest, row)])
