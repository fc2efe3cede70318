"""Splits of packed sequences: images of any size, several of which share a sequence of tokens.

``packing.py`` decides which images make up a sequence. This module reads them, resizes them to
their patch grids, and writes their patches into the sequence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import xxhash
from torchvision.transforms import v2

from data.batch import PADDING, BadImage, Batch, BatchShard, Field, Fields, Sample
from data.config import GIVE_FLOATS
from data.decode import OpenImage, open_image
from data.fake import Zeros
from data.files import BrokenImageError, DataFolderError
from data.images import (
    ArrangedView,
    ImageSplit,
    RearrangedSplit,
    SampleTransform,
    reading_of,
)
from data.loader import BatchLoader, DatasetLoader, GlobalBatchSampler
from data.sizes import image_sizes
from data.source import Constant, DatasetRequest, DataSource, Split
from data.transforms import SizedTransform, TrainTransform, seeded, whole_image
from features.native_resolution.packing import (
    NUMBERS,
    WINDOW,
    Packing,
    PackRequest,
    PackSampler,
    SequenceIndex,
    grids,
    kept_patches,
    pack_images,
    patch_coord_of,
    patches_of,
    tokens_of,
    too_large,
)

_OF_IMAGE = ("image", "target", "index")
"""Fields of a view of single images that sequences have in another form."""


@dataclass(frozen=True)
class SequenceView(ArrangedView):
    """Sequences of tokens, each with one or several whole images, in training and validation.

    Fields: ``patches`` (tokens, values of a patch), uint8, values by row, column and channel, as in
    timm's NaFlexVit; ``patch_coord`` (tokens, 4), int32: row and column of the patch, rows and
    columns of its image, for class and register tokens the token's number, then zeros;
    ``segment_ids`` (tokens,), int32: the number of the token's image in the sequence, from 1 on, 0
    for padding; ``batch_images`` (), fp32: the number of images in the global batch; ``target`` and
    ``index`` (images,) for the sequence's images; other fields of ``view``, such as texts, likewise
    (images, ...), and as in padding where there is no image.
    """

    pack: PackRequest

    @property
    def images_per_sample(self) -> int:  # type: ignore[override]
        largest = self.pack.prefix + self.pack.most_patches
        return min(self.pack.tokens // largest, self.pack.images)

    def check(self, request: DatasetRequest) -> None:
        super().check(request)
        kind, pack = request.config.data_source, self.pack
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

    def fields(
        self, request: DatasetRequest, image_dtype: torch.dtype, *, is_train: bool
    ) -> dict[str, Field]:
        tokens, values = self.pack.tokens, math.prod(self.pack.patch) * request.channels
        of_one = super().fields(request, image_dtype, is_train=is_train)
        return {
            "patches": Field((tokens, values), torch.uint8),
            "patch_coord": Field((tokens, NUMBERS), torch.int32),
            "segment_ids": Field((tokens,), torch.int32),
            "batch_images": Field((), torch.float32),
            **self.number_fields(request, is_train=is_train, shape=(self.pack.images,)),
            **{
                name: replace(each, shape=(self.pack.images, *each.shape))
                for name, each in of_one.items()
                if name not in _OF_IMAGE
            },
        }

    def transforms(self, request: DatasetRequest) -> dict[str, SampleTransform]:
        """Return the transforms to a sequence of one image."""
        one = functools.partial(_sequence_of_one, self.pack, self.sized_transforms(request)["val"])
        return dict.fromkeys(request.splits, one)

    def sized_transforms(self, request: DatasetRequest) -> dict[str, SizedTransform]:
        """Return the transform of each split of the request for any output size. Raises
        DataFolderError, see ``TrainTransform``."""
        config, channels = request.config, request.channels
        mode = v2.InterpolationMode(config.preprocessing.interpolation_of_val)
        whole = functools.partial(whole_image, mode, channels)
        if not (request.with_train and request.augment):
            return dict.fromkeys(request.splits, whole)
        return {"train": TrainTransform(config, request.size, channels).in_shape, "val": whole}

    def arrange(
        self, request: DatasetRequest, name: str, splits: Mapping[str, ImageSplit]
    ) -> DataSource:
        transforms = self.sized_transforms(request)
        packed = {
            split: PackedSplit(request, images, transforms[split], self.pack)
            for split, images in splits.items()
        }
        return DataSource(name, packed, _remark(list(packed.values())))

    def zeros(self, request: DatasetRequest, name: str) -> Split:
        return ZerosInSequences(request, name, self.pack)

    def noise(
        self, request: DatasetRequest, fields: Fields, number: int, generator: torch.Generator
    ) -> Batch:
        """Return images of different grids, with room for one more image and some padding."""
        images, prefix = max(self.pack.images - 1, 1), self.pack.prefix
        side = max(math.isqrt((self.pack.tokens - 1) // images - prefix), 1)
        columns = 1 + (number // side) % side
        of_images = [
            patch_coord_of(1 + (number + image) % side, columns, prefix) for image in range(images)
        ]
        patch_coord, segment_ids = map(torch.from_numpy, tokens_of(of_images, self.pack))
        sample = super().noise(request, fields, number, generator) | {
            "patch_coord": patch_coord,
            "segment_ids": segment_ids,
            "batch_images": torch.tensor(float(request.config.batch_size * images)),
        }
        if "target" in fields:
            sample["target"] = fields["target"].full()
            sample["target"][:images] = 0
        return sample

    def model_input(
        self, mean: torch.Tensor, std: torch.Tensor, spatial: int, constant: Constant
    ) -> Callable[[Batch], Any]:
        """Return the function to the input of a model of native resolution: ``patches``,
        normalized, ``patch_coord`` and ``segment_ids``, and what ``view`` adds."""
        pixels = math.prod(self.pack.patch)
        scale, offset = (constant(x.repeat(pixels)) for x in (1 / (255 * std), -mean / std))

        def normalize(batch: Batch) -> Any:
            patches = batch["patches"].float() * scale + offset
            packed = {
                "patches": patches,
                "patch_coord": batch["patch_coord"],
                "segment_ids": batch["segment_ids"],
            }
            return self.with_others(packed, batch)

        return normalize


class PackedSplit(RearrangedSplit):
    """One split as sequences: a dataset indexed by ``SequenceIndex``. A broken image is replaced by
    another image, resized to the same grid, in training, and by padding in validation.

    Segments are numbered along a sequence and followed by padding, except for broken images:
    attention on TPUs (``tpu_attention.whole.windows``) is correct in any order, but fast in
    this one.
    """

    samples_are = "sequences of training images"

    def __init__(
        self,
        request: DatasetRequest,
        split: ImageSplit,
        transform: SizedTransform,
        pack: PackRequest,
    ) -> None:
        """Determine the size of each image of ``split``, and pack the first epoch."""
        super().__init__(request, split)
        self.pack, self._transform = pack, transform
        self.sizes = image_sizes(split)
        """Height and width of each image in pixels, (images, 2), int32; 0 x 0 if unreadable."""
        self._grids = grids(self.sizes, self.pack)
        self._together = split.sampler(1, shuffle=self.is_train).read_together
        self._encoded: dict[int, bytes | BrokenImageError] = {}
        """Images of the sequences that are currently read together."""
        self._factors: tuple[int, np.ndarray] = (-1, np.ones(0))
        everything = np.arange(len(self))
        self.tokens = int(self._tokens(self.grids_of(everything, 0)).sum())
        """Total number of tokens of all images in the first epoch."""
        self._sequences = len(self.pack_epoch(0))

    @property
    def samples(self) -> int:
        """The number of sequences of the first epoch."""
        return self._sequences

    def facts(self) -> dict[str, Any]:
        of_grids, how = xxhash.xxh3_64_hexdigest(self._grids.data), self.pack
        low, high = how.side_scale
        # ``_grids`` does not show the grids of scaled images: the rule that chooses them is named.
        rule = "" if how.side_scale == (1, 1) else " (both sides break ties between grids)"
        return self._split.facts() | {
            f"the grids of patches of the images in {self.name}/": of_grids,
            f"the packing of the images in {self.name}/": (
                f"{how.tokens} tokens and at most {how.images} images a sequence, {how.prefix} "
                f"class and register tokens an image, sides times {low:g} to {high:g}{rule}, "
                f"{how.drop_rate:g} of the patches left out"
            ),
        }

    # -- which images are in a sequence ------------------------------------------------

    def grids_of(self, numbers: Sequence[int] | np.ndarray, epoch: int) -> np.ndarray:
        """Return the rows and columns of patches of these images in an epoch, (n, 2), int32."""
        if not self.is_train or self.pack.side_scale == (1, 1):
            return self._grids[numbers]
        return grids(self.sizes[numbers], self.pack, self._side_factors(epoch)[numbers])

    def _side_factors(self, epoch: int) -> np.ndarray:
        """Return the scale factor of each image's sides in an epoch, (images,), fp64."""
        if self._factors[0] != epoch:
            generator = np.random.default_rng((self.seed, epoch))
            self._factors = epoch, generator.uniform(*self.pack.side_scale, len(self))
        return self._factors[1]

    def _tokens(self, of_grids: np.ndarray) -> np.ndarray:
        """Return the number of tokens of images with these grids, (n,)."""
        drop_rate = self.pack.drop_rate if self.is_train else 0
        return self.pack.prefix + kept_patches(of_grids[:, 0] * of_grids[:, 1], drop_rate)

    def pack_epoch(self, epoch: int) -> Packing:
        """Return the sequences of an epoch: training images in random order, others in order."""
        tokens = self._tokens(self.grids_of(np.arange(len(self)), epoch))
        if not self.is_train:
            return pack_images(np.arange(len(self)), tokens, self.pack)
        sampler = self._split.sampler(1, shuffle=True, seed=self.seed)
        sampler.set_position(epoch)
        generator = sampler.generator()
        order = sampler.shuffled(generator).numpy()
        # Images that are stored together are read together, see ``__getitems__``.
        window = self._together if self._together > 1 else WINDOW
        return pack_images(order, tokens[order], self.pack, generator, window)

    def sampler(self, batch_size: int, **how: Any) -> GlobalBatchSampler:
        sampler = PackSampler(self.pack_epoch, self.samples, batch_size, **how)
        sampler.read_together = -(-self._together * self.samples // len(self))
        return sampler

    def batches_of(self, numbers: Sequence[int], batch_size: int, shard: BatchShard) -> BatchLoader:
        images = np.array(numbers)
        packing = pack_images(images, self._tokens(self.grids_of(images, 0)), self.pack)
        how = {"shuffle": False, "shard": shard.index, "shards": shard.count}
        sampler = PackSampler(lambda _epoch: packing, len(packing), batch_size, **how)
        workers = self._workers(shard) if len(sampler) > 1 else 0
        return DatasetLoader(self, sampler, min(workers, len(sampler)))

    # -- a sequence ---------------------------------------------------------------------

    def __getitems__(self, indices: list[SequenceIndex]) -> list[Sample]:
        """Return several sequences. Their images are read in storage order, because a table reads a
        whole row group whenever the group changes."""
        if self._together > 1:
            for number in sorted({number for at in indices for number in at.images}):
                try:
                    self._encoded[number] = self._split.read(number)
                except BrokenImageError as error:
                    self._encoded[number] = error
        samples = [self[at] for at in indices]
        self._encoded.clear()
        return samples

    def __getitem__(self, at: SequenceIndex) -> Sample:  # type: ignore[override]
        epoch, indices = at.epoch, at.images
        sample = {name: field.full() for name, field in self.fields.items()}
        sample["batch_images"].fill_(at.batch_images)
        patches, prefix = sample["patches"], self.pack.prefix
        patch_coord, segment_ids = sample["patch_coord"].numpy(), sample["segment_ids"].numpy()
        of_grids, end, bad = self.grids_of(indices, epoch), 0, list[BadImage]()
        counts = self._tokens(of_grids).tolist()
        for image, (index, grid) in enumerate(zip(indices, of_grids.tolist(), strict=True)):
            first, end = end, end + counts[image]
            load = functools.partial(self._image, epoch=epoch, index=index, grid=grid)
            loaded, number, unreadable = self.readable(epoch, index, load)
            bad += unreadable
            if loaded is None:
                continue
            values, beside = loaded
            for name in beside.keys() & sample.keys():
                sample[name][image] = beside[name]
            for name, known in (("target", self.labels[number]), ("index", number)):
                if name in sample:
                    sample[name][image] = int(known)
            of_image, written = patch_coord_of(*grid, prefix), patches[first + prefix : end]
            if end - first == len(of_image):
                written.view(values.shape).copy_(values)
            else:
                kept = self._kept(epoch, index, math.prod(grid), len(written))
                written.copy_(values.flatten(2).flatten(0, 1)[kept])
                of_image = np.concatenate([of_image[:prefix], of_image[prefix:][kept]])
            patch_coord[first:end], segment_ids[first:end] = of_image, image + 1
        return Sample(sample, bad)

    def _image(
        self, number: int, epoch: int, index: int, grid: list[int]
    ) -> tuple[torch.Tensor, Batch]:
        """Return ``_patches`` and ``beside``. Raises BrokenImageError."""
        beside = self.beside(number, epoch, index)
        return self._patches(number, epoch, index, grid), beside

    def _patches(self, number: int, epoch: int, index: int, grid: list[int]) -> torch.Tensor:
        """Return the patches of image ``number``, which replaces image ``index``, (rows, columns,
        patch height, patch width, channels). Raises BrokenImageError."""
        encoded = self._encoded.get(number)
        if isinstance(encoded, BrokenImageError):
            raise encoded
        if encoded is None:
            image = self._split.open(number, lines=True)
        else:
            image = open_image(encoded, reading_of(self.request), lines=True)
        size = tuple(count * side for count, side in zip(grid, self.pack.patch, strict=True))
        resized = seeded(lambda image: self._transform(image, size), image, self.seed, epoch, index)
        return patches_of(resized, self.pack.patch)

    def _kept(self, epoch: int, index: int, patches: int, kept: int) -> np.ndarray:
        """Return the indices of the patches kept, (kept,), in order."""
        drawn = np.random.default_rng((self.seed, epoch, index)).permutation(patches)
        return np.sort(drawn[:kept])


def _sequence_of_one(pack: PackRequest, transform: SizedTransform, image: OpenImage) -> Batch:
    """Return the model's fields of a sequence with one image, as in validation."""
    ((rows, columns),) = grids(np.array([image.size]), pack).tolist()
    of_image = patch_coord_of(rows, columns, pack.prefix)
    values = patches_of(
        transform(image, (rows * pack.patch[0], columns * pack.patch[1])), pack.patch
    ).reshape(rows * columns, -1)
    patches = torch.zeros(pack.tokens, values.shape[1], dtype=torch.uint8)
    patches[pack.prefix : len(of_image)] = values
    patch_coord, segment_ids = map(torch.from_numpy, tokens_of([of_image], pack))
    return {"patches": patches, "patch_coord": patch_coord, "segment_ids": segment_ids}


def _remark(splits: Sequence[PackedSplit]) -> str:
    """Return the end of the source's log line."""
    request = splits[0].pack
    counts = " + ".join(f"{split.samples:,}" for split in splits)
    means = " + ".join(f"{len(split) / split.samples:.1f}" for split in splits)
    shares = " + ".join(
        f"{100 * split.tokens / (split.samples * request.tokens):.1f}" for split in splits
    )
    scaled = "all images scaled"
    if not request.resize:
        numbers = " + ".join(f"{too_large(split.sizes, request):,}" for split in splits)
        scaled = f"{numbers} images scaled down"
    return (
        f"; packed into sequences of {request.tokens:,} tokens: {counts} sequences with {means} "
        f"images each, {shares} % of tokens used; {scaled} to {request.most_patches:,} patches"
    )


class ZerosInSequences(Zeros):
    """Images of zeros in sequences, of which each has as many as have room."""

    samples_are = PackedSplit.samples_are

    def __init__(self, request: DatasetRequest, name: str, pack: PackRequest) -> None:
        super().__init__(request, name)
        self._pack, self._grid = pack, grids(np.array([request.size]), pack)[0]
        drop_rate = pack.drop_rate if self.is_train else 0
        self._patches = int(kept_patches(self._grid.prod(), drop_rate))
        self._images = min(pack.tokens // (pack.prefix + self._patches), pack.images)
        """How many images a full sequence has."""

    @property
    def samples(self) -> int:
        return len(self) // self._images

    def batch(self, images: int, batch_size: int, shard: BatchShard) -> Batch:
        """Return this shard of a global batch of so many images, in sequences from the first on."""
        batch = self.zeros(batch_size, shard)
        batch["batch_images"].fill_(images)
        tokens = [self._tokens(inside) for inside in range(self._images + 1)]
        count = len(batch["patches"])
        for number in range(count):
            before = (shard.index * count + number) * self._images
            inside = min(max(images - before, 0), self._images)
            for name, values in zip(("patch_coord", "segment_ids"), tokens[inside], strict=True):
                batch[name][number] = torch.from_numpy(values)
            if "index" in batch:
                batch["index"][number] = before + torch.arange(self._pack.images)
            for name in {"target", "index"} & batch.keys():
                batch[name][number, inside:] = PADDING
        return batch

    @property
    def images_per_sample(self) -> int:
        return self._images

    def _tokens(self, images: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ``tokens_of`` a sequence of so many images."""
        of_image = patch_coord_of(*self._grid.tolist(), self._pack.prefix)
        of_image = of_image[: self._pack.prefix + self._patches]
        return tokens_of([of_image] * images, self._pack)
