"""What a run asks of a source of images, and the base that all sources are made of.

``open_data`` opens the ``DataSource`` that ``--data_source`` names: a ``Split`` for training and
one for validation. A source defines how a split finds its images, and how it reads one of them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Self, TypeVar

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from data import loader
from data.config import GIVE_FLOATS, OPENED_BY, DataConfig
from data.crops import CropLayout, CropRequest
from data.files import BrokenImageError, DataFolderError, MissingSplitError, printable

Found = TypeVar("Found")
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
    labels: bool = True
    """Whether images need labels. Without, every image has label 0, whatever is stored with it, and
    where there are training images, there may be none for validation."""
    augment: bool = True
    """Whether training images are shuffled and augmented; else they are read as validation images
    are: each once, in order, unreadable ones left out."""
    crops: CropRequest | None = None
    """Of each augmented training image these crops, packed (``CropLayout``), instead of one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one image: the channels, then the spatial sizes."""
        return (self.channels, *self.size)

    @property
    def layout(self) -> CropLayout | None:
        """Return how the crops of training images are packed; None: they have no crops."""
        return CropLayout(self.shape, self.crops) if self.crops and self.augment else None

    @property
    def of_pairs(self) -> list[DatasetRequest]:
        """Return the request of each pair of ``crops.pairs``."""
        if not self.crops:
            return []
        height, width = (side // n for side, n in zip(self.size, self.crops.grid, strict=True))
        found = []
        for side, local in self.crops.pairs:
            grid, local_size = (side // height, side // width), (local, local)
            crops = replace(self.crops, local_size=local_size, grid=grid, pairs=())
            found.append(replace(self, size=(side, side), crops=crops))
        return found

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits that are needed."""
        return ("train", "val") if self.with_train else ("val",)

    @property
    def most_classes(self) -> int:
        """Return how many classes the images may have: any number without labels."""
        return self.num_classes if self.labels else ANY_CLASSES

    def of_splits(self, find: Callable[[str], Found]) -> dict[str, Found]:
        """Return what ``find`` returns for the name of each split that is needed, by these names.

        ``find`` raises MissingSplitError if there is nothing of a split: it is left out if it may
        be missing.
        """
        found = {}
        for name in self.splits:
            try:
                found[name] = find(name)
            except MissingSplitError:
                if self.labels or not found:
                    raise
        return found


ANY_CLASSES = 2**31
"""More classes than there are: labels are int32."""


def open_data(request: DatasetRequest) -> DataSource:
    """Open the source that ``--data_source`` names.

    Raises DataFolderError if it cannot be used.
    """
    kind = request.config.data_source
    if request.crops and (len(request.size) != 2 or kind in GIVE_FLOATS):
        raise DataFolderError(f"crops are made of photographs, and --data_source {kind} has arrays")
    layouts = {each.layout for each in request.of_pairs if each.layout}
    if len({layout.length for layout in layouts}) < len(layouts):
        raise DataFolderError(
            "two pairs of --crop_sizes have the same number of pixels and patches, by which "
            "batches are distinguished: change one of them"
        )
    module, _, name = OPENED_BY[kind].partition(":")
    open_source: Callable[[DatasetRequest], DataSource] = getattr(import_module(module), name)
    source = open_source(request)
    drops_last = request.with_train and request.augment
    if drops_last and source.train_length < request.config.batch_size:
        raise DataFolderError(
            f"{source.name} has {source.train_length} training images, fewer than one batch: "
            f"use --batch_size {source.train_length} or less"
        )
    return source


# -- one split: train or val -----------------------------------------------------------


