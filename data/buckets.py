"""Images of a few sizes, the buckets: each batch is of one, each image in that of its proportions.

So a model sees whole images of any aspect ratio, and yet there is only one shape of batches, and
on XLA one compiled program, for each bucket.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xxhash
from tqdm import tqdm

from data.config import DataConfig
from data.files import BrokenImageError, DataFolderError
from data.index import VERSION, Kept, Table, is_worth_it, places
from data.loader import PADDING, GlobalBatchSampler, Key, Sample
from data.source import SplitSource, Wanted, WholeImages
from data.transforms import BytesSplit, transforms_of

_AT_ONCE = 16  # images, which are waited for most of the time where they are far away
_A_PART = 256  # images that a thread looks at before it tells what it found
_DIGITS = 9
"""Of distances that are compared: processors differ in the last ones of a logarithm."""


def source_of(
    wanted: Wanted,
    name: str,
    train: BytesSplit | None,
    val: BytesSplit,
    classes: list[str] | None,
    left_out: Counter[str],
) -> SplitSource:
    """Return the source of two splits, in buckets if ``--buckets`` has them.

    Raises DataFolderError where no bucket has as many training images as a batch.
    """
    if not wanted.config.buckets:
        return SplitSource(wanted, name, train, val, classes, left_out)
    in_train = None if train is None else BucketSplit(wanted, train, "train")
    return BucketSource(wanted, name, in_train, BucketSplit(wanted, val, "val"), classes, left_out)


class BucketSplit(WholeImages):
    """One split in buckets: a dataset by (epoch, image index, bucket)."""

    def __init__(self, wanted: Wanted, split: BytesSplit, name: str) -> None:
        """Find the bucket of each image of ``split``, called ``name``: train or val."""
        self._split, self.dtype, self.labels = split, split.dtype, split.labels
        config, sizes = wanted.config, wanted.config.bucket_sizes
        self.bucket_of = nearest_bucket(kept_sizes(config, split, name), sizes)
        """Of each image, int16."""
        self.counts = np.bincount(self.bucket_of, minlength=len(sizes)).tolist()
        """How many images each bucket has."""
        self._in_buckets = []
        for height, width in sizes:
            low, high = (each * width / height for each in config.ratio)
            of_bucket = replace(
                wanted, size=(height, width), config=replace(config, ratio=(low, high))
            )
            transform = transforms_of(of_bucket)[0 if name == "train" else 1]
            self._in_buckets.append(split.made_by(transform, of_bucket.shape))

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, key: Key) -> Sample:
        """Return the image in the size of the bucket in the key, whichever its own is: it may stand
        in the place of a broken one."""
        epoch, index, bucket = key
        return self._in_buckets[bucket][epoch, index]

    def digest(self) -> str:
        return self._split.digest()

    def digest_of_buckets(self) -> str:
        """Return a checksum of which images are in which bucket."""
        return xxhash.xxh3_64(self.bucket_of.data).hexdigest()


class BucketSource(SplitSource):
    """A ``DataSource`` of which each batch has images of one size."""

    _train: BucketSplit | None
    _val: BucketSplit

    def __init__(self, wanted: Wanted, name: str, *splits_and_more: Any) -> None:
        """Take what ``SplitSource`` does. Raises DataFolderError, see ``source_of``."""
        super().__init__(wanted, name, *splits_and_more)
        most = max(self._train.counts) if self._train else 0
        if self._train and most < wanted.config.batch_size:
            raise DataFolderError(
                f"no bucket of --buckets has as many training images of {name} as one batch: use "
                f"--batch_size {most} or less, or fewer buckets"
            )

    def sampler(self, length: int, batch_size: int, **how: Any) -> GlobalBatchSampler:
        split = self._train if how["shuffle"] else self._val
        assert split is not None
        return BucketSampler(split.bucket_of, batch_size, **how)

    def order(self) -> dict[str, Any]:
        if self._train is None:
            return {}
        buckets = self._train.digest_of_buckets()
        return super().order() | {"the buckets of the images in train/": buckets}

    def fingerprint(self) -> dict[str, Any]:
        buckets = self._val.digest_of_buckets()
        return super().fingerprint() | {"the buckets of the images in val/": buckets}

    def __str__(self) -> str:
        counts = []
        for number, bucket in enumerate(self._wanted.config.buckets or ()):
            training = f"{self._train.counts[number]:,} + " if self._train else ""
            counts.append(f"{bucket}: {training}{self._val.counts[number]:,}")
        return f"{super().__str__()}; in buckets {', '.join(counts)}"


class BucketSampler(GlobalBatchSampler):
    """Divides global batches over processes, of which each has images of one bucket.

    Yields lists of (epoch, image index, bucket). Training drops the short rest of each bucket, of
    other images in each epoch; its batches are in random order. Evaluation fills it up with
    padding; its batches are in the order of their first images, so that the first few, too, have
    images of all buckets.
    """

    def __init__(self, bucket_of: np.ndarray, batch_size: int, **how: Any) -> None:
        """Take the bucket of each image, and what ``GlobalBatchSampler`` takes."""
        super().__init__(len(bucket_of), batch_size, **how)
        self._bucket_of = torch.from_numpy(bucket_of)
        counts = np.bincount(bucket_of).tolist()
        self._count = len(counts)
        self._batches = sum(
            n // batch_size if self.shuffle else -(-n // batch_size) for n in counts
        )

    def __len__(self) -> int:
        return self._batches

    def _order(self) -> torch.Tensor:
        generator = self.generator()
        images = self.shuffled(generator) if self.shuffle else torch.arange(self.length)
        of_each = self._bucket_of[images]
        found = torch.cat([self._cut(images[of_each == i]) for i in range(self._count)])
        if self.shuffle:
            return found[torch.randperm(len(found), generator=generator)]
        return found[found[:, 0].argsort()]

    def _cut(self, images: torch.Tensor) -> torch.Tensor:
        """Return the images of one bucket as batches, (batches, batch size)."""
        rest = len(images) % self.batch_size
        if self.shuffle:
            images = images[: len(images) - rest]
        elif rest:
            images = torch.cat([images, torch.full((self.batch_size - rest,), PADDING)])
        return images.view(-1, self.batch_size)

    def __iter__(self) -> Iterator[list[Key]]:
        start = self.rank * self.share
        for batch in self._order()[self.first_batch :]:
            bucket = int(self._bucket_of[batch[0]])  # the first one is no padding
            share = batch[start : start + self.share].tolist()
            yield [(self.epoch, index, bucket) for index in share]


def nearest_bucket(images: np.ndarray, buckets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return of each image the number of the bucket with the nearest aspect ratio, int16.

    Images are (n, 2), buckets pairs, of height and width; ratios are compared by their logarithms,
    of two as near the first is taken. An image without a size, 0 x 0, which cannot be read, is in
    the first.
    """
    known = np.maximum(images, 1).astype(np.float64)
    of_images, of_buckets = (np.log(each[:, 1] / each[:, 0]) for each in (known, np.array(buckets)))
    distances = np.abs(of_images[:, None] - of_buckets).round(_DIGITS)
    nearest = distances.argmin(axis=1).astype(np.int16)
    return np.where(images.min(axis=1) > 0, nearest, np.int16(0))


