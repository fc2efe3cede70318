"""Learned position embeddings for images of other grids than a model's own.

``F.interpolate`` with mode bicubic has no lowering in torch_xla 2.9: it would bring each step to
the CPU. What it computes is linear, and along one dimension after the other: two small matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from timm.layers import resample_abs_pos_embed

Grid = tuple[int, int]
"""How many rows and columns of patches an image has."""


class Resampling:
    """Makes of a learned position embedding that of another grid, as timm's
    ``resample_abs_pos_embed`` does (bicubic, with antialiasing)."""

    def __init__(
        self, own: Grid, grid: Grid, prefix: int, constant: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Take the model's own grid, the other one, and how many entries come before those of the
        patches; ``constant`` puts the matrices on the devices."""
        self._own, self._prefix = own, prefix
        self._rows, self._columns = (
            constant(_matrix(*sizes)) for sizes in zip(own, grid, strict=True)
        )

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return (1, prefix + patches of the other grid, width), computed in fp32, for
        (1, prefix + own patches, width); the first entries stay as they are."""
        first, patches = positions[:, : self._prefix], positions[0, self._prefix :]
        with torch.autocast(positions.device.type, enabled=False):
            by_row = patches.float().unflatten(0, self._own)
            rows = (self._rows @ by_row.flatten(1)).unflatten(1, by_row.shape[1:])
            resampled = torch.matmul(self._columns, rows).flatten(0, 1)
        return torch.cat([first, resampled[None].to(positions.dtype)], dim=1)


def _matrix(size: int, new_size: int) -> torch.Tensor:
    """Return what resamples ``size`` values to ``new_size``: (new_size, size), fp32."""
    return resample_abs_pos_embed(
        torch.eye(size)[None], [new_size, 1], [size, 1], num_prefix_tokens=0
    )[0]