class Split(Dataset):
    """One split (train or val): a map-style dataset of ``Sample``, indexed by a ``Key``.

    A source defines ``make``, ``name_of`` and ``digest``. A broken image is replaced: in training
    by another one of the split, in validation by padding, which counts for nothing.
    """

    dtype = torch.uint8
    """The dtype of the images: uint8, or fp32 that is normalised already."""
    reads_rows = False
    """Whether some rows of an image can be read without reading the others."""
    decodes = True
    """Whether loading takes work for each image, so that its speed matters."""
    gives_numbers = False
    """Whether an image comes with its number in place of its label."""

    def __init__(
        self,
        request: DatasetRequest,
        name: str,
        labels: Sequence[int] | np.ndarray,
        classes: list[str] | None = None,
        left_out: Counter[str] | None = None,
    ) -> None:
        """``labels``: of the images, in order; an array where there may be millions. ``classes``:
        their names by label, if there are any. ``left_out``: how many files are not images, by
        extension."""
        if not request.labels:
            labels, classes = np.broadcast_to(np.int32(0), len(labels)), None
        self.request, self.name, self.labels, self.classes = request, name, labels, classes
        self.left_out = left_out or Counter[str]()
        self.seed, self.is_train = request.seed, name == "train" and request.augment
        """``is_train``: images are shuffled, augmented, and replaced if they are broken."""
        self.shape: tuple[int, ...] = request.shape
        """The shape of what ``make`` returns."""
        if self.is_train and request.layout:
            self.shape = (request.layout.length,)
        self.rows = range(request.size[0])
        """The rows of an image that ``make`` returns."""

    def name_of(self, number: int) -> str:
        """Return how a person finds the image ``number``: its path, as a rule."""
        raise NotImplementedError

    def make(self, number: int, epoch: int, index: int) -> torch.Tensor:
        """Return the image ``number``, as the model sees it, in place of ``index``.

        Random draws depend on the seed, the epoch and ``index`` alone: not on the process that
        loads it, nor on where a run was resumed. Raises BrokenImageError.
        """
        raise NotImplementedError

    def digest(self) -> str:
        """Return a checksum of what the images of the split are, in order."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: loader.Key) -> loader.Sample:
        epoch, index = key
        bad: list[loader.BadImage] = []
        if index != loader.PADDING:
            for attempt in range(1 + ATTEMPTS if self.is_train else 1):
                number = index
                if attempt:
                    number = substitute(self.seed, epoch, index, attempt, len(self))
                try:
                    label = number if self.gives_numbers else int(self.labels[number])
                    return self.make(number, epoch, index), label, bad
                except BrokenImageError as error:
                    name = printable(self.name_of(number))
                    bad.append((name, str(error), int(self.labels[number])))
            if self.is_train:
                name, reason, _ = bad[0]
                raise DataFolderError(
                    f"{name} is not a readable image ({reason}), nor are {ATTEMPTS} others that "
                    "were tried in its place"
                )
        return torch.zeros(self.shape, dtype=self.dtype), loader.PADDING, bad

    def numbered(self) -> Self:
        """Return the same images, each with its number in place of its label."""
        part = copy.copy(self)
        part.gives_numbers = True
        return part

    def requested(self, request: DatasetRequest) -> Self:
        """Return the same images as another request has them; of photographs alone."""
        raise NotImplementedError

    def of_rows(self, rows: range) -> Dataset:
        """Return only these rows of the same images, with the same random augmentations."""
        if not self.reads_rows:
            return _RowsOf(self, rows)
        part = copy.copy(self)
        channels, _, *others = self.shape
        part.rows, part.shape = rows, (channels, len(rows), *others)
        return part

    def sampler(self, batch_size: int, **how: Any) -> loader.GlobalBatchSampler:
        """Return what decides the order of the images; a source may have another order."""
        return loader.GlobalBatchSampler(len(self), batch_size, **how)

    def batches(self, batch_size: int, share: loader.Share) -> loader.BatchLoader:
        """Return the loader of this ``share`` of each global batch of ``batch_size`` images.

        Training images are shuffled. Validation images come once, in order; padding fills up the
        last batch.
        """
        config = self.request.config
        sampler = self.sampler(
            batch_size,
            shuffle=self.is_train,
            seed=self.seed,
            rank=share.rank,
            world_size=share.world_size,
            repeats=config.aug_repeats if self.is_train else 1,
        )
        dataset = self if share.rows is None else self.of_rows(share.rows)
        if self.is_train and (requests := self.request.of_pairs):
            dataset = _OfPairs([self.requested(each) for each in requests])
            sampler = loader.PairSampler(sampler, len(requests))
        if not share.loads:
            images = torch.zeros(share.shape_of(batch_size, self.shape), dtype=self.dtype)
            return loader.ConstantLoader(len(sampler), (images, torch.zeros(0, dtype=torch.int64)))
        workers = config.num_workers
        if workers is None:
            workers = loader.workers_of_host(share.of_host)
        workers = workers if self.is_train else min(workers, len(sampler))
        return loader.DatasetLoader(dataset, sampler, workers)

    def batches_of(
        self, numbers: Sequence[int], batch_size: int, share: loader.Share
    ) -> loader.BatchLoader:
        """Return the same of a few images, in this order, which each process loads itself.

        Not for shares of a part of each image.
        """
        rank, parts = share.rank, share.world_size
        sampler = loader.GlobalBatchSampler(
            len(numbers), batch_size, shuffle=False, rank=rank, world_size=parts
        )
        return loader.DatasetLoader(_Some(self, numbers), sampler, 0)

    def facts(self) -> dict[str, Any]:
        """Return what the images are and, beside flags, their order, under names for a person to
        read."""
        is_train = self.name == "train"
        kind = "training" if is_train else "validation"
        labels = np.ascontiguousarray(self.labels, np.int64).data
        return {
            f"the number of {kind} images": len(self),
            FILES if is_train else "the names or order of the files in val/": self.digest(),
            f"the checksum of the {kind} images' labels": xxhash.xxh3_64_hexdigest(labels),
        }


class _RowsOf(Dataset):
    """These rows of images that can only be read whole."""

    def __init__(self, split: Split, rows: range) -> None:
        self._split, self._rows = split, rows

    def __getitem__(self, key: loader.Key) -> loader.Sample:
        image, label, bad = self._split[key]
        return image[:, self._rows.start : self._rows.stop], label, bad


class _OfPairs(Dataset):
    """The same images in crops of several pairs of sizes: by their keys, and the pair's number."""

    def __init__(self, splits: Sequence[Split]) -> None:
        self._splits = splits

    def __getitem__(self, key: loader.Key) -> loader.Sample:
        *own, pair = key
        return self._splits[pair][tuple(own)]


