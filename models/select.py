"""Rows of tensors, selected by a product: the gradient of a gather would be a scatter."""

import torch


def select(selected: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``x``, (batch or 1, rows, width), selected by ``selected``, (batch,
    results, rows), which has at most one true entry per result; zeros for a result without one."""
    kind = "cpu" if x.device.type == "meta" else x.device.type  # meta has no autocast
    with torch.autocast(kind, enabled=False):  # positions must not be rounded
        return torch.matmul(selected.to(x.dtype), x)
