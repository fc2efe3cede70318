"""What a batch is: tensors by name, the fields of its samples.

A ``View`` (``data/source.py``) declares the fields of what it reads; loaders, transfers and the
step pass them on by name and depend on none of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

PADDING = -1
"""The index of padding instead of an image, and the label of padding."""

Batch = dict[str, torch.Tensor]
"""Fields by name, (samples, ...). Names are timm's, where it has one:

- ``image``: (channels, rows, width), volumes (channels, slices, height, width), uint8, or fp32 if
  it is already normalized.
- ``target``: the label of an image, or 0 and 1 for each label that it may have, int64; PADDING for
  padding.
- ``index``: the number of an image in its split, int64; PADDING for padding. Only where images are
  read in order, as in validation.
- ``position``: the place of a sample in the global batch, int64, for objectives that draw random
  numbers per image.
"""

BadImage = tuple[str, str, int]
"""Path of an unreadable image, the reason in one line, and its number in its split."""


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """The index into a dataset."""

    epoch: int
    """The draw of the augmentations: usually the epoch."""
    index: int
    """The image, or PADDING."""
    size: int = 0
    """The number of the batch's size, if there are several sizes of images or crops."""


class Sample(NamedTuple):
    """One sample of a dataset."""

    fields: Batch
    """Its tensors by name, without the dimension of samples."""
    bad: list[BadImage]
    """The unreadable images that were replaced."""


@dataclass(frozen=True)
class Field:
    """What one tensor of a sample is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: int | None = None
    """The dimension that holds the rows of patches, which ``--mesh_domain`` shards; None: devices
    that share an image have the whole tensor."""
    padding: int = 0
    """The value in samples that are padding."""
    below: int = 1
    """Values of an integer dtype are from 0 to ``below`` - 1 where no data is read, as in
    ``--self_check``; those of images in uint8 are from 0 to 255."""

    def full(self) -> torch.Tensor:
        """Return the tensor of a sample that is padding."""
        return torch.full(self.shape, self.padding, dtype=self.dtype)


Fields = Mapping[str, Field]
"""The fields of a sample by name."""


@dataclass(frozen=True)
class BatchShard:
    """Which samples of each global batch one process loads, and which of their rows: positions
    along the first spatial axis (an image's height, a volume's slices)."""

    index: int = 0
    count: int = 1
    """The process loads shard number ``index`` of ``count`` equal shards of each global batch."""
    rows: range | None = None
    """Contiguous rows of each image; None: all rows."""
    loads: bool = True
    """False: other processes provide the images; the same number of batches then contains no
    images."""
    of_host: int = 1
    """Number of training processes that share this host's cores."""

    def shape_of(self, batch_size: int, field: Field) -> tuple[int, ...]:
        """Return the shape of the field's tensor that this process loads for a global batch of
        ``batch_size``."""
        count, shape = batch_size // self.count if self.loads else 0, list(field.shape)
        if self.rows is not None and field.rows is not None:
            shape[field.rows] = len(self.rows)
        return (count, *shape)

    def empty(self, batch_size: int, fields: Fields) -> Batch:
        """Return the batch of a process that loads nothing."""
        return {
            name: torch.zeros(self.shape_of(batch_size, field), dtype=field.dtype)
            for name, field in fields.items()
        }


def class_counts(labels: np.ndarray, classes: int = 0) -> np.ndarray:
    """Return the number of images by class, of at least so many ``classes``. ``labels``: (images,),
    or for several labels an image 0 and 1, (images, classes)."""
    if labels.ndim > 1:
        return labels.sum(axis=0, dtype=np.int64)
    return np.bincount(labels, minlength=classes)


def collate(samples: Sequence[Batch]) -> Batch:
    """Return the samples as one batch, as ``torch.utils.data.default_collate`` does."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def micro_batches(batch: Batch, shards: int, count: int) -> list[Batch]:
    """Return a whole global batch as ``count`` micro-batches, of which each has samples of each of
    ``shards`` equal shards, as if these were divided."""

    def parts(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(0, (shards, count, -1)).transpose(0, 1).flatten(1, 2)

    divided = {name: parts(tensor) for name, tensor in batch.items()}
    return [{name: tensor[n] for name, tensor in divided.items()} for n in range(count)]


def joined(parts: Sequence[Batch]) -> Batch:
    """Return consecutive parts of a batch as one."""
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