class _Some(Dataset):
    """Images of a split, by their places among ``numbers``."""

    def __init__(self, split: Split, numbers: Sequence[int]) -> None:
        self._split, self._numbers = split, numbers

    def __getitem__(self, key: loader.Key) -> loader.Sample:
        epoch, place = key
        return self._split[epoch, place if place == loader.PADDING else self._numbers[place]]


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
    """Images for training and validation, found but not loaded: one or two splits.

    It is opened before any device starts. Loader processes read it.
    """

    def __init__(self, name: str, splits: Mapping[str, Split], remark: str = "") -> None:
        """``splits``: those of the request, by name; without labels "val" may be missing.
        ``remark``: the end of its line in the log."""
        self.name, self.splits, self._remark = name, splits, remark
        one = next(iter(splits.values()))
        self.classes, self.reads_rows, self.decodes = one.classes, one.reads_rows, one.decodes
        self.train_length, self.val_length = (
            len(splits[each]) if each in splits else 0 for each in ("train", "val")
        )

    def train_loader(self, batch_size: int, share: loader.Share) -> loader.BatchLoader:
        """Return the loader of training images, see ``Split.batches``; it starts at any batch."""
        return self.splits["train"].batches(batch_size, share)

    def val_loader(self, batch_size: int, share: loader.Share) -> loader.BatchLoader:
        """Return the loader of validation images, see ``Split.batches``.

        Raises KeyError if there are none: ``val_length`` is 0.
        """
        return self.splits["val"].batches(batch_size, share)

    def order(self) -> dict[str, Any]:
        """Return what decides, beside flags, the order of the training images."""
        return self.splits["train"].facts() if "train" in self.splits else {}

    def fingerprint(self) -> dict[str, Any]:
        """Return the same of all images: what processes of a run must have in common."""
        # The classes come before the checksums: they say more.
        facts: dict[str, Any] = {"the class folders": self.classes}
        for split in self.splits.values():
            facts |= split.facts()
        return facts

    def __str__(self) -> str:
        """Return the source's name and sizes in one line."""
        lengths = {"training": self.train_length, "validation": self.val_length}
        counts = ", ".join(f"{length:,} {kind}" for kind, length in lengths.items() if length)
        text = f"{printable(self.name)}: {counts} images"
        left_out = sum((split.left_out for split in self.splits.values()), Counter[str]())
        if left_out:
            shown = 5
            kinds = ", ".join(f"{kind} {n:,}" for kind, n in left_out.most_common(shown))
            more = ", ..." if len(left_out) > shown else ""
            text += f"; {left_out.total():,} files left out ({printable(kinds)}{more})"
        return text + self._remark
