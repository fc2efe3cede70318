"""What a run requests from a source of images, and the base class of all splits.

``open_data`` opens the ``DataSource`` selected by ``--data_source``. Each source defines how a
``Split`` finds its images and how it reads one of them.
"""

from __future__ import annotations

import copy
import functools
import math
import os
import random
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
from data.files import BrokenImageError, DataFolderError, MissingSplitError, first_of, printable
from data.packing import PackLayout, PackRequest
from data.size_schedule import SizeSchedule

Result = TypeVar("Result")
FILES = "the names or order of the files in train/"
"""The key in ``DataSource.order`` of the checksum that also depends on the storage location."""
GLOBALS = 2
"""Number of DINO's global crops per image."""


@dataclass(frozen=True)
class CropRequest:
    """DINO's crops of each training image: two global crops of the request's size, smaller local
    crops, and a mask for the patches of the first global crop (DINOv2,
    https://arxiv.org/abs/2304.07193, section 4)."""

    local_size: tuple[int, int]
    """Height and width of a local crop in pixels."""
    local_number: int
    """Number of local crops per image."""
    global_scale: tuple[float, float]
    """Minimum and maximum area of a global crop, as a fraction of the image."""
    local_scale: tuple[float, float]
    """Minimum and maximum area of a local crop, as a fraction of the image."""
    grid: tuple[int, int]
    """Rows and columns of patches in a global crop."""
    mask_ratio: tuple[float, float]
    """Minimum and maximum fraction of masked patches in the masked crop, drawn uniformly per
    image."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Sides of square global and local crops; each batch uses one pair. Empty: only the sizes
    above."""
    gram_factor: float = 1.0
    """Size of the Gram teacher's crops relative to global crops, per side; 1: it uses the global
    crops."""

    def of_gram(self, sides: tuple[int, ...]) -> tuple[int, int]:
        """Return the height and width of the Gram teacher's crops, in pixels or patches."""
        height, width = sides
        return round(height * self.gram_factor), round(width * self.gram_factor)