# -- the sizes of images ----------------------------------------------------------------


def kept_sizes(config: DataConfig, split: BytesSplit, name: str) -> np.ndarray:
    """Return the height and width of each image of a split in pixels, (n, 2), int32; 0 x 0 for what
    cannot be read.

    They are kept as indexes are (``data/index.py``), and read as long as the images have
    the same names.
    """
    root, digest = config.data_dir, split.digest()

    def build() -> Table:
        return Table({"sizes": read_sizes(split, os.path.join(root, name))}, {"digest": digest})

    def change(table: Table) -> str | None:
        return None if table.info["digest"] == digest else "its images are others"

    where = places(config, root, f"{name}-sizes-of-{config.data_source}")
    kept = Kept(where, root, {"version": VERSION}, config)
    return kept.load(build, change, functools.partial(is_worth_it, config, "sizes")).arrays["sizes"]


def read_sizes(split: BytesSplit, name: str) -> np.ndarray:
    """Read the sizes of all images of a split, several at once; ``name`` is for the bar."""

    def sizes_of(first: int) -> list[tuple[int, int]]:
        return [_size(split, n) for n in range(first, min(first + _A_PART, len(split)))]

    found: list[tuple[int, int]] = []
    title = f"reading the sizes of {name}"
    with (
        ThreadPoolExecutor(_AT_ONCE) as pool,
        tqdm(total=len(split), desc=title, unit=" images", delay=5, disable=None) as bar,
    ):
        for part in pool.map(sizes_of, range(0, len(split), _A_PART)):
            found += part
            bar.update(len(part))
    return np.array(found, np.int32).reshape(-1, 2)


def _size(split: BytesSplit, number: int) -> tuple[int, int]:
    try:
        return split.size_of(number)
    except BrokenImageError:  # training tells of it, and evaluation, when it is read
        return 0, 0
