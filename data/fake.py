"""A source of all-zero images with label 0, as many as ImageNet has: for smoke runs and timing.

Sequences are as full as images of the request's size make them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from data.batch import PADDING, Batch, BatchShard
from data.loader import BatchLoader, ConstantLoader
from data.source import DatasetRequest, DataSource, Split

LENGTHS = {"train": 1_281_167, "val": 50_000}


def open_fake(request: DatasetRequest) -> DataSource:
    """Return a source that reads nothing and gives the same batch of zeros again and again."""
    splits = {
        name: request.view.zeros(request, name) or Zeros(request, name) for name in request.splits
    }
    remark = "; all have label 0, so their losses and accuracies mean nothing" * request.labels
    return DataSource("fake data (zeros)", splits, remark)


class Zeros(Split):
    """Images that are never read: only their number matters."""

    reads_rows = True

    def __init__(self, request: DatasetRequest, name: str) -> None:
        self.dtype = getattr(torch, request.config.image_dtype(len(request.size)))
        super().__init__(request, name, np.broadcast_to(np.int64(0), LENGTHS[name]))

    @property
    def images_per_sample(self) -> int:
        """How many images a full sample has."""
        return 1

    def batches(self, batch_size: int, shard: BatchShard, steps: int = 0) -> BatchLoader:
        """Training drops a short last batch; validation fills it up with padding."""
        images = batch_size * self.images_per_sample
        full, rest = divmod(len(self), images)
        batch = self.batch(images, batch_size, shard)
        if self.is_train:
            return ConstantLoader(full, batch, self.fields)
        last = self.batch(rest, batch_size, shard) if rest else None
        return ZerosInOrder(full + bool(rest), batch, self.fields, last, images=images)

    def batch(self, images: int, batch_size: int, shard: BatchShard) -> Batch:
        """Return this shard of a global batch of so many images, followed by padding."""
        batch = self.zeros(batch_size, shard)
        count = len(next(iter(batch.values())))
        numbers = torch.arange(count) + shard.index * count
        is_padding = numbers >= images
        if "index" in batch:
            batch["index"] = numbers
        for name, each in self.fields.items():
            if each.padding:
                batch[name][is_padding] = each.padding
        return batch

    def zeros(self, batch_size: int, shard: BatchShard) -> Batch:
        """Return zeros for all fields."""
        # The operating system gives no memory to zeros of NumPy's until they are written to.
        # Zeros of torch.Tensor.expand take none either, but cannot be pinned for a GPU.
        return {
            name: torch.from_numpy(
                np.zeros(shard.shape_of(batch_size, field), str(field.dtype).removeprefix("torch."))
            )
            for name, field in self.fields.items()
        }

    def check_first_sample(self) -> None:
        """Nothing is read."""

    def facts(self) -> dict[str, Any]:
        kind = "training" if self.name == "train" else "validation"
        return {f"the number of {kind} images": len(self)}


@dataclass
class ZerosInOrder(ConstantLoader):
    """Yields the same batch repeatedly, with the numbers of its images."""

    images: int = field(kw_only=True)
    """The number of images in a global batch."""

    def epoch(self, epoch: int, first_batch: int = 0) -> Iterator[Batch]:
        for number, batch in enumerate(super().epoch(epoch, first_batch), first_batch):
            index = batch["index"]
            index = torch.where(index == PADDING, PADDING, index + number * self.images)
            yield batch | {"index": index}