@dataclass(frozen=True)
class CropLayout:
    """The layout of an image's crops and mask in one row of bytes, so that a batch is one tensor.
    ``MultiCrop`` in ``data/transforms.py`` creates them."""

    shape: tuple[int, ...]
    """Channels, height and width of a global crop."""
    request: CropRequest

    @property
    def gram_number(self) -> int:
        """Return the number of separate crops for the Gram teacher."""
        return GLOBALS if self.request.gram_factor > 1 else 0

    @property
    def _parts(self) -> list[tuple[int, ...]]:
        """Return the shapes of the global, the Gram teacher's and the local crops, and of the
        mask."""
        request, channels = self.request, self.shape[0]
        return [
            (GLOBALS, *self.shape),
            (self.gram_number, channels, *request.of_gram(self.shape[1:])),
            (request.local_number, channels, *request.local_size),
            (math.prod(request.grid),),
        ]

    @property
    def length(self) -> int:
        """Return the number of bytes of a packed image."""
        return sum(map(math.prod, self._parts))

    def pack(self, *parts: torch.Tensor) -> torch.Tensor:
        """Pack one image into (length,) uint8: its global crops (2, channels, height, width), the
        Gram teacher's (2 or 0) and the local crops (L), uint8, and the mask (patches,), bool."""
        return torch.cat([part.to(torch.uint8).flatten() for part in parts])

    def unpack(
        self, packed: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Unpack images (images, length) into the global crops (2, images, channels, height,
        width), the Gram teacher's (2 or 0) and the local crops (L), all uint8, and the mask
        (images, patches), bool. Uses only slices and reshapes, so it can be part of a step on any
        device."""
        pieces = packed.split([math.prod(part) for part in self._parts], 1)
        *crops, mask = (
            piece.unflatten(1, part) for piece, part in zip(pieces, self._parts, strict=True)
        )
        globals_, grams, locals_ = (crop.transpose(0, 1) for crop in crops)
        return globals_, grams, locals_, mask != 0


def max_masked(grid: tuple[int, int], ratio: tuple[float, float]) -> int:
    """Return the maximum number of patches that ``block_mask`` masks in one image."""
    return max(1, math.floor(ratio[1] * math.prod(grid)))


@dataclass(frozen=True)
class DatasetRequest:
    """What a run requests from a source."""

    config: DataConfig
    channels: int
    size: tuple[int, ...]
    """Height and width of an image in pixels; for volumes slices, height and width."""
    num_classes: int
    seed: int
    with_train: bool = True
    """Whether training images are needed in addition to validation images."""
    labels: bool = True
    """Whether images need labels. Without labels, every image has label 0, and val/ may be
    missing."""
    augment: bool = True
    """Whether training images are shuffled and augmented. Otherwise they are read like validation
    images: once, in order, skipping unreadable ones."""
    crops: CropRequest | None = None
    """Crops of each augmented training image, packed (``CropLayout``), instead of one image."""
    pack: PackRequest | None = None
    """Sequences of tokens, each with one or several whole images (``PackLayout``), instead of
    images of one size, in training and validation."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one image: channels, then spatial sizes."""
        return (self.channels, *self.size)

    @property
    def layout(self) -> CropLayout | None:
        """Return how the crops of training images are packed; None without crops."""
        return CropLayout(self.shape, self.crops) if self.crops and self.augment else None

    @property
    def pack_layout(self) -> PackLayout | None:
        """Return how sequences of images are packed; None without sequences."""
        return PackLayout(self.channels, self.pack) if self.pack else None

    @property
    def of_pairs(self) -> list[DatasetRequest]:
        """Return the request of each pair of ``crops.pairs``."""
        if not self.crops:
            return []
        height, width = (side // n for side, n in zip(self.size, self.crops.grid, strict=True))
        requests = []
        for side, local in self.crops.pairs:
            grid, local_size = (side // height, side // width), (local, local)
            crops = replace(self.crops, local_size=local_size, grid=grid, pairs=())
            requests.append(replace(self, size=(side, side), crops=crops))
        return requests

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the required splits."""
        return ("train", "val") if self.with_train else ("val",)

    def find_splits(self, find: Callable[[str], Result]) -> dict[str, Result]:
        """Call ``find`` for each required split; return the results by split.

        A split for which ``find`` raises MissingSplitError is left out if it is optional.
        """
        results = {}
        for name in self.splits:
            try:
                results[name] = find(name)
            except MissingSplitError:
                if self.labels or not results:
                    raise
        return results

    def check_classes(self, count: int, where: str) -> None:
        """Raise DataFolderError if ``where`` has more classes than the model."""
        if self.labels and count > self.num_classes:
            raise DataFolderError(
                f"{where} has {count} classes, but --num_classes is {self.num_classes}"
            )


ANY_CLASSES = 2**31
"""A number of classes that is always enough: labels are int32."""


def open_data(request: DatasetRequest) -> DataSource:
    """Open the source selected by ``--data_source``. Raises DataFolderError if it is unusable."""
    kind = request.config.data_source
    if request.crops and (len(request.size) != 2 or kind in GIVE_FLOATS):
        raise DataFolderError(
            f"--objective dino requires photographs to crop, and --data_source {kind} provides "
            "arrays"
        )
    if request.pack:
        _check_pack(request, request.pack)
    layouts = {pair.layout for pair in request.of_pairs if pair.layout}
    if len({layout.length for layout in layouts}) < len(layouts):
        raise DataFolderError(
            "two pairs of --crop_sizes have the same number of pixels and patches, which are "
            "used to tell batches apart: change one of them"
        )
    if request.config.num_workers != 0:
        loader.prepare_sockets()
    module, _, name = OPENED_BY[kind].partition(":")
    source: DataSource = getattr(import_module(module), name)(request)
    drops_last = request.with_train and request.augment
    count, what = source.train_length, "training images"
    if request.pack and request.with_train:
        count, what = source.splits["train"].sequences, "sequences of training images"
    if drops_last and count < request.config.batch_size:
        raise DataFolderError(
            f"{source.name} has {count} {what}, fewer than one batch: use --batch_size {count} or "
            "less"
        )
    return source


def check_several_classes(source: DataSource) -> None:
    """Raise DataFolderError if the images from which classes are learned have only one, or the
    model has: its accuracy would be 100 %, whatever it has learned."""
    split = next(iter(source.splits.values()))
    request, labels = split.request, np.asarray(split.labels)
    if not request.labels or request.config.data_source == "fake":  # nothing is learned
        return
    if split.name != "train":
        if request.num_classes == 1:
            raise DataFolderError(
                "a model with --num_classes 1 has an accuracy of 100 % on any images: evaluate a "
                "model with at least two classes"
            )
        return
    if labels.min() != labels.max():
        return
    name = split.classes[labels[0]] if split.classes else labels[0]
    folder = os.path.join(source.name, "train", str(name), "")
    last = split.name_of(len(split) - 1)  # images in subfolders are last
    if last.startswith(folder) and "/" in last.removeprefix(folder):
        raise DataFolderError(
            f"{folder[:-1]} is the only class folder and contains folders: move these to "
            f"{os.path.dirname(folder[:-1])}, which must contain a folder for each class"
        )
    raise DataFolderError(
        f"{source.name}: all {len(split):,} training images have the same label, {name}: "
        "classification, k-NN and probes require at least two classes (--objective mae or dino, "
        "and --rank, require none)"
    )


def _check_pack(request: DatasetRequest, pack: PackRequest) -> None:
    """Raise DataFolderError if these sequences are impossible."""
    kind = request.config.data_source
    if request.crops:
        raise DataFolderError(
            "native resolution packs whole images, and cannot be combined with crops of one size"
        )
    if len(request.size) != 2 or kind in GIVE_FLOATS:
        raise DataFolderError(
            f"native resolution requires photographs, and --data_source {kind} provides arrays"
        )
    least = pack.prefix + 1
    if pack.tokens < least:
        raise DataFolderError(
            f"a sequence of {pack.tokens} tokens is too short for an image: one patch plus "
            f"{pack.prefix} class and register tokens need {least} tokens"
        )


# -- one split: train or val -----------------------------------------------------------


class Split(Dataset):
    """One split (train or val): a map-style dataset of ``Sample``, indexed by a ``Key``. A broken
    image is replaced by another image in training, and by ignored padding in validation."""

    dtype = torch.uint8
    """Dtype of the images: uint8, or fp32 if they are already normalized."""
    reads_rows = False
    """Whether a subset of an image's rows can be read without the others."""
    sequences = 0
    """Number of image sequences in the first epoch; 0: images are not packed into sequences."""
    returns_index = False
    """Whether an image is returned with its number instead of its label."""

    def __init__(
        self,
        request: DatasetRequest,
        name: str,
        labels: Sequence[int] | np.ndarray,
        classes: list[str] | None = None,
        left_out: Counter[str] | None = None,
    ) -> None:
        """``labels``: of the images, in order. ``classes``: class names by label, if known.
        ``left_out``: number of files that are not images, by extension."""
        if not request.labels:
            labels, classes = np.broadcast_to(np.int32(0), len(labels)), None
        self.request, self.name, self.labels, self.classes = request, name, labels, classes
        self.left_out = left_out or Counter[str]()
        self.seed, self.is_train = request.seed, name == "train" and request.augment
        """``is_train``: images are shuffled, augmented, and replaced if broken."""
        self.shape: tuple[int, ...] = request.shape
        """Shape of the result of ``load_sample``."""
        self.label_shape: tuple[int, ...] = ()
        """Shape of the label of one item."""
        if self.is_train and request.layout:
            self.shape = (request.layout.length,)
        self.rows, self.partial_rows = range(request.size[0]), False
        """The rows of each image to return; without ``reads_rows``, ``load_sample`` returns all
        rows."""
        self.resized: list[Split] = []
        """The same images in several sizes, such as buckets or pairs of crop sizes; a key then ends
        with the index into this list."""

    def name_of(self, number: int) -> str:
        """Return a description of image ``number`` for users, usually its path."""
        return f"{self.name} image {number}"

    def load_sample(self, number: int, epoch: int, index: int) -> torch.Tensor:
        """Return image ``number`` as the model sees it, as a replacement for image ``index``.

        Random draws depend only on the seed, the epoch and ``index``. Raises BrokenImageError.
        """
        raise NotImplementedError

    def digest(self) -> str:
        """Return a checksum that identifies the split's images and their order."""
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: loader.Key) -> loader.Sample:
        epoch, index, *in_size = key
        if in_size:
            return self.resized[in_size[0]][epoch, index]
        image, label, bad = self.readable(
            epoch, index, lambda number: self.load_sample(number, epoch, index)
        )
        if image is None:
            return torch.zeros(self.shape, dtype=self.dtype), label, bad
        if self.partial_rows and not self.reads_rows:
            image = image[:, self.rows.start : self.rows.stop]
        return image, label, bad

    def readable(
        self, epoch: int, index: int, load: Callable[[int], torch.Tensor]
    ) -> tuple[torch.Tensor | None, int, list[loader.BadImage]]:
        """Return the result of ``load_sample``, the image's label, and the unreadable images. In
        training, an unreadable image ``index`` is replaced by the first readable substitute; in
        validation, and for padding, the result is (None, PADDING). Raises DataFolderError if too
        many images are unreadable."""
        bad: list[loader.BadImage] = []
        if index == loader.PADDING:
            return None, loader.PADDING, bad
        for attempt in range(1 + ATTEMPTS if self.is_train else 1):
            number = index
            if attempt:
                number = substitute(self.seed, epoch, index, attempt, len(self))
            try:
                label = number if self.returns_index else int(self.labels[number])
                return load(number), label, bad
            except BrokenImageError as error:
                name = printable(self.name_of(number))
                bad.append((name, str(error), int(self.labels[number])))
        if self.is_train:
            name, reason, _ = bad[0]
            raise DataFolderError(
                f"{name} cannot be read ({reason}), and neither can {ATTEMPTS} images tried in "
                "its place"
            )
        return None, loader.PADDING, bad

    def numbered(self) -> Self:
        """Return a copy whose items have the image's number instead of its label."""
        part = copy.copy(self)
        part.returns_index = True
        return part

    def with_request(self, request: DatasetRequest) -> Self:
        """Return the same images for another request; for photographs only."""
        raise NotImplementedError

    def sampler(self, batch_size: int, **how: Any) -> loader.GlobalBatchSampler:
        """Return the sampler, which determines the order of the images."""
        return loader.GlobalBatchSampler(len(self), batch_size, **how)

    def batches(
        self, batch_size: int, shard: loader.BatchShard, sizes: SizeSchedule | None = None
    ) -> loader.BatchLoader:
        """Return the loader for this ``shard`` of each global batch. Training images are shuffled.
        Validation images come once, in order, with padding in the last batch. ``sizes``: the image
        size of each step; None: all images have the request's size."""
        config, dataset = self.request.config, copy.copy(self)
        if shard.rows is not None:
            dataset.rows, dataset.partial_rows = shard.rows, True
            dataset.shape = shard.shape_of(batch_size, self.shape)[1:]
        sampler = self.sampler(
            batch_size,
            shuffle=self.is_train,
            seed=self.seed,
            shard=shard.index,
            shards=shard.count,
            repeats=config.aug_repeats if self.is_train else 1,
        )
        pairs = self.request.of_pairs if self.is_train else []
        if sizes:
            requests = (
                replace(self.request, size=(side, side), config=sizes.config_of(config, side))
                for side in sizes.sides
            )
            dataset.resized = [self.with_request(request) for request in requests]
            sampler.size_of = lambda epoch, batch: sizes.number(epoch * len(sampler) + batch)
        elif pairs:
            dataset.resized = [self.with_request(pair) for pair in pairs]
            sampler.size_of = functools.partial(_drawn_pair, self.seed, len(pairs))
        if not shard.loads:
            images = torch.zeros(shard.shape_of(batch_size, self.shape), dtype=self.dtype)
            labels = torch.zeros((0, *self.label_shape), dtype=torch.int64)
            return loader.ConstantLoader(len(sampler), (images, labels))
        workers = self._workers(shard)
        if not self.is_train:
            workers = min(workers, len(sampler))
        return loader.DatasetLoader(dataset, sampler, workers)

    def batches_of(
        self, numbers: Sequence[int], batch_size: int, shard: loader.BatchShard
    ) -> loader.BatchLoader:
        """Return a loader for these images, in this order, without loader processes if they fit one
        batch. Does not support shares with a subset of rows."""
        sampler = loader.GlobalBatchSampler(
            len(numbers),
            batch_size,
            shuffle=False,
            shard=shard.index,
            shards=shard.count,
            numbers=numbers,
        )
        workers = self._workers(shard) if len(sampler) > 1 else 0
        return loader.DatasetLoader(self, sampler, min(workers, len(sampler)))

    def _workers(self, shard: loader.BatchShard) -> int:
        """Return the number of loader processes per training process."""
        workers = self.request.config.num_workers
        return loader.default_workers(shard.of_host) if workers is None else workers

    def facts(self) -> dict[str, Any]:
        """Return what identifies the images and, besides flags, determines their order, by readable
        names."""
        is_train = self.name == "train"
        kind = "training" if is_train else "validation"
        labels = np.ascontiguousarray(self.labels, np.int64).data
        return {
            f"the number of {kind} images": len(self),
            FILES if is_train else "the names or order of the files in val/": self.digest(),
            f"the checksum of the {kind} images' labels": xxhash.xxh3_64_hexdigest(labels),
        }


def _drawn_pair(seed: int, pairs: int, epoch: int, batch: int) -> int:
    """Return the index of the pair of crop sizes that a batch uses."""
    return random.Random(f"{seed} crop sizes {epoch} {batch}").randrange(pairs)


ATTEMPTS = 10
"""Number of substitutes tried for a broken image before the run ends."""


def substitute(seed: int, epoch: int, index: int, attempt: int, length: int) -> int:
    """Return the ``attempt``-th (from 1) substitute for image ``index``. It depends only on the
    arguments, so it is the same for any number of processes and after a resume."""
    state = np.random.SeedSequence((seed, epoch, index, attempt)).generate_state(1, np.uint64)
    return (index + 1 + int(state[0]) % max(length - 1, 1)) % length


# -- a source --------------------------------------------------------------------------


class DataSource:
    """Images for training and validation, indexed but not loaded: one or two splits."""

    def __init__(self, name: str, splits: Mapping[str, Split], remark: str = "") -> None:
        """``splits``: by name; without labels "val" may be missing. ``remark``: text appended to
        the source's log line."""
        self.name, self.splits, self._remark = name, splits, remark
        one = next(iter(splits.values()))
        self.classes, self.reads_rows = one.classes, one.reads_rows
        self.train_length, self.val_length = (
            len(splits.get(name, ())) for name in ("train", "val")
        )

    def train_loader(
        self, batch_size: int, shard: loader.BatchShard, sizes: SizeSchedule | None = None
    ) -> loader.BatchLoader:
        """Return the loader of training images; see ``Split.batches``."""
        return self.splits["train"].batches(batch_size, shard, sizes)

    def steps_of_epoch(self, batch_size: int) -> int:
        """Return the number of global batches of training images per epoch."""
        return len(self.train_loader(batch_size, loader.BatchShard(loads=False)))

    def val_loader(self, batch_size: int, shard: loader.BatchShard) -> loader.BatchLoader:
        """Return the loader of validation images. Raises KeyError if there are none (``val_length``
        is 0)."""
        return self.splits["val"].batches(batch_size, shard)

    def order(self) -> dict[str, Any]:
        """Return what determines, besides flags, the order of the training images."""
        return self.splits["train"].facts() if "train" in self.splits else {}

    def fingerprint(self) -> dict[str, Any]:
        """Return the facts about the images that must be the same on all processes of a run."""
        # Classes come before checksums because they are more informative in an error message.
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
            kinds = first_of([f"{kind} {count:,}" for kind, count in left_out.most_common()])
            files = "file" if left_out.total() == 1 else "files"
            text += f"; {left_out.total():,} {files} left out ({printable(kinds)})"
        request = next(iter(self.splits.values())).request
        if (
            request.labels
            and self.classes
            and len(self.classes) < request.num_classes < ANY_CLASSES
        ):
            outputs = f"{request.num_classes:,} outputs (--num_classes)"
            classes = "class" if len(self.classes) == 1 else "classes"
            text += f"; warning: {len(self.classes):,} {classes}, but the model has {outputs}"
        return text + self._remark
