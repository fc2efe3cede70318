"""Windows of images for segmentation: crops of the model's size.

An image is resized to just cover a window. Training uses one window at a random position,
validation as many overlapping windows as cover the image. One process gets all windows of an image.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from data.batch import PADDING, Batch, SampleIndex
from data.loader import GlobalBatchSampler
from data.source import DatasetRequest, Split


class WindowSplit(Split):
    """Windows of the images of one split: one per image in "train"; in validation all windows of
    each image, consecutively, row by row."""

    reading_threads = 1
    """Number of threads that may read masks concurrently."""

    def __init__(self, request: DatasetRequest, name: str, sizes: np.ndarray) -> None:
        """``sizes``: height and width of each image in pixels, (images, 2)."""
        self.sizes, window = sizes, np.array(request.size)
        # Scale so that one side equals the window's side, and the other is at least as long.
        by = (np.maximum(sizes, 1) / window).min(axis=1, keepdims=True)
        self.scaled = np.maximum(np.rint(sizes / by).astype(np.int64), window)
        """Height and width of each image after resizing to cover a window."""
        # Stride of two thirds of the window, as in DINOv2's evaluation.
        self._strides = np.maximum(window * 2 // 3, 1)
        counts = np.ones(len(sizes), np.int64)
        if name != "train":
            counts = (-(-(self.scaled - window) // self._strides) + 1).prod(axis=1)
        self.counts = counts
        """Number of windows per image."""
        self._ends = np.cumsum(counts)
        super().__init__(request, name, range(int(counts.sum())))

    @property
    def images(self) -> int:
        """Return the number of images."""
        return len(self.sizes)

    def image_of(self, window: int) -> int:
        """Return the image that a window belongs to."""
        return int(np.searchsorted(self._ends, window, side="right"))

    def windows_of(self, image: int) -> range:
        """Return the indices of an image's windows."""
        return range(int(self._ends[image] - self.counts[image]), int(self._ends[image]))

    def starts(self, image: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the first rows and first columns of an image's windows in the resized image; every
        combination of the two is a window."""
        free = [int(n) for n in self.scaled[image] - self.request.size]
        if self.name == "train":
            drawn = np.random.default_rng((self.seed, image)).random(2)
            top, left = (int(draw * (n + 1)) for draw, n in zip(drawn, free, strict=True))
            return (top,), (left,)
        rows, columns = (
            tuple(min(start, n) for start in range(0, n + stride, stride))
            for stride, n in zip(self._strides.tolist(), free, strict=True)
        )
        return rows, columns

    def _start(self, window: int) -> tuple[int, int, int]:
        """Return a window's image, first row and first column."""
        image = self.image_of(window)
        rows, columns = self.starts(image)
        row, column = divmod(window - self.windows_of(image).start, len(columns))
        return image, rows[row], columns[column]

    def load_sample(self, number: int, epoch: int, index: int) -> Batch:
        image, top, left = self._start(number)
        height, width = self.request.size
        return {"image": self.picture(image)[:, top : top + height, left : left + width]}

    def picture(self, image: int) -> torch.Tensor:
        """Return the resized image, (channels, height, width). Raises BrokenImageError."""
        raise NotImplementedError

    def mask(self, image: int) -> np.ndarray:
        """Return the labels of the image's pixels at its original size, (height, width), int16,
        with ``IGNORED`` for ignored pixels. Raises BrokenImageError."""
        raise NotImplementedError

    def mask_of_window(self, window: int, mask: np.ndarray) -> np.ndarray:
        """Return a window's part of its image's mask, resized like the image but with
        nearest-neighbor interpolation: (height, width), int16."""
        image, *starts = self._start(window)
        nearest = [
            ((np.arange(start, start + side) + 0.5) * length / scaled).astype(np.int64)
            for start, side, length, scaled in zip(
                starts, self.request.size, mask.shape, self.scaled[image], strict=True
            )
        ]
        return mask[np.ix_(*nearest)]

    def sampler(self, batch_size: int, **how: Any) -> GlobalBatchSampler:
        return WholeImageSampler(self.counts, batch_size, **how)


class WholeImageSampler(GlobalBatchSampler):
    """Assigns all windows of an image to one process, consecutively; processes with fewer windows
    get padding."""

    def __init__(self, counts: np.ndarray, batch_size: int, **how: Any) -> None:
        """``counts``: number of windows per image. Other arguments: see ``GlobalBatchSampler``."""
        super().__init__(int(counts.sum()), batch_size, **how)
        shards = batch_size // self.per_shard
        windows = np.zeros(shards, np.int64)
        self._windows: list[range] = []
        """This process's windows, grouped by image."""
        for count, end in zip(counts.tolist(), np.cumsum(counts).tolist(), strict=True):
            shard = int(windows.argmin())  # the process with the fewest so far
            windows[shard] += count
            if shard == self.shard:
                self._windows.append(range(end - count, end))
        self._batches = -(-int(windows.max()) // self.per_shard)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[SampleIndex]]:
        padded = itertools.chain(*self._windows, itertools.repeat(PADDING))
        keys = (SampleIndex(self.epoch, window) for window in padded)
        batches = (list(itertools.islice(keys, self.per_shard)) for _ in range(self._batches))
        yield from itertools.islice(batches, self.first_batch, None)
