"""What a run requests from a source of images, and what it gets: a ``DataSource`` of ``Split``s.

A ``View`` says what is read of each sample. ``data/open.py`` opens the source selected by
``--data_source``, which defines how a ``Split`` finds its images and how it reads one of them.
"""

from __future__ import annotations

import copy
import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self, TypeVar

import numpy as np
import torch
import xxhash
from PIL import Image
from torch.utils.data import Dataset

from data import loader
from data.batch import (
    PADDING,
    BadImage,
    Batch,
    BatchShard,
    Field,
    Fields,
    Sample,
    SampleIndex,
)
from data.config import DataConfig
from data.files import (
    BrokenImageError,
    DataFolderError,
    MissingSplitError,
    first_of,
    printable,
)

Result = TypeVar("Result")
FILES = "the names or order of the files in train/"
"""The key in ``DataSource.order`` of the checksum that also depends on the storage location."""


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
    multi_label: bool = False
    """Whether an image may have several labels, or none: 0 and 1, (classes,)."""
    augment: bool = True
    """Whether training images are shuffled and augmented. Otherwise they are read like validation
    images: once, in order, skipping unreadable ones."""
    view: View = field(default_factory=lambda: View())
    """What is read of each image."""
    sampler: Callable[..., loader.GlobalBatchSampler] | None = None
    """What orders the training images: called with their labels and the arguments of
    ``Split.sampler``, in place of that; None: the split's own."""
    opened_by: Callable[[DatasetRequest], DataSource] | None = None
    """What opens the source; None: the function of ``OPENED_BY``."""
    flags: Any = None
    """The flags of the feature that adds the source; None for the program's own."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one image: channels, then spatial sizes."""
        return (self.channels, *self.size)

    def with_data(self, **changes: Any) -> Self:
        """Return the same request with these values changed in ``config``."""
        return replace(self, config=replace(self.config, **changes))

    @property
    def label_shape(self) -> tuple[int, ...]:
        """Return the shape of an image's label."""
        return (self.num_classes,) if self.multi_label and self.labels else ()

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

    def check_classes(self, count: int, where: str, names: Sequence[str] = ()) -> None:
        """Raise DataFolderError if ``where`` has more classes than the model."""
        if self.labels and count > self.num_classes:
            these = f" (classes: {printable(first_of(names))})" if names else ""
            raise DataFolderError(
                f"{where} has {count} classes, but --num_classes is {self.num_classes}: set "
                f"--num_classes {count}{these}"
            )


ANY_CLASSES = 2**31
"""A number of classes that is always enough: labels are int32."""


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
    if labels.ndim > 1 or labels.min() != labels.max():
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
        "classification, k-NN and probes require at least two classes (other values of "
        "--objective, and --rank, require none)"
    )


# -- what is read of a sample ---------------------------------------------------------


@dataclass(frozen=True)
class Value:
    """Where a value of a sample besides its image and its label is."""

    names: Sequence[str]
    """Names that it may have, of which the first that exists counts: of a column of a table; in a
    WebDataset, the extension of a file of the sample, else a field of its ``.json``."""
    flag: str
    """The flag that sets the name, for messages."""


NO_VALUES: Mapping[str, Value] = MappingProxyType({})


