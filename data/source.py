"""What a run asks of any source of images, and what those that read one image at a time share."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from data.config import OPENED_BY, DataConfig
from data.files import BrokenImageError, DataFolderError, printable
from data.loader import (
    PADDING,
    BadImage,
    BatchLoader,
    DatasetLoader,
    EmptyLoader,
    GlobalBatchSampler,
    Sample,
    Share,
    workers_of_host,
)

# ------------------------------------------------------------------------------------------------
# What sources of labelled images share: another image, or padding, for a broken one.


ATTEMPTS = 10
"""How many images are drawn in the place of a broken one before the folder is given up."""


def substitute(seed: int, epoch: int, index: int, attempt: int, length: int) -> int:
    """Return another image than ``index``, the ``attempt``-th (from 1 on) to take its place.

    It depends on the arguments alone: so a run trains on the same images, whatever number of
    processes its batches are divided over and wherever it is resumed.
    """
    state = np.random.SeedSequence((seed, epoch, index, attempt)).generate_state(1, np.uint64)
    return (index + 1 + int(state[0]) % max(length - 1, 1)) % length


class SampleSplit(Dataset, abc.ABC):
    """One split (train or val) of labelled images: a dataset by (epoch, image index).

    In the place of a broken image stands another one (``substitutes``, for training), or padding,
    which counts for nothing.
    """

    dtype = torch.uint8
    """What ``make`` returns is made of."""

    def __init__(self, labels: Sequence[int] | np.ndarray, seed: int, *, substitutes: bool) -> None:
        """Take the labels of the images, in order: an array where there may be millions."""
        self.labels, self.seed = labels, seed
        self._substitutes = substitutes

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Return the shape of what ``make`` returns."""

    @abc.abstractmethod
    def name_of(self, number: int) -> str:
        """Return what a person finds the image ``number`` by: its path, as a rule."""

    @abc.abstractmethod
    def make(self, number: int, epoch: int, index: int) -> torch.Tensor:
        """Return the image ``number``, as the model sees it; it stands in the place of ``index``.

        What is drawn at random depends on the seed, the epoch and ``index`` alone: not on
        the worker that loads it, nor on where a run was resumed. Raises BrokenImageError.
        """

    def __len__(self) -> int:
        return len(self.labels)

    def _padding(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        bad: list[BadImage] = []
        if index == PADDING:
            return self._padding(), PADDING, bad
        for attempt in range(1 + ATTEMPTS if self._substitutes else 1):
            number = index
            if attempt:
                number = substitute(self.seed, epoch, index, attempt, len(self))
            try:
                return self.make(number, epoch, index), int(self.labels[number]), bad
            except BrokenImageError as error:
                name = printable(self.name_of(number))
                bad.append((name, str(error), int(self.labels[number])))
        if not self._substitutes:
            return self._padding(), PADDING, bad
        name, reason, _ = bad[0]
        raise DataFolderError(
            f"{name} is not a readable image ({reason}), nor are {ATTEMPTS} others that were "
            "tried in its place"
        )


# ------------------------------------------------------------------------------------------------


_KINDS = 5  # of files, named in the log
FILES = "the names or order of the files in train/"
"""What ``DataSource.order`` calls the checksum that depends on where images are kept, too."""


@dataclass(frozen=True)
class Wanted:
    """Says what a run wants its images to be."""

    config: DataConfig
    channels: int
    size: tuple[int, ...]
    """The spatial sizes: an image's height and width in pixels, a volume's slices before them."""
    num_classes: int
    seed: int
    with_train: bool = True
    """Whether training images are wanted beside those for validation."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one image: the channels, then the spatial sizes."""
        return (self.channels, *self.size)


class DataSource(Protocol):
    """Holds images, found but not loaded, for training and validation.

    It is made before any device starts.
    """

    name: str
    train_length: int
    """How many training images there are; 0 if only validation is wanted."""
    val_length: int
    classes: list[str] | None
    """The names of the classes by label, if the source has any."""
    decodes: bool
    """Whether loading takes work for each image, so that its speed matters."""
    reads_rows: bool
    """Whether an image's rows can be read without reading the others."""

    def train_loader(self, batch_size: int, share: Share) -> BatchLoader:
        """Return shuffled global batches of ``batch_size`` images, this ``share`` of each.

        The position in them is the loader's: ``BatchLoader.epoch`` begins at any batch.
        """

    def val_loader(self, batch_size: int, share: Share) -> BatchLoader:
        """Return all validation images once, in order; padding fills up the last batch."""

    def order(self) -> dict[str, Any]:
        """Return what decides, beside flags, the order of the training images, under names for a
        person to read."""

    def fingerprint(self) -> dict[str, Any]:
        """Return the same of all images: what processes of a run must have in common."""


class Split(Protocol):
    """A map-style dataset of ``Sample``, indexed by (epoch, image index)."""

    dtype: torch.dtype
    """What images are made of: uint8, or fp32 that is normalised already."""
    reads_rows: bool
    """Whether an image's rows can be read without reading the others."""

    @property
    def labels(self) -> Sequence[int] | np.ndarray:
        """The labels of the images, in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: tuple[int, int]) -> Any: ...

    def of_rows(self, rows: range) -> Dataset:
        """Return the same images, changed at random in the same way, but these rows only."""

    def digest(self) -> str:
        """Return a checksum of what the split's images are, in order."""


class WholeImages(Dataset):
    """The base of splits that can only make whole images, of which rows are then kept."""

    reads_rows = False

    def of_rows(self, rows: range) -> Dataset:
        return _RowsOf(self, rows)


class _RowsOf(Dataset):
    def __init__(self, split: WholeImages, rows: range) -> None:
        self._split, self._rows = split, rows

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        image, label, bad = self._split[key]
        return image[:, self._rows.start : self._rows.stop], label, bad


class SplitSource:
    """A ``DataSource`` of two splits that are read by worker processes."""

    decodes = True

    def __init__(
        self,
        wanted: Wanted,
        name: str,
        train: Split | None,
        val: Split,
        classes: list[str] | None,
        left_out: Counter[str] | None = None,
    ) -> None:
        """Take the splits. ``left_out``: how many files are no images, by extension."""
        self.name, self.classes, self.reads_rows = name, classes, val.reads_rows
        self.train_length, self.val_length = len(train) if train else 0, len(val)
        self._wanted, self._train, self._val = wanted, train, val
        self._left_out = left_out or Counter[str]()

    def train_loader(self, batch_size: int, share: Share) -> BatchLoader:
        assert self._train is not None
        return self._loader(self._train, batch_size, share, shuffle=True)

    def val_loader(self, batch_size: int, share: Share) -> BatchLoader:
        return self._loader(self._val, batch_size, share, shuffle=False)

    def sampler(self, length: int, batch_size: int, **how: Any) -> GlobalBatchSampler:
        """Return the order of a split of ``length`` images; a source may have another one."""
        return GlobalBatchSampler(length, batch_size, **how)

    def _loader(self, split: Any, batch_size: int, share: Share, *, shuffle: bool) -> BatchLoader:
        sampler = self.sampler(
            len(split),
            batch_size,
            shuffle=shuffle,
            seed=self._wanted.seed,
            rank=share.rank,
            world_size=share.world_size,
            repeats=self._wanted.config.aug_repeats if shuffle else 1,
        )
        if not share.loads:
            shape = share.shape_of(batch_size, self._wanted.shape)
            return EmptyLoader(len(sampler), shape, split.dtype)
        workers = self._wanted.config.num_workers
        if workers is None:
            workers = workers_of_host(share.of_host)
        dataset: Dataset = split if share.rows is None else split.of_rows(share.rows)
        return DatasetLoader(dataset, sampler, workers if shuffle else min(workers, len(sampler)))

    def order(self) -> dict[str, Any]:
        if self._train is None:
            return {}
        return {
            "the number of training images": self.train_length,
            FILES: self._train.digest(),
            "the checksum of the training images' labels": xxhash.xxh3_64_hexdigest(
                np.ascontiguousarray(self._train.labels, np.int64).data
            ),
        }

    def fingerprint(self) -> dict[str, Any]:
        return {
            "the class folders": self.classes,  # before the checksums: it says more
            "the number of validation images": self.val_length,
            **self.order(),
            "the names or order of the files in val/": self._val.digest(),
        }

    def __str__(self) -> str:
        text = describe(self)
        if not self._left_out:
            return text
        kinds = ", ".join(f"{kind} {n:,}" for kind, n in self._left_out.most_common(_KINDS))
        more = ", ..." if len(self._left_out) > _KINDS else ""
        return f"{text}; {self._left_out.total():,} files left out ({printable(kinds)}{more})"


def describe(source: DataSource) -> str:
    """Return the source's name and sizes in one line."""
    training = f"{source.train_length:,} training, " if source.train_length else ""
    return f"{printable(source.name)}: {training}{source.val_length:,} validation images"


def open_data(wanted: Wanted) -> DataSource:
    """Open the source that ``wanted.config`` chooses.

    Raises DataFolderError if it cannot be used.
    """
    module, _, name = OPENED_BY[wanted.config.data_source].partition(":")
    open_source: Callable[[Wanted], DataSource] = getattr(import_module(module), name)
    source = open_source(wanted)
    if wanted.with_train and source.train_length < wanted.config.batch_size:
        raise DataFolderError(
            f"{source.name} has {source.train_length} training images, fewer than one batch: "
            f"use --batch_size {source.train_length} or less"
        )
    return source
