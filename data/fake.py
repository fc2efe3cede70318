"""A source of all-zero images with label 0, as many as ImageNet has: for smoke runs and timing."""

import math
from typing import Any

import numpy as np
import torch

from data.image_sizes import ImageSizes
from data.loader import PADDING, BatchLoader, ConstantLoader, Share
from data.source import DatasetRequest, DataSource, Split

LENGTHS = {"train": 1_281_167, "val": 50_000}


def open_fake(request: DatasetRequest) -> DataSource:
    """Return a source that reads nothing and gives the same batch of zeros again and again."""
    return DataSource("fake data (zeros)", {name: Zeros(request, name) for name in request.splits})


class Zeros(Split):
    """Images that are never read: only their number matters."""

    reads_rows = True

    def __init__(self, request: DatasetRequest, name: str) -> None:
        super().__init__(request, name, np.broadcast_to(np.int64(0), LENGTHS[name]))

    def batches(
        self, batch_size: int, share: Share, sizes: ImageSizes | None = None
    ) -> BatchLoader:
        """Training drops a short last batch; validation fills it up with padding, by its labels."""
        full, rest = divmod(len(self), batch_size)
        dtype = getattr(torch, self.request.config.image_dtype(len(self.request.size)))
        shape = share.shape_of(batch_size, self.shape)
        # The operating system gives no memory to zeros of NumPy's until they are written to.
        # Zeros of torch.Tensor.expand take none either, but cannot be pinned for a GPU.
        zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        images = torch.from_numpy(zeros).view(dtype).view(shape)
        labels = torch.zeros(len(images), dtype=torch.int64)
        if self.is_train or not rest:
            return ConstantLoader(full, (images, labels))
        present = torch.arange(len(images)) + share.shard * len(images) < rest
        last = images, torch.where(present, labels, PADDING)
        return ConstantLoader(full + 1, (images, labels), last)

    def facts(self) -> dict[str, Any]:
        kind = "training" if self.name == "train" else "validation"
        return {f"the number of {kind} images": len(self)}
