"""Images of any size, several of which share a sequence of tokens: a split of such sequences.

``data/packing.py`` decides which images make up a sequence. Here they are read, resized to their
own grids of patches, and written into the sequence's row of bytes.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from data.decode import OpenImage
from data.loader import (
    PADDING,
    BadImage,
    BatchLoader,
    DatasetLoader,
    GlobalBatchSampler,
    Key,
    Sample,
    Share,
)
from data.packing import (
    Packing,
    PackSampler,
    grids,
    kept_patches,
    pack,
    patches_of,
    places_of,
    too_large,
)
from data.sizes import image_sizes
from data.source import DatasetRequest, DataSource, Split
from data.transforms import ImageSplit, SizedTransform, Transform, seeded, sized_transforms_of


def in_sequences(
    request: DatasetRequest, name: str, splits: Mapping[str, ImageSplit]
) -> DataSource:
    """Return the source of the sequences of these splits."""
    transforms = sized_transforms_of(request)
    packed = {
        split: PackedSplit(request, images, transforms[split]) for split, images in splits.items()
    }
    return DataSource(name, packed, _remark(list(packed.values())))


class PackedSplit(Split):
    """One split as sequences: a dataset by (epoch, images in the global batch, image index, image
    index, ...), of packed sequences and the labels of their images. In training a broken image is
    replaced by another one, resized to the same grid; in validation its tokens are padding."""

    def __init__(
        self, request: DatasetRequest, split: ImageSplit, transform: SizedTransform
    ) -> None:
        """Find the size of each image of ``split``, and pack those of the first epoch."""
        super().__init__(request, split.name, split.labels, split.classes, split.left_out)
        assert request.pack
        assert request.pack_layout
        self.pack, self._layout = request.pack, request.pack_layout
        self.shape, self.label_shape = (self._layout.length,), (self.pack.images,)
        self._split, self._transform = split, transform
        self.sizes = image_sizes(split)
        """Height and width of each image in pixels, (images, 2), int32; 0 x 0 if unreadable."""
        self._factors: tuple[int, np.ndarray] = (-1, np.ones(0))
        everything = np.arange(len(self))
        self.tokens = int(self._tokens(self.grids(everything, 0)).sum())
        """The tokens of all images in the first epoch."""
        self.sequences = len(self.pack_epoch(0))

    def name_of(self, number: int) -> str:
        return self._split.name_of(number)

    def digest(self) -> str:
        return self._split.digest()

    def facts(self) -> dict[str, Any]:
        of_grids = xxhash.xxh3_64_hexdigest(grids(self.sizes, self.pack).data)
        return self._split.facts() | {
            f"the grids of patches of the images in {self.name}/": of_grids,
            f"the packing of the images in {self.name}/": str(self.pack),
        }

    # -- which images are in a sequence ------------------------------------------------

    def grids(self, numbers: Sequence[int] | np.ndarray, epoch: int) -> np.ndarray:
        """Return the rows and columns of patches of some images in an epoch, (n, 2), int32."""
        sizes = self.sizes[numbers]
        if self.is_train and self.pack.side_scale != (1, 1):
            sizes = sizes * self._side_factors(epoch)[numbers, None]
        return grids(sizes, self.pack)

    def _side_factors(self, epoch: int) -> np.ndarray:
        """Return by what the sides of each image are multiplied in an epoch, (images,), fp64."""
        if self._factors[0] != epoch:
            generator = np.random.default_rng((self.seed, epoch))
            self._factors = epoch, generator.uniform(*self.pack.side_scale, len(self))
        return self._factors[1]

    def _tokens(self, of_grids: np.ndarray) -> np.ndarray:
        """Return how many tokens images with these grids have, (n,)."""
        drop_rate = self.pack.drop_rate if self.is_train else 0
        return self.pack.prefix + kept_patches(of_grids[:, 0] * of_grids[:, 1], drop_rate)

    def pack_epoch(self, epoch: int) -> Packing:
        """Return the sequences of an epoch: of training images in random order, else in order."""
        tokens = self._tokens(self.grids(np.arange(len(self)), epoch))
        if not self.is_train:
            return pack(np.arange(len(self)), tokens, self.pack)
        sampler = self._split.sampler(1, shuffle=True, seed=self.seed)
        sampler.set_position(epoch)
        generator = sampler.generator()
        order = sampler.shuffled(generator).numpy()
        return pack(order, tokens[order], self.pack, generator)

    def sampler(self, batch_size: int, **how: Any) -> GlobalBatchSampler:
        how = {name: value for name, value in how.items() if name not in ("repeats", "pairs")}
        sampler = PackSampler(self.pack_epoch, self.sequences, batch_size, **how)
        images = self._split.sampler(1, shuffle=self.is_train).read_together
        sampler.read_together = -(-images * self.sequences // len(self))
        return sampler

    def batches_of(self, numbers: Sequence[int], batch_size: int, share: Share) -> BatchLoader:
        images = np.array(numbers)
        packing = pack(images, self._tokens(self.grids(images, 0)), self.pack)
        how = {"shuffle": False, "shard": share.shard, "shards": share.shards}
        sampler = PackSampler(lambda _epoch: packing, len(packing), batch_size, **how)
        workers = self._workers(share) if len(sampler) > 1 else 0
        return DatasetLoader(self, sampler, min(workers, len(sampler)))

    # -- a sequence ---------------------------------------------------------------------

    def __getitem__(self, key: Key) -> Sample:
        epoch, images_in_batch, *indices = key
        tokens, prefix = self.pack.tokens, self.pack.prefix
        patches = torch.zeros((tokens, self._layout.patch_bytes), dtype=torch.uint8)
        places = torch.zeros((tokens, 4), dtype=torch.int32)
        segments = torch.zeros(tokens, dtype=torch.uint8)
        labels, bad = [PADDING] * self.pack.images, list[BadImage]()
        of_grids, end = self.grids(indices, epoch), 0
        counts = self._tokens(of_grids).tolist()
        for image, (index, grid, count) in enumerate(
            zip(indices, of_grids.tolist(), counts, strict=True)
        ):
            make = functools.partial(self._patches, epoch=epoch, index=index, grid=grid)
            values, labels[image], unreadable = self.readable(epoch, index, make)
            bad += unreadable
            first, end = end, end + count
            if values is None:
                continue
            chosen = self._chosen(epoch, index, len(values), count - prefix)
            patches[first + prefix : end] = values[chosen]
            places[first:end] = places_of(grid, prefix, chosen)
            segments[first:end] = image + 1
        return self._layout.pack(patches, places, segments, images_in_batch), labels, bad

    def _patches(self, number: int, epoch: int, index: int, grid: list[int]) -> torch.Tensor:
        """Return the patches of the image ``number`` in place of ``index``, (rows * columns,
        bytes). Raises BrokenImageError."""
        image = self._split.open(number, lines=True)
        size = tuple(count * side for count, side in zip(grid, self.pack.patch, strict=True))
        resized = seeded(lambda image: self._transform(image, size), image, self.seed, epoch, index)
        return patches_of(resized, self.pack.patch)

    def _chosen(self, epoch: int, index: int, patches: int, kept: int) -> torch.Tensor:
        """Return which patches of an image are kept, in their order."""
        if kept == patches:
            return torch.arange(patches)
        drawn = np.random.default_rng((self.seed, epoch, index)).permutation(patches)[:kept]
        return torch.from_numpy(np.sort(drawn))


def sequence_of_one(request: DatasetRequest) -> Transform:
    """Return what makes the packed sequence of one image, as validation sees it."""
    layout, pack, transform = request.pack_layout, request.pack, sized_transforms_of(request)["val"]
    assert layout
    assert pack

    def sequence(image: OpenImage) -> torch.Tensor:
        (grid,) = grids(np.array([image.size]), pack).tolist()
        size = tuple(count * side for count, side in zip(grid, pack.patch, strict=True))
        values = patches_of(transform(image, size), pack.patch)
        count = pack.prefix + len(values)
        patches = torch.zeros((pack.tokens, layout.patch_bytes), dtype=torch.uint8)
        places = torch.zeros((pack.tokens, 4), dtype=torch.int32)
        patches[pack.prefix : count] = values
        places[:count] = places_of(grid, pack.prefix, torch.arange(len(values)))
        return layout.pack(patches, places, torch.arange(pack.tokens) < count, 1)

    return sequence


def _remark(splits: Sequence[PackedSplit]) -> str:
    """Return the end of the source's line in the log."""
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
        f"; in sequences of {request.tokens:,} tokens: {counts}, of {means} images, {shares} % of "
        f"their tokens used; {scaled} to {request.most_patches:,} patches"
    )