class View:
    """What is read of each sample: the field ``image``, in the model's size. A subclass reads
    something else. ``ImageView`` (``data/images.py``) also says how encoded images become that.
    Loader processes get a copy."""

    images_per_sample = 1
    """The number of images of a sample, if all of them are as large as they may be."""

    @property
    def values(self) -> Mapping[str, Value]:
        """The values of each sample besides its image and its label that are read, by name."""
        return NO_VALUES

    def fields_of(self, values: Mapping[str, Any], draw: Callable[[int], int]) -> Batch:
        """Return the fields of a sample that are made of its ``values``, as ``Split.value`` returns
        them. ``draw(n)`` returns a number below n: a random one of the epoch in training, 0 in
        validation. Raises BrokenImageError."""
        return {}

    def check(self, request: DatasetRequest) -> None:
        """Raise DataFolderError if the requested source cannot be read in this way."""

    def fields(
        self, request: DatasetRequest, image_dtype: torch.dtype, *, is_train: bool
    ) -> dict[str, Field]:
        """Return the fields of a sample. ``is_train``: of an augmented training image."""
        fields = {"image": Field(request.shape, image_dtype, rows=1)}
        return fields | self.number_fields(request, is_train=is_train)

    def number_fields(
        self, request: DatasetRequest, *, is_train: bool, shape: tuple[int, ...] = ()
    ) -> dict[str, Field]:
        """Return the fields for an image's label, if it has one or may be padding, and for its
        number, if images are read in order. ``shape``: of each."""
        number = Field(shape, torch.int64, padding=PADDING)
        fields = {}
        if request.labels or not is_train:
            fields["target"] = replace(number, shape=(*shape, *request.label_shape))
        return fields if is_train else fields | {"index": number}

    def zeros(self, request: DatasetRequest, name: str) -> Split | None:
        """Return a split of zeros for ``--fake_data``; None: zeros in each field."""
        return None

    def noise(
        self, request: DatasetRequest, fields: Fields, number: int, generator: torch.Generator
    ) -> Batch:
        """Return a random sample for ``--self_check``, besides its label; a view of several images
        has ``target``, 0 for each image."""
        sample: Batch = {}
        for name, each in fields.items():
            if each.dtype == torch.uint8:
                values = torch.randint(256, each.shape, generator=generator, dtype=torch.uint8)
            elif each.dtype.is_floating_point:
                values = torch.randn(each.shape, generator=generator, dtype=each.dtype)
            elif name in ("target", "index"):
                continue
            else:
                below = 2 if each.dtype == torch.bool else each.below
                values = torch.randint(below, each.shape, generator=generator).to(each.dtype)
            sample[name] = values
        return sample

    def sizes(self, request: DatasetRequest, steps: int) -> BatchSizes | None:
        """Return the sizes of training batches if there are several. ``steps``: the number of
        batches of the whole training."""
        return None

    def pictures(
        self, request: DatasetRequest, numbers: Sequence[int]
    ) -> Sequence[Pictures] | None:
        """Return pictures of these training images of a request of 2-D images, as the model is
        shown them; None: of the field ``image``, with its label. Raises DataFolderError."""
        return None

    def model_input(
        self, mean: torch.Tensor, std: torch.Tensor, spatial: int, constant: Constant
    ) -> Callable[[Batch], Any]:
        """Return the function from a batch on the devices to the model's input. ``spatial``: the
        number of spatial dimensions of an image; ``constant`` replicates a small tensor on every
        device."""
        normalize = image_normalizer(mean, std, spatial, constant)
        return lambda batch: self.with_others(normalize(batch["image"]), batch)

    def with_others(self, images: Any, batch: Batch) -> Any:
        """Return the model's input, given the part of it that is made of a batch's images: with
        what else the model takes; by default the images alone."""
        return images


@dataclass(frozen=True)
class Pictures:
    """Pictures of several images, one of each: a column of what tools/show_augmentations.py
    draws."""

    title: str
    images: torch.Tensor
    """(images, channels, height, width), from 0 to 1."""
    labels: Sequence[str]
    """What is written below each."""


Constant = Callable[[torch.Tensor], torch.Tensor]
"""Replicates a small CPU tensor on every device, as ``Backend.constant``."""


@dataclass(frozen=True)
class BatchSizes:
    """Several sizes of the samples of a training; each batch has one."""

    requests: Sequence[DatasetRequest]
    """What is requested of a sample, by size."""
    number: Callable[[int, int, int], int]
    """The size of a batch, an index into ``requests``: called with the epoch, the number of the
    batch in it, and the number of batches per epoch."""


