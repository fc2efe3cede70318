"""Packing of whole images of any size into token sequences: patch grids, and the images per
sequence.

An image keeps its size and aspect ratio as far as whole patches allow (``grids``). Images share
sequences of a fixed number of tokens, as in NaViT (https://arxiv.org/abs/2307.06304):
``pack_images`` assigns them by their numbers of tokens alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from data.loader import GlobalBatchSampler


@dataclass(frozen=True)
class PackRequest:
    """How whole images are packed into token sequences (NaViT,
    https://arxiv.org/abs/2307.06304)."""

    patch: tuple[int, int]
    """Height and width of a patch in pixels."""
    prefix: int
    """Number of class and register tokens per image, before its patches."""
    tokens: int
    """Tokens per sequence, at most 65,535."""
    images: int
    """Maximum number of images per sequence, at most 255."""
    max_patches: int
    """Maximum number of patches per image; larger images are scaled down."""
    resize: bool
    """Scale every image, up or down, to about ``max_patches``."""
    side_scale: tuple[float, float] = (1.0, 1.0)
    """In training, the sides of each image are scaled by a factor drawn uniformly from this range,
    after ``resize``."""
    drop_rate: float = 0.0
    """Fraction of randomly chosen patches dropped from each training image."""

    @property
    def most_patches(self) -> int:
        """Return the maximum number of patches per image: with its prefix it fits a sequence."""
        return min(self.max_patches, self.tokens - self.prefix)


NUMBERS = 4
"""Numbers per token position: row and column of the patch, rows and columns of its image's grid."""


def tokens_of(images: Sequence[np.ndarray], request: PackRequest) -> tuple[np.ndarray, np.ndarray]:
    """Return ``patch_coord`` (tokens, 4) and ``segment_ids`` (tokens,), both int32, of a sequence
    of consecutive images, followed by padding. ``images``: ``patch_coord`` of each image."""
    patch_coord = np.zeros((request.tokens, NUMBERS), np.int32)
    segment_ids, end = np.zeros(request.tokens, np.int32), 0
    for number, of_image in enumerate(images, 1):
        first, end = end, end + len(of_image)
        patch_coord[first:end], segment_ids[first:end] = of_image, number
    return patch_coord, segment_ids


# -- the grid of an image ----------------------------------------------------------------
#
# Uses only operations that IEEE 754 rounds exactly, so every process and machine computes the same
# grids.


def grids(sizes: np.ndarray, request: PackRequest, factors: np.ndarray | float = 1.0) -> np.ndarray:
    """Return the rows and columns of patches, (n, 2) int32, for images with these heights and
    widths in pixels, (n, 2). Their product is at most ``most_patches``.

    The ideal grid is the image's own size in patches (with ``resize``, scaled to ``most_patches``),
    times ``factors``, (n,), scaled down to ``most_patches`` if larger, with each side at least one
    patch. The result is the grid that requires the least stretching of the side that changes most;
    of several such grids, the one that changes the other side least. An unreadable image, 0 x 0,
    gets the largest square grid: in training another image takes its place.
    """
    most = request.most_patches
    ideal = np.where(sizes > 0, sizes / np.array(request.patch, np.float64), most).T
    largest = np.sqrt(most / (ideal[0] * ideal[1]))
    scales = np.minimum(factors * (largest if request.resize else 1), largest)
    ideal = (ideal * scales).clip(1, most)
    lower = np.floor(ideal)
    best, least = lower, _stretches(lower, ideal)
    # The best grid has each side rounded down or up, or as long as the other side leaves room for.
    for more in ((1, 0), (0, 1), (1, 1)):
        rows, columns = np.minimum(lower + np.array(more)[:, None], most)
        fewer_rows, fewer_columns = (
            np.minimum(side, most // other) for side, other in ((rows, columns), (columns, rows))
        )
        for grid in (np.stack([rows, fewer_columns]), np.stack([fewer_rows, columns])):
            stretches = _stretches(grid, ideal)
            is_less = stretches < least
            better = np.where(stretches[0] == least[0], is_less[1], is_less[0])
            best, least = np.where(better, grid, best), np.where(better, stretches, least)
    return np.ascontiguousarray(best.T, np.int32)


def _stretches(grid: np.ndarray, ideal: np.ndarray) -> np.ndarray:
    """Return the factors by which the two sides are stretched or shrunk, (2, n): first that of the
    side that changes more. Rounded, so that equal changes of different sides are equal."""
    return np.sort(np.maximum(grid / ideal, ideal / grid).round(9), axis=0)[::-1]


def too_large(sizes: np.ndarray, request: PackRequest) -> int:
    """Return the number of images with more than ``most_patches`` patches, which are scaled
    down."""
    ideal = np.maximum(sizes, 1).T / np.array(request.patch)[:, None]
    return int((ideal[0] * ideal[1] > request.most_patches).sum())


def kept_patches(patches: np.ndarray, drop_rate: float) -> np.ndarray:
    """Return the number of patches kept per image, at least one."""
    return np.maximum(patches - np.rint(patches * drop_rate).astype(patches.dtype), 1)


def patches_of(image: torch.Tensor, patch: tuple[int, int]) -> torch.Tensor:
    """Return a view of an image (channels, height, width) as whole patches: (rows, columns, patch
    height, patch width, channels), the order of timm's NaFlex."""
    (channels, *sides), (height, width) = image.shape, patch
    rows, columns = sides[0] // height, sides[1] // width
    return image.view(channels, rows, height, columns, width).permute(1, 3, 2, 4, 0)


@functools.lru_cache(maxsize=4096)
def patch_coord_of(rows: int, columns: int, prefix: int) -> np.ndarray:
    """Return the token positions of an image with this grid, (prefix + rows * columns, 4), int32:
    class and register tokens first, then patches row by row."""
    patch_coord = np.zeros((prefix + rows * columns, NUMBERS), np.int32)
    patch_coord[:prefix, 0] = np.arange(prefix)
    patch_coord[prefix:, 0], patch_coord[prefix:, 1] = np.divmod(np.arange(rows * columns), columns)
    patch_coord[prefix:, 2:] = rows, columns
    patch_coord.flags.writeable = False
    return patch_coord


# -- the images of a sequence ------------------------------------------------------------


WINDOW = 512
"""Number of consecutive images that are packed together."""
_TOGETHER = 2**16
"""Number of images processed at a time, so that their numbers stay in a core's cache."""


@dataclass(frozen=True)
class Packing:
    """The images of each sequence of an epoch."""

    images: np.ndarray
    """Image numbers, grouped by sequence."""
    firsts: np.ndarray
    """Offset of each sequence in ``images``."""
    counts: np.ndarray
    """Number of images per sequence."""

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, sequence: int) -> list[int]:
        first = self.firsts[sequence]
        return self.images[first : first + self.counts[sequence]].tolist()


def pack_images(
    images: np.ndarray,
    tokens: np.ndarray,
    request: PackRequest,
    generator: torch.Generator | None = None,
    window: int = WINDOW,
) -> Packing:
    """Pack ``images``, image numbers in the order of an epoch, with these numbers of ``tokens``,
    each at most one sequence long.

    Each ``window`` consecutive images are packed by first-fit decreasing: starting with the
    largest, each image goes into the first sequence with enough room. That would put full sequences
    first, so the sequences of a window are shuffled with ``generator``, or without one ordered by
    their first images.
    """
    together = max(_TOGETHER // window, 1) * window
    sequence = np.concatenate(
        [
            first + _first_fit(tokens[first : first + together], request, window)
            for first in range(0, len(tokens), together)
        ]
    )
    by_sequence = sequence.argsort(kind="stable")
    sequence = sequence[by_sequence]
    firsts = np.flatnonzero(np.diff(sequence, prepend=-1))
    counts = np.diff(firsts, append=len(sequence))
    if generator is None:
        order = by_sequence[firsts].argsort()
    else:
        drawn = torch.rand(len(firsts), generator=generator, dtype=torch.float64).numpy()
        order = (sequence[firsts] // window + drawn).argsort(kind="stable")
    return Packing(images[by_sequence], firsts[order], counts[order])


def _first_fit(tokens: np.ndarray, request: PackRequest, window: int) -> np.ndarray:
    """Return the sequence of each image, (n,) int64, numbered per window from the number of its
    first image. All windows are processed together, step by step."""
    windows = -(-len(tokens) // window)
    sizes = np.zeros((windows, window), np.int32)  # what fills up the last window needs no room
    sizes.flat[: len(tokens)] = tokens
    by_size = (-sizes).argsort(axis=1, kind="stable")
    free = np.full((windows, window), request.tokens, np.int32)
    count = np.zeros((windows, window), np.int16)
    sequence = np.empty((windows, window), np.int64)
    rows, opened = np.arange(windows), 0
    for column in by_size.T:
        size = sizes[rows, column]
        # Any image fits into one of the opened sequences or the next one.
        chosen = (free[:, : opened + 1] >= size[:, None]).argmax(axis=1)
        opened = min(max(opened, int(chosen.max()) + 1), window - 1)
        count[rows, chosen] += size > 0
        is_full = count[rows, chosen] == request.images
        free[rows, chosen] = np.where(is_full, -1, free[rows, chosen] - size)
        sequence[rows, column] = chosen
    sequence += rows[:, None] * window
    return sequence.reshape(-1)[: len(tokens)]


class SequenceIndex(NamedTuple):
    """The index of a sequence into ``PackedSplit``."""

    epoch: int
    images: Sequence[int]
    """The indices of the sequence's images."""
    batch_images: int
    """The number of images in the global batch."""


class PackSampler(GlobalBatchSampler):
    """Divides global batches of sequences over processes.

    Every training epoch has as many sequences as the first one, without the last incomplete batch.
    Other epochs may need slightly more or fewer: extra sequences are dropped, and missing ones are
    filled with the first ones of the same epoch. Evaluation uses every image once, in order, and
    pads the last batch with empty sequences. Broken images count as images of the batch, because
    they are detected only when read.
    """

    def __init__(
        self, pack_epoch: Callable[[int], Packing], sequences: int, batch_size: int, **how: Any
    ) -> None:
        """``pack_epoch``: returns the sequences of an epoch. ``sequences``: their number in the
        first epoch. Other arguments: see ``GlobalBatchSampler``, without ``repeats``."""
        super().__init__(sequences, batch_size, **how)
        self._pack_epoch = pack_epoch

    def __iter__(self) -> Iterator[list[SequenceIndex]]:  # type: ignore[override]
        packing, first = self._pack_epoch(self.epoch), self.shard * self.per_shard
        for number in range(self.first_batch, len(self)):
            places = range(number * self.batch_size, (number + 1) * self.batch_size)
            sequences = [self._images(packing, place) for place in places]
            images = sum(map(len, sequences))
            yield [
                SequenceIndex(self.epoch, numbers, images)
                for numbers in sequences[first : first + self.per_shard]
            ]

    def _images(self, packing: Packing, place: int) -> Sequence[int]:
        if self.shuffle:
            return packing[place % len(packing)]
        return packing[place] if place < len(packing) else []
