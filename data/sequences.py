"""Splits of packed sequences: images of any size, several of which share a sequence of tokens.

``data/packing.py`` decides which images make up a sequence. This module reads them, resizes them to
their patch grids, and writes them into the sequence's row of bytes.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from data.decode import OpenImage, open_image
from data.files import BrokenImageError
from data.loader import (
    PADDING,
    BadImage,
    BatchLoader,
    BatchShard,
    DatasetLoader,
    GlobalBatchSampler,
    Key,
    Sample,
)
from data.packing import (
    WINDOW,
    Packing,
    PackSampler,
    grids,
    kept_patches,
    pack_images,
    patch_coord_of,
    patches_of,
    too_large,
)
from data.sizes import image_sizes
from data.source import DatasetRequest, DataSource, Split
from data.transforms import ImageSplit, SizedTransform, Transform, seeded, sized_transforms_of


def in_sequences(
    request: DatasetRequest, name: str, splits: Mapping[str, ImageSplit]
) -> DataSource:
    """Return the source of packed sequences of these splits."""
    transforms = sized_transforms_of(request)
    packed = {
        split: PackedSplit(request, images, transforms[split]) for split, images in splits.items()
    }
    return DataSource(name, packed, _remark(list(packed.values())))


class PackedSplit(Split):
    """One split as sequences: a dataset indexed by (epoch, images in the global batch, image index,
    image index, ...), returning packed sequences and the labels of their images. A broken image is
    replaced by another image, resized to the same grid, in training, and by padding in validation.

    Segments are numbered along a sequence and followed by padding, except for broken images:
    attention on TPUs (``xla_fsdp.attention.whole.windows``) is correct in any order, but fast in
    this one.
    """

    def __init__(
        self, request: DatasetRequest, split: ImageSplit, transform: SizedTransform
    ) -> None:
        """Determine the size of each image of ``split``, and pack the first epoch."""
        super().__init__(request, split.name, split.labels, split.classes, split.left_out)
        assert request.pack
        assert request.pack_layout
        self.pack, self._layout = request.pack, request.pack_layout
        self.shape, self.label_shape = (self._layout.length,), (self.pack.images,)
        self._split, self._transform = split, transform
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
        self.sequences = len(self.pack_epoch(0))

    def name_of(self, number: int) -> str:
        return self._split.name_of(number)

    def digest(self) -> str:
        return self._split.digest()

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
        # Each image occurs once per epoch, and all sequences have the same size.
        how = {name: value for name, value in how.items() if name not in ("repeats", "pairs")}
        sampler = PackSampler(self.pack_epoch, self.sequences, batch_size, **how)
        sampler.read_together = -(-self._together * self.sequences // len(self))
        return sampler

    def batches_of(self, numbers: Sequence[int], batch_size: int, shard: BatchShard) -> BatchLoader:
        images = np.array(numbers)
        packing = pack_images(images, self._tokens(self.grids_of(images, 0)), self.pack)
        how = {"shuffle": False, "shard": shard.index, "shards": shard.count}
        sampler = PackSampler(lambda _epoch: packing, len(packing), batch_size, **how)
        workers = self._workers(shard) if len(sampler) > 1 else 0
        return DatasetLoader(self, sampler, min(workers, len(sampler)))

    # -- a sequence ---------------------------------------------------------------------

    def __getitems__(self, keys: list[Key]) -> list[Sample]:
        """Return several sequences. Their images are read in storage order, because a table reads a
        whole row group whenever the group changes."""
        if self._together > 1:
            for number in sorted({number for key in keys for number in key[2:]}):
                try:
                    self._encoded[number] = self._split.read(number)
                except BrokenImageError as error:
                    self._encoded[number] = error
        samples = [self[key] for key in keys]
        self._encoded.clear()
        return samples

    def __getitem__(self, key: Key) -> Sample:
        epoch, images_in_batch, *indices = key
        row, tokens, prefix = self._layout.empty(), self.pack.tokens, self.pack.prefix
        patches = self._layout.patches_in(row)
        patch_coord, segments = np.zeros((tokens, 4), np.int32), np.zeros(tokens, np.uint8)
        labels, bad = [PADDING] * self.pack.images, list[BadImage]()
        of_grids, end = self.grids_of(indices, epoch), 0
        counts = self._tokens(of_grids).tolist()
        for image, (index, grid) in enumerate(zip(indices, of_grids.tolist(), strict=True)):
            first, end = end, end + counts[image]
            make = functools.partial(self._patches, epoch=epoch, index=index, grid=grid)
            values, labels[image], unreadable = self.readable(epoch, index, make)
            bad += unreadable
            if values is None:
                continue
            of_image, written = patch_coord_of(*grid, prefix), patches[first + prefix : end]
            if end - first == len(of_image):
                written.view(values.shape).copy_(values)
            else:
                kept = self._kept(epoch, index, math.prod(grid), len(written))
                written.copy_(values.flatten(2).flatten(0, 1)[kept])
                of_image = np.concatenate([of_image[:prefix], of_image[prefix:][kept]])
            patch_coord[first:end], segments[first:end] = of_image, image + 1
        self._layout.write_tokens(row, patch_coord, segments, images_in_batch)
        return row, labels, bad

    def _patches(self, number: int, epoch: int, index: int, grid: list[int]) -> torch.Tensor:
        """Return the patches of image ``number``, which replaces image ``index``, (rows, columns,
        patch height, patch width, channels). Raises BrokenImageError."""
        encoded = self._encoded.get(number)
        if isinstance(encoded, BrokenImageError):
            raise encoded
        if encoded is None:
            image = self._split.open(number, lines=True)
        else:
            image = open_image(encoded, lines=True)
        size = tuple(count * side for count, side in zip(grid, self.pack.patch, strict=True))
        resized = seeded(lambda image: self._transform(image, size), image, self.seed, epoch, index)
        return patches_of(resized, self.pack.patch)

    def _kept(self, epoch: int, index: int, patches: int, kept: int) -> np.ndarray:
        """Return the indices of the patches kept, (kept,), in order."""
        drawn = np.random.default_rng((self.seed, epoch, index)).permutation(patches)
        return np.sort(drawn[:kept])


def sequence_of_one(request: DatasetRequest) -> Transform:
    """Return the transform from one image to a packed sequence, as in validation."""
    layout, pack, transform = request.pack_layout, request.pack, sized_transforms_of(request)["val"]
    assert layout
    assert pack

    def sequence(image: OpenImage) -> torch.Tensor:
        ((rows, columns),) = grids(np.array([image.size]), pack).tolist()
        of_image, row = patch_coord_of(rows, columns, pack.prefix), layout.empty()
        values = patches_of(
            transform(image, (rows * pack.patch[0], columns * pack.patch[1])), pack.patch
        )
        layout.patches_in(row)[pack.prefix : len(of_image)] = values.reshape(rows * columns, -1)
        layout.write_tokens(row, *layout.tokens_of([of_image]), 1)
        return row

    return sequence


def _remark(splits: Sequence[PackedSplit]) -> str:
    """Return the end of the source's log line."""
    request = splits[0].pack
    counts = " + ".join(f"{split.sequences:,}" for split in splits)
    means = " + ".join(f"{len(split) / split.sequences:.1f}" for split in splits)
    shares = " + ".join(
        f"{100 * split.tokens / (split.sequences * request.tokens):.1f}" for split in splits
    )
    scaled = "all images scaled"
    if not request.resize:
        numbers = " + ".join(f"{too_large(split.sizes, request):,}" for split in splits)
        scaled = f"{numbers} images scaled down"
    return (
        f"; packed into sequences of {request.tokens:,} tokens: {counts} sequences with {means} "
        f"images each, {shares} % of tokens used; {scaled} to {request.most_patches:,} patches"
    )
