"""Steps whose loss or gradient norm is not finite: told and counted on the device, skipped there.

Nothing is read by the host: a backend computes these beside the step and hands the counts out, the
loop reads them with a log step's loss.
"""

from __future__ import annotations

import torch

COUNTS = ("total", "in_a_row", "longest_row")
"""What the elements of the counts are, in this order."""


def not_finite(loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """1.0 if either scalar is infinite or not a number, else 0.0: a float32 scalar beside them."""
    both = torch.stack([loss.detach().float(), norm.detach().float()])
    return 1.0 - torch.isfinite(both).all().float()


def no_counts() -> torch.Tensor:
    """The counts before the first step: zeros, float32 (3,), on the CPU."""
    return torch.zeros(len(COUNTS))


def count_skipped(counts: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
    """The counts after one more step; ``skipped`` is 1.0 or 0.0. A new tensor, (3,)."""
    total, row, longest = counts.unbind()
    row = (row + 1) * skipped
    return torch.stack([total + skipped, row, torch.maximum(longest, row)])
