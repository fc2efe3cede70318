"""Decides which images make up each global batch, and which of them this process loads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler

PADDING = -1
"""The index of an image that is not there, and the label that data sources give it."""


Key = tuple[int, ...]
"""What a dataset is asked for: epoch and image index; where there are buckets, the bucket's
number."""


class GlobalBatchSampler(Sampler[list[Key]]):
    """Divides the same sequence of global batches over any number of loading processes.

    The order depends on the seed and the epoch alone; a process takes its contiguous
    share of each global batch. So neither the number of processes nor a resume
    changes what a step trains on. Yields lists of (draw, image index): the number of the draw
    that augmentations follow from, which is the epoch.

    With ``repeats`` each image stands so many times in a row, each time with another draw, and the
    epoch, no longer than before, ends before it has been through all: timm's
    ``RepeatAugSampler`` with a selection of all that fit. Within a batch all first ones
    come first, then all second ones: so the repeats of an image are far from each other, on other
    devices where there are enough.

    Training (``shuffle=True``) drops the last short batch, as PyTorch/XLA's ViT-10B example does.
    Evaluation keeps it and fills it up with ``PADDING``, so shapes stay static and
    each image still counts once.
    """

    read_together = 1
    """How many images that follow each other one loader process had better read."""

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        repeats: int = 1,
    ) -> None:
        if batch_size % world_size:
            raise ValueError(f"batch size {batch_size} is not divisible by {world_size} processes")
        self.length, self.batch_size, self.shuffle, self.seed = length, batch_size, shuffle, seed
        self.rank, self.share = rank, batch_size // world_size
        self.epoch, self.first_batch, self.repeats = 0, 0, repeats

    def set_position(self, epoch: int, first_batch: int = 0) -> None:
        """Let the next iteration run through ``epoch`` from its batch ``first_batch`` on."""
        self.epoch, self.first_batch = epoch, first_batch

    def __len__(self) -> int:
        """Return how many global batches an epoch has."""
        full, rest = divmod(self.length, self.batch_size)
        return full if self.shuffle else full + bool(rest)

    def generator(self) -> torch.Generator:
        """Return a generator of random numbers that depend on the seed and the epoch alone."""
        seed = (self.seed * 1_000_003 + self.epoch) % 2**63  # what a generator takes
        return torch.Generator().manual_seed(seed)

    def shuffled(self, generator: torch.Generator) -> torch.Tensor:
        """Return the images' indices in random order, which ``generator`` alone decides."""
        return torch.randperm(self.length, generator=generator)

    def _order(self) -> torch.Tensor:
        if self.shuffle:
            return self.shuffled(self.generator())
        padding = torch.full((len(self) * self.batch_size - self.length,), PADDING)
        return torch.cat([torch.arange(self.length), padding])

    def __iter__(self) -> Iterator[list[Key]]:
        order, repeats = self._order(), self.repeats
        first = self.rank * self.share
        for batch in range(self.first_batch, len(self)):
            places = range(batch * self.batch_size, (batch + 1) * self.batch_size)
            # Stable: those of one repeat stay in their order. Of one, nothing changes.
            apart = sorted(places, key=lambda place: place % repeats)[first : first + self.share]
            yield [
                (self.epoch * repeats + place % repeats, int(order[place // repeats]))
                for place in apart
            ]
