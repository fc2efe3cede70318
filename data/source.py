"""What a run asks of a source of images, and the bases that most sources are made of.

``open_data`` opens the ``DataSource`` that ``--data_source`` names. It has a ``Split`` for training
and one for validation. Most are a ``SampleSplit``, which reads one image at a time and replaces
images that are broken.
"""

from __future__ import annotations

import abc
import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

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
    ConstantLoader,
    DatasetLoader,
    GlobalBatchSampler,
    Key,
    Sample,
    Share,
    workers_of_host,
)

FILES = "the names or order of the files in train/"
"""The name in ``DataSource.order`` of the checksum that also depends on where images are stored."""


@dataclass(frozen=True)
class DatasetRequest:
    """What a run requires of its images."""

    config: DataConfig
    channels: int
    size: tuple[int, ...]
    """The spatial sizes: height and width of an image in pixels, slices of a volume before them."""
    num_classes: int
    seed: int
    with_train: bool = True
    """Whether training images are needed beside those for validation."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one image: the channels, then the spatial sizes."""
        return (self.channels, *self.size)


def open_data(request: DatasetRequest) -> DataSource:
    """Open the source that ``--data_source`` names.

    Raises DataFolderError if it cannot be used.
    """
    module, _, name = OPENED_BY[request.config.data_source].partition(":")
    open_source: Callable[[DatasetRequest], DataSource] = getattr(import_module(module), name)
    source = open_source(request)
    if request.with_train and source.train_length < request.config.batch_size:
        raise DataFolderError(
            f"{source.name} has {source.train_length} training images, fewer than one batch: "
            f"use --batch_size {source.train_length} or less"
        )
    return source


# -- one split: train or val -----------------------------------------------------------


class Split(Dataset, abc.ABC):
    """One split (train or val): a map-style dataset of ``Sample``, indexed by a ``Key``."""

    labels: Sequence[int] | np.ndarray
    """The labels of the images, in order: an array where there may be millions."""
    dtype = torch.uint8
    """The dtype of the images: uint8, or fp32 that is normalised already."""
    reads_rows = False
    """Whether some rows of an image can be read without reading the others."""

    def __len__(self) -> int:
        return len(self.labels)

    @abc.abstractmethod
    def __getitem__(self, key: Key) -> Sample: ...

    @abc.abstractmethod
    def digest(self) -> str:
        """Return a checksum of what the images of the split are, in order."""

    def of_rows(self, rows: range) -> Dataset:
        """Return only these rows of the same images, with the same random augmentations."""
        return _RowsOf(self, rows)


class _RowsOf(Dataset):
    """These rows of images that can only be read whole."""

    def __init__(self, split: Split, rows: range) -> None:
        self._split, self._rows = split, rows

    def __getitem__(self, key: Key) -> Sample:
        image, label, bad = self._split[key]
        return image[:, self._rows.start : self._rows.stop], label, bad


class SampleSplit(Split):
    """A split that reads one image at a time, for each (epoch, image index).

    A broken image is replaced: by another one of the split (``substitutes``, for training), or by
    padding, which counts for nothing.
    """

    def __init__(
        self, request: DatasetRequest, labels: Sequence[int] | np.ndarray, *, substitutes: bool
    ) -> None:
        self.labels, self.seed = labels, request.seed
        self.shape = request.shape
        """The shape of what ``make`` returns."""
        self.rows = range(request.size[0])
        """The rows of an image that ``make`` returns."""
        self._substitutes = substitutes

    @abc.abstractmethod
    def name_of(self, number: int) -> str:
        """Return how a person finds the image ``number``: its path, as a rule."""

    @abc.abstractmethod
    def make(self, number: int, epoch: int, index: int) -> torch.Tensor:
        """Return the image ``number``, as the model sees it, in place of ``index``.

        Random draws depend on the seed, the epoch and ``index`` alone: not on the process that
        loads it, nor on where a run was resumed. Raises BrokenImageError.
        """

    def of_rows(self, rows: range) -> Dataset:
        if not self.reads_rows:
            return super().of_rows(rows)
        part = copy.copy(self)
        channels, _, *others = self.shape
        part.rows, part.shape = rows, (channels, len(rows), *others)
        return part

    def __getitem__(self, key: Key) -> Sample:
        epoch, index = key
        bad: list[BadImage] = []
        if index != PADDING:
            for attempt in range(1 + ATTEMPTS if self._substitutes else 1):
                number = index
                if attempt:
                    number = substitute(self.seed, epoch, index, attempt, len(self))
                try:
                    return self.make(number, epoch, index), int(self.labels[number]), bad
                except BrokenImageError as error:
                    name = printable(self.name_of(number))
                    bad.append((name, str(error), int(self.labels[number])))
            if self._substitutes:
                name, reason, _ = bad[0]
                raise DataFolderError(
                    f"{name} is not a readable image ({reason}), nor are {ATTEMPTS} others that "
                    "were tried in its place"
                )
        return torch.zeros(self.shape, dtype=self.dtype), PADDING, bad