def image_normalizer(
    mean: torch.Tensor, std: torch.Tensor, spatial: int, constant: Constant
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function (x / 255 - mean) / std, per channel, from uint8 images to fp32. Images in
    fp32 were normalized on reading, and are returned unchanged."""
    by_channel = (-1, *[1] * spatial)
    scale, offset = (constant(x.view(by_channel)) for x in (1 / (255 * std), -mean / std))

    def normalize(images: torch.Tensor) -> torch.Tensor:
        return images.float() * scale + offset if images.dtype == torch.uint8 else images

    return normalize


# -- one split: train or val -----------------------------------------------------------


class Split(Dataset):
    """One split (train or val): a map-style dataset of ``Sample``, indexed by ``SampleIndex``. A
    broken image is replaced by another image in training, and by ignored padding in validation."""

    dtype = torch.uint8
    """Dtype of the images: uint8, or fp32 if they are already normalized."""
    reads_rows = False
    """Whether a subset of an image's rows can be read without the others."""
    reading_threads = 1
    """Number of threads that may read images, or their values, concurrently."""
    samples_are = "training images"
    """What ``samples`` counts, for messages."""

    def __init__(
        self,
        request: DatasetRequest,
        name: str,
        labels: Sequence[int] | np.ndarray,
        classes: list[str] | None = None,
        left_out: Counter[str] | None = None,
    ) -> None:
        """``labels``: of the images, in order, (images, *label_shape). ``classes``: class names by
        label, if known. ``left_out``: number of files that are not images, by extension."""
        if not request.labels:
            labels, classes = np.broadcast_to(np.int32(0), len(labels)), None
        self.request, self.name, self.labels, self.classes = request, name, labels, classes
        self.left_out = left_out or Counter[str]()
        self.seed, self.is_train = request.seed, name == "train" and request.augment
        """``is_train``: images are shuffled, augmented, and replaced if broken."""
        self.fields: Fields = request.view.fields(request, self.dtype, is_train=self.is_train)
        """What each sample consists of."""
        self.rows, self.partial_rows = range(request.size[0]), False
        """The rows of each image to return; without ``reads_rows``, ``load_sample`` returns all
        rows."""
        self.resized: list[Split] = []
        """The same images in several sizes, if a batch has one of them, by
        ``SampleIndex.size``."""

    @property
    def samples(self) -> int:
        """The number of samples of the first epoch."""
        return len(self)

    def name_of(self, number: int) -> str:
        """Return a description of image ``number`` for users, usually its path."""
        return f"{self.name} image {number}"

    def thumbnail(self, number: int, side: int) -> Image.Image:
        """Return a small RGB picture of image ``number``, at most ``side`` x ``side`` pixels; of a
        volume, its middle slice. Raises BrokenImageError, also for samples that are no images."""
        image = self.load_sample(number, 0, number).get("image")
        if image is None or image.dim() < 3:
            raise BrokenImageError("the sample is not an image")
        if image.is_floating_point():  # normalized on reading
            values = self.request.config.preprocessing.of_channels(len(image))
            mean, std = (torch.tensor(x).view(-1, *[1] * (image.dim() - 1)) for x in values)
            image = ((image * std + mean).clamp(0, 1) * 255).round().byte()
        while image.dim() > 3:
            image = image[:, image.shape[1] // 2]
        channels = image[:3] if len(image) >= 3 else image[:1].expand(3, -1, -1)
        picture = Image.fromarray(channels.permute(1, 2, 0).numpy())
        picture.thumbnail((side, side))
        return picture

    def load_sample(self, number: int, epoch: int, index: int) -> Batch:
        """Return the fields of image ``number``, besides its label and number, as a replacement for
        image ``index``.

        Random draws depend only on the seed, the epoch and ``index``. Raises BrokenImageError.
        """
        raise NotImplementedError(f"{type(self).__name__} must define load_sample()")

    def value(self, number: int, name: str) -> Any:
        """Return the value of image ``number`` with this name among those that the view reads
        (``View.values``), as it is stored: bytes, text, a number, a list; None if it has none.
        Raises BrokenImageError, and DataFolderError if the source has no such values."""
        raise DataFolderError(
            f"--data_source {self.request.config.data_source} has no {name} of an image: use "
            "another --data_source"
        )

    def digest(self) -> str:
        """Return a checksum that identifies the split's images and their order."""
        raise NotImplementedError(f"{type(self).__name__} must define digest()")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, at: SampleIndex) -> Sample:
        if self.resized:
            return self.resized[at.size][replace(at, size=0)]
        values, number, bad = self.readable(
            at.epoch, at.index, lambda number: self._load(number, at.epoch, at.index)
        )
        if values is None:
            return Sample({name: each.full() for name, each in self.fields.items()}, bad)
        if self.partial_rows and not self.reads_rows:
            for name, value in values.items():
                if (rows := self.fields[name].rows) is not None:
                    values[name] = value.narrow(rows, self.rows.start, len(self.rows))
        for name, known in (("target", self.labels[number]), ("index", number)):
            if name in self.fields:
                values[name] = torch.as_tensor(known).to(torch.int64)
        return Sample(self._declared(values, number), bad)

    def _load(self, number: int, epoch: int, index: int) -> Batch:
        """Return what ``load_sample`` does, and ``beside``."""
        beside = self.beside(number, epoch, index)
        return self.load_sample(number, epoch, index) | beside

    def beside(self, number: int, epoch: int, index: int) -> Batch:
        """Return the fields that the view makes of other values of image ``number`` than its
        pixels, as a replacement for image ``index``. Raises BrokenImageError."""
        view = self.request.view
        values = {name: self.value(number, name) for name in view.values}

        def draw(count: int) -> int:
            if not self.is_train or count == 1:
                return 0
            return int(np.random.default_rng((self.seed, epoch, index)).integers(count))

        return view.fields_of(values, draw) if values else {}

    def _declared(self, values: Batch, number: int) -> Batch:
        """Return the declared fields of image ``number``. Raises DataFolderError if one is missing
        or is not as declared: batches are allocated, sent and compiled as their fields are
        declared."""
        by = f"which {type(self.request.view).__name__}.fields declares"
        for name, each in self.fields.items():
            if name not in values:
                raise DataFolderError(
                    f"--data_source {self.request.config.data_source} does not read the field "
                    f"{name}, {by}: use another --data_source or --objective"
                )
            value = values[name]
            if not isinstance(value, torch.Tensor):
                raise DataFolderError(
                    f"{printable(self.name_of(number))}: its field {name} is a "
                    f"{type(value).__name__} and not a torch.Tensor"
                )
            if value.shape != each.shape or value.dtype != each.dtype:
                raise DataFolderError(
                    f"{printable(self.name_of(number))}: its field {name} is "
                    f"{_described(value.shape, value.dtype)} and not "
                    f"{_described(each.shape, each.dtype)}, {by}"
                )
        return {name: values[name] for name in self.fields}

    def readable(
        self, epoch: int, index: int, load: Callable[[int], Result]
    ) -> tuple[Result | None, int, list[BadImage]]:
        """Return the result of ``load``, the number of the image that it is of, and the unreadable
        images. In training, an unreadable image ``index`` is replaced by the first readable
        substitute; in validation, and for padding, the result is (None, PADDING). Raises
        DataFolderError if too many images are unreadable."""
        bad: list[BadImage] = []
        if index == PADDING:
            return None, PADDING, bad
        for attempt in range(1 + ATTEMPTS if self.is_train else 1):
            number = index
            if attempt:
                number = substitute(self.seed, epoch, index, attempt, len(self))
            try:
                return load(number), number, bad
            except BrokenImageError as error:
                name = printable(self.name_of(number))
                bad.append((name, str(error), number))
            except Exception as error:
                error.add_note(f"This is an error in reading {printable(self.name_of(number))}.")
                raise
        if self.is_train:
            name, reason, _ = bad[0]
            raise DataFolderError(
                f"{name} cannot be read ({reason}), and neither can {ATTEMPTS} images tried in "
                "its place"
            )
        return None, PADDING, bad

    def check_first_sample(self) -> None:
        """Read the first sample in this process. Raises DataFolderError if it is not as its fields
        are declared."""
        if len(self):
            next(iter(self.batches_of([0], 1, BatchShard()).epoch(0)), None)

    def with_index(self) -> Self:
        """Return a copy whose samples have the field ``index``, in training, too."""
        part = copy.copy(self)
        in_order = self.request.view.fields(self.request, self.dtype, is_train=False)
        part.fields = {**self.fields, "index": in_order["index"]}
        part.resized = [each.with_index() for each in self.resized]
        return part

    def with_request(self, request: DatasetRequest) -> Self:
        """Return the same images for another request, with the field ``index`` if it is here; for
        photographs only."""
        raise NotImplementedError

    def sampler(self, batch_size: int, **how: Any) -> loader.GlobalBatchSampler:
        """Return the sampler, which determines the order of the images."""
        return loader.GlobalBatchSampler(len(self), batch_size, **how)

    def batches(self, batch_size: int, shard: BatchShard, steps: int = 0) -> loader.BatchLoader:
        """Return the loader for this ``shard`` of each global batch. Training images are shuffled.
        Validation images come once, in order, with padding in the last batch. ``steps``: the number
        of batches of the whole training, which some views need to know."""
        config, dataset = self.request.config, copy.copy(self)
        if shard.rows is not None:
            dataset.rows, dataset.partial_rows = shard.rows, True
            dataset.fields = {
                name: replace(each, shape=shard.shape_of(batch_size, each)[1:])
                for name, each in self.fields.items()
            }
        order = self.sampler
        if self.is_train and self.request.sampler:
            order = functools.partial(self.request.sampler, self.labels)
        sampler = order(
            batch_size,
            shuffle=self.is_train,
            seed=self.seed,
            shard=shard.index,
            shards=shard.count,
            repeats=config.aug_repeats if self.is_train else 1,
        )
        if not shard.loads:
            batch = shard.empty(batch_size, self.fields)
            return loader.ConstantLoader(len(sampler), batch, self.fields)
        if sizes := self.request.view.sizes(self.request, steps) if self.is_train else None:
            dataset.resized = [self.with_request(request) for request in sizes.requests]
            sampler.size_of = lambda epoch, batch: sizes.number(epoch, batch, len(sampler))
        workers = self._workers(shard)
        if not self.is_train:
            workers = min(workers, len(sampler))
        return loader.DatasetLoader(dataset, sampler, workers)

    def batches_of(
        self, numbers: Sequence[int], batch_size: int, shard: BatchShard
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

    def _workers(self, shard: BatchShard) -> int:
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


def _described(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


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
        self.name, self.splits, self.remark = name, splits, remark
        one = next(iter(splits.values()))
        self.classes, self.reads_rows = one.classes, one.reads_rows
        self.train_length, self.val_length = (
            len(splits.get(name, ())) for name in ("train", "val")
        )

    @property
    def intensity(self) -> str | tuple[str, ...] | None:
        """The value of ``--intensity``, with the range that "auto" has chosen on opening."""
        return next(iter(self.splits.values())).request.config.intensity

    def train_loader(
        self, batch_size: int, shard: BatchShard, steps: int = 0
    ) -> loader.BatchLoader:
        """Return the loader of training images; see ``Split.batches``."""
        return self.splits["train"].batches(batch_size, shard, steps)

    def steps_of_epoch(self, batch_size: int) -> int:
        """Return the number of global batches of training images per epoch."""
        return len(self.train_loader(batch_size, BatchShard(loads=False)))

    def val_loader(self, batch_size: int, shard: BatchShard) -> loader.BatchLoader:
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
        return text + self.remark
