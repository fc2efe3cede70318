"""A source of all-zero images with label 0, as many as ImageNet has: for smoke runs and timing.

Sequences are as full as images of the request's size make them.
"""

from typing import Any

import numpy as np
import torch

from data.loader import PADDING, Batch, BatchLoader, BatchShard, ConstantLoader
from data.packing import grids, kept_patches, patch_coord_of
from data.size_schedule import SizeSchedule
from data.source import DatasetRequest, DataSource, Split

LENGTHS = {"train": 1_281_167, "val": 50_000}


def open_fake(request: DatasetRequest) -> DataSource:
    """Return a source that reads nothing and gives the same batch of zeros again and again."""
    kind = ZerosInSequences if request.pack else Zeros
    splits = {name: kind(request, name) for name in request.splits}
    remark = "; all have label 0, so their losses and accuracies mean nothing" * request.labels
    return DataSource("fake data (zeros)", splits, remark)


class Zeros(Split):
    """Images that are never read: only their number matters."""

    reads_rows = True

    def __init__(self, request: DatasetRequest, name: str) -> None:
        super().__init__(request, name, np.broadcast_to(np.int64(0), LENGTHS[name]))

    def batches(
        self, batch_size: int, shard: BatchShard, sizes: SizeSchedule | None = None
    ) -> BatchLoader:
        """Training drops a short last batch; validation fills it up with padding, by its labels."""
        full, rest = divmod(len(self), batch_size)
        dtype = self.request.config.image_dtype(len(self.request.size))
        # The operating system gives no memory to zeros of NumPy's until they are written to.
        # Zeros of torch.Tensor.expand take none either, but cannot be pinned for a GPU.
        images = torch.from_numpy(np.zeros(shard.shape_of(batch_size, self.shape), dtype))
        labels = torch.zeros(len(images), dtype=torch.int64)
        if self.is_train or not rest:
            return ConstantLoader(full, (images, labels))
        present = torch.arange(len(images)) + shard.index * len(images) < rest
        last = images, torch.where(present, labels, PADDING)
        return ConstantLoader(full + 1, (images, labels), last)

    def facts(self) -> dict[str, Any]:
        kind = "training" if self.name == "train" else "validation"
        return {f"the number of {kind} images": len(self)}


class ZerosInSequences(Zeros):
    """The same images in sequences, of which each has as many as have room."""

    def __init__(self, request: DatasetRequest, name: str) -> None:
        super().__init__(request, name)
        assert request.pack
        assert request.pack_layout
        self._pack, self._layout = request.pack, request.pack_layout
        self.shape, self.label_shape = (self._layout.length,), (self._pack.images,)
        self._grid = grids(np.array([request.size]), self._pack)[0]
        drop_rate = self._pack.drop_rate if self.is_train else 0
        self._patches = int(kept_patches(self._grid.prod(), drop_rate))
        room = self._pack.tokens // (self._pack.prefix + self._patches)
        self._images = min(room, self._pack.images)
        """How many images a full sequence has."""
        self.sequences = len(self) // self._images

    def batches(
        self, batch_size: int, shard: BatchShard, sizes: SizeSchedule | None = None
    ) -> BatchLoader:
        """Training drops a short last batch; validation fills it up with sequences without
        images."""
        full, rest = divmod(len(self), batch_size * self._images)
        batch = self._batch(batch_size * self._images, batch_size, shard)
        if self.is_train or not rest:
            return ConstantLoader(full, batch)
        return ConstantLoader(full + 1, batch, self._batch(rest, batch_size, shard))

    def _batch(self, images: int, batch_size: int, shard: BatchShard) -> Batch:
        """Return this shard of a global batch of so many images, in sequences from the first on."""
        count = batch_size // shard.count if shard.loads else 0
        rows = torch.from_numpy(np.zeros((count, self._layout.length), np.uint8))
        labels = torch.full((count, *self.label_shape), PADDING)
        tokens = [self._tokens(inside) for inside in range(self._images + 1)]
        for number in range(count):
            before = (shard.index * count + number) * self._images
            inside = min(max(images - before, 0), self._images)
            self._layout.write_tokens(rows[number], *tokens[inside], images)
            labels[number, :inside] = 0
        return rows, labels

    def _tokens(self, images: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ``patch_coord`` and the segments of the tokens of a sequence of so many images."""
        of_image = patch_coord_of(*self._grid.tolist(), self._pack.prefix)
        return self._layout.tokens_of([of_image[: self._pack.prefix + self._patches]] * images)
