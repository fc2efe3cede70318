"""DINO's crops of an image: what a run requests, how they are packed, which patches are masked.

From each image come two global crops and several smaller local ones, and a mask for the patches of
one of the global crops (DINOv2, https://arxiv.org/abs/2304.07193, section 4). They are packed into
one row of bytes, so that a batch is still one tensor with an image a row. ``MultiCrop`` in
``data/transforms.py`` makes them; ``data/distortion.py`` has their colors and sharpness.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

GLOBALS = 2
"""Global crops of an image."""
_LEAST_BLOCK = 4
"""The least area that is drawn for a masked rectangle, in patches, while so many are left."""
_LOG_ASPECT = math.log(0.3)
"""Height over width of a masked rectangle: the logarithm is even between this and its negative."""


@dataclass(frozen=True)
class CropRequest:
    """Which crops a run requires of each training image; global ones have the request's size."""

    local_size: tuple[int, int]
    """Height and width of a local crop in pixels."""
    local_number: int
    """Local crops of an image."""
    global_scale: tuple[float, float]
    """Smallest and largest area of a global crop, as a share of the image's."""
    local_scale: tuple[float, float]
    """The same of a local crop."""
    grid: tuple[int, int]
    """Rows and columns of patches of a global crop."""
    mask_ratio: tuple[float, float]
    """Smallest and largest share of masked patches in the masked crop, drawn evenly per image."""
    pairs: tuple[tuple[int, int], ...] = ()
    """The sides of square global and local crops, of which each batch has one pair; none: all have
    the sizes above."""


@dataclass(frozen=True)
class CropLayout:
    """Where the crops and the mask of an image are in its row of bytes."""

    shape: tuple[int, ...]
    """Channels, height and width of a global crop."""
    request: CropRequest

    @property
    def _parts(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the global crops, of the local crops, and of the mask."""
        local = (self.request.local_number, self.shape[0], *self.request.local_size)
        return (GLOBALS, *self.shape), local, (math.prod(self.request.grid),)

    @property
    def length(self) -> int:
        """Return how many bytes a packed image has."""
        return sum(map(math.prod, self._parts))

    def pack(
        self, globals_: torch.Tensor, locals_: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Return (length,) uint8 of one image: its global crops (2, channels, height, width) and
        local crops (L, channels, height, width), both uint8, and the mask (patches,), bool."""
        return torch.cat([globals_.flatten(), locals_.flatten(), mask.to(torch.uint8)])

    def unpack(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the global crops (2, images, channels, height, width), the local crops
        (L, images, channels, height, width), both uint8, and the mask (images, patches), bool, of
        packed images (images, length).

        The mask is that of the first global crop. Slices and reshapes alone: so this can be a part
        of a step on any device, sharded along the images.
        """
        pieces = packed.split([math.prod(part) for part in self._parts], 1)
        globals_, locals_, mask = (
            piece.unflatten(1, part) for piece, part in zip(pieces, self._parts, strict=True)
        )
        return globals_.transpose(0, 1), locals_.transpose(0, 1), mask != 0


# -- masks -----------------------------------------------------------------------------


def max_masked(grid: tuple[int, int], ratio: tuple[float, float]) -> int:
    """Return the largest number of patches that ``block_mask`` masks in one image."""
    return max(1, math.floor(ratio[1] * math.prod(grid)))


def block_mask(grid: tuple[int, int], ratio: tuple[float, float]) -> torch.Tensor:
    """Draw which patches are masked, (patches,) bool: their share is even between both ``ratio``.

    The mask is made of rectangles, as in iBOT and DINOv2: each has an area between 4 patches and
    what is still to be masked. Each covers a random patch that is not masked yet, and the last one
    is cut, so that their number is exact: the share times the patches, rounded, and at least 1.
    """
    rows, columns = grid
    share = ratio[0] + torch.rand(()).item() * (ratio[1] - ratio[0])
    wanted = min(max(1, round(share * rows * columns)), max_masked(grid, ratio))
    masked = np.zeros(grid, bool)
    while left := wanted - int(masked.sum()):
        sized, shaped, chosen, down, across = torch.rand(5, dtype=torch.float64).tolist()
        least = min(_LEAST_BLOCK, left)
        area, aspect = least + sized * (left - least), math.exp(_LOG_ASPECT * (2 * shaped - 1))
        tall = min(rows, max(1, round(math.sqrt(area * aspect))))
        wide = min(columns, max(1, round(math.sqrt(area / aspect))))
        free = np.flatnonzero(~masked)
        row, column = divmod(int(free[int(chosen * len(free))]), columns)
        top = min(max(0, row - int(down * tall)), rows - tall)
        start = min(max(0, column - int(across * wide)), columns - wide)
        block = masked[top : top + tall, start : start + wide]
        new_rows, new_columns = np.nonzero(~block)
        block[new_rows[:left], new_columns[:left]] = True
    return torch.from_numpy(masked.reshape(-1))
