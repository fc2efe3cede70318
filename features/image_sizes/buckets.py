"""Images of a few sizes, the buckets: each image is resized to the bucket nearest to its shape.

A batch holds images of one bucket. So a model sees whole images of any aspect ratio, and yet there
is only one shape of batches, and on XLA one compiled program, for each bucket.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash

from data.batch import PADDING, SampleIndex
from data.files import DataFolderError
from data.images import ArrangedView, ImageSplit, RearrangedSplit
from data.loader import GlobalBatchSampler
from data.sizes import image_sizes
from data.source import DatasetRequest, DataSource


@dataclass(frozen=True)
class BucketView(ArrangedView):
    """Whole images in the nearest of several sizes."""

    def arrange(
        self, request: DatasetRequest, name: str, splits: Mapping[str, ImageSplit]
    ) -> DataSource:
        """Raises DataFolderError if no bucket has as many training images as a batch."""
        config = request.config
        assert config.buckets
        in_buckets = {name: BucketSplit(request, split) for name, split in splits.items()}
        most = max(in_buckets["train"].counts) if "train" in in_buckets else config.batch_size
        if most < config.batch_size:
            raise DataFolderError(
                f"each bucket of --buckets has fewer training images of {name} than one batch: "
                f"use --batch_size {most} or less, or fewer buckets"
            )
        counts = [
            f"{bucket}: {' + '.join(f'{split.counts[number]:,}' for split in in_buckets.values())}"
            for number, bucket in enumerate(config.buckets)
        ]
        return DataSource(name, in_buckets, f"; in buckets {', '.join(counts)}")


class BucketSplit(RearrangedSplit):
    """One split in buckets; ``SampleIndex.size`` is the bucket."""

    def __init__(self, request: DatasetRequest, split: ImageSplit) -> None:
        """Find the bucket of each image of ``split``."""
        super().__init__(request, split)
        sizes, view = request.config.bucket_sizes, request.view
        assert isinstance(view, BucketView)
        self.bucket_of = nearest_bucket(image_sizes(split), sizes)
        """The bucket of each image, int16."""
        self.counts = np.bincount(self.bucket_of, minlength=len(sizes)).tolist()
        """How many images each bucket has."""
        for height, width in sizes:
            low, high = (ratio * width / height for ratio in request.config.ratio)
            config = replace(request.config, ratio=(low, high))
            of_bucket = replace(request, size=(height, width), config=config, view=view.view)
            self.resized.append(split.with_request(of_bucket))

    def sampler(self, batch_size: int, **how: Any) -> GlobalBatchSampler:
        return BucketSampler(self.bucket_of, batch_size, **how)

    def facts(self) -> dict[str, Any]:
        what = f"the buckets of the images in {self.name}/"
        return super().facts() | {what: xxhash.xxh3_64_hexdigest(self.bucket_of.data)}


class BucketSampler(GlobalBatchSampler):
    """Divides global batches over processes; each batch has images of one bucket. Training drops
    the short rest of each bucket; its batches are in random order. Evaluation fills the rest up
    with padding; its batches are in the order of their first images, so that the first few already
    have images of all buckets."""

    def __init__(self, bucket_of: np.ndarray, batch_size: int, **how: Any) -> None:
        """``bucket_of``: the bucket of each image. The others: see ``GlobalBatchSampler``."""
        super().__init__(len(bucket_of), batch_size, **how)
        self._bucket_of = torch.from_numpy(bucket_of)
        self._counts = np.bincount(bucket_of).tolist()

    def __len__(self) -> int:
        size = self.batch_size
        return sum(n // size if self.shuffle else -(-n // size) for n in self._counts)

    def __iter__(self) -> Iterator[list[SampleIndex]]:
        generator = self.generator()
        images = torch.arange(self.length)
        if self.shuffle:
            images = torch.randperm(self.length, generator=generator)
        bucket_of = self._bucket_of[images]
        batches = []
        for bucket in range(len(self._counts)):
            inside = images[bucket_of == bucket]
            rest = len(inside) % self.batch_size
            if self.shuffle:
                inside = inside[: len(inside) - rest]
            elif rest:
                inside = torch.cat([inside, torch.full((self.batch_size - rest,), PADDING)])
            batches.append(inside.view(-1, self.batch_size))
        images = torch.cat(batches)
        if self.shuffle:
            images = images[torch.randperm(len(images), generator=generator)]
        else:
            images = images[images[:, 0].argsort()]
        start = self.shard * self.per_shard
        for batch in images[self.first_batch :]:
            bucket = int(self._bucket_of[batch[0]])  # the first image is never padding
            share = batch[start : start + self.per_shard].tolist()
            yield [SampleIndex(self.epoch, index, bucket) for index in share]


def nearest_bucket(images: np.ndarray, buckets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the number of the bucket with the nearest aspect ratio, compared by logarithms, for
    each image, int16. Images are (n, 2), buckets pairs, of height and width. An image that cannot
    be read, with size 0 x 0, is in the first."""
    known = np.maximum(images, 1).astype(np.float64)
    image_ratios, bucket_ratios = (
        np.log(sizes[:, 1] / sizes[:, 0]) for sizes in (known, np.array(buckets))
    )
    # Rounded: processors differ in the last digits of a logarithm.
    distances = np.abs(image_ratios[:, None] - bucket_ratios).round(9)
    nearest = distances.argmin(axis=1).astype(np.int16)
    return np.where(images.min(axis=1) > 0, nearest, np.int16(0))
