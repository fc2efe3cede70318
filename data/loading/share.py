"""Which part of each global batch one process loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Says which images of each global batch one process loads, and which rows of them.

    A row is a position along the first spatial axis: of an image's height, of a volume's slices.
    """

    rank: int = 0
    world_size: int = 1
    """The images are those of part ``rank`` of so many equal parts of each global batch."""
    rows: range | None = None
    """The rows of each image, next to each other; None: all of them."""
    loads: bool = True
    """Whether the images are read here. Where not, other processes hand them over: the batches
    hold no images and no labels, and there are as many of them."""
    of_host: int = 1
    """How many processes there are on this host, which share its cores."""

    def shape_of(self, batch_size: int, image_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the images that are loaded of a global batch of ``batch_size``."""
        channels, height, *others = image_shape
        count = batch_size // self.world_size if self.loads else 0
        return (count, channels, height if self.rows is None else len(self.rows), *others)