ATTEMPTS = 10
"""How many images are tried instead of a broken one before the run ends."""


def substitute(seed: int, epoch: int, index: int, attempt: int, length: int) -> int:
    """Return another image than ``index``, the ``attempt``-th (from 1 on) to take its place.

    It depends on the arguments alone: so a run trains on the same images, whatever number of
    processes its batches are divided over and wherever it is resumed.
    """
    state = np.random.SeedSequence((seed, epoch, index, attempt)).generate_state(1, np.uint64)
    return (index + 1 + int(state[0]) % max(length - 1, 1)) % length


# -- a source --------------------------------------------------------------------------


class DataSource:
    """Images for training and validation, found but not loaded: two splits.

    It is opened before any device starts. Loader processes read it.
    """

    decodes = True
    """Whether loading takes work for each image, so that its speed matters."""

    def __init__(
        self,
        request: DatasetRequest,
        name: str,
        train: Split | None,
        val: Split,
        classes: list[str] | None,
        left_out: Counter[str] | None = None,
    ) -> None:
        """``train``: None if only validation is requested. ``classes``: the names of the classes by
        label, if there are any. ``left_out``: how many files are not images, by extension."""
        self.name, self.classes, self.reads_rows = name, classes, val.reads_rows
        self.train_length, self.val_length = len(train) if train else 0, len(val)
        self._request, self._train, self._val = request, train, val
        self._left_out = left_out or Counter[str]()

    def train_loader(self, batch_size: int, share: Share) -> BatchLoader:
        """Return shuffled global batches of ``batch_size`` images, this ``share`` of each.

        ``BatchLoader.epoch`` starts at any batch.
        """
        assert self._train is not None
        return self._loader(self._train, batch_size, share, shuffle=True)

    def val_loader(self, batch_size: int, share: Share) -> BatchLoader:
        """Return all validation images once, in order; padding fills up the last batch."""
        return self._loader(self._val, batch_size, share, shuffle=False)

    def sampler(self, length: int, batch_size: int, **how: Any) -> GlobalBatchSampler:
        """Return the sampler of a split of ``length`` images; a source may have another one."""
        return GlobalBatchSampler(length, batch_size, **how)

    def _loader(self, split: Split, batch_size: int, share: Share, *, shuffle: bool) -> BatchLoader:
        config = self._request.config
        sampler = self.sampler(
            len(split),
            batch_size,
            shuffle=shuffle,
            seed=self._request.seed,
            rank=share.rank,
            world_size=share.world_size,
            repeats=config.aug_repeats if shuffle else 1,
        )
        if not share.loads:
            images = torch.zeros(share.shape_of(batch_size, self._request.shape), dtype=split.dtype)
            return ConstantLoader(len(sampler), (images, torch.zeros(0, dtype=torch.int64)))
        workers = config.num_workers
        if workers is None:
            workers = workers_of_host(share.of_host)
        dataset: Dataset = split if share.rows is None else split.of_rows(share.rows)
        return DatasetLoader(dataset, sampler, workers if shuffle else min(workers, len(sampler)))

    def order(self) -> dict[str, Any]:
        """Return what decides, beside flags, the order of the training images, under names for a
        person to read."""
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
        """Return the same of all images: what processes of a run must have in common."""
        return {
            "the class folders": self.classes,  # before the checksums: it says more
            "the number of validation images": self.val_length,
            **self.order(),
            "the names or order of the files in val/": self._val.digest(),
        }

    def __str__(self) -> str:
        """Return the source's name and sizes in one line."""
        training = f"{self.train_length:,} training, " if self.train_length else ""
        text = f"{printable(self.name)}: {training}{self.val_length:,} validation images"
        if not self._left_out:
            return text
        shown = 5
        kinds = ", ".join(f"{kind} {n:,}" for kind, n in self._left_out.most_common(shown))
        more = ", ..." if len(self._left_out) > shown else ""
        return f"{text}; {self._left_out.total():,} files left out ({printable(kinds)}{more})"
