"""The loaders of a run's images, on its backend."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data.loader import BatchLoader
    from data.source import DataSource
    from training.backend import Backend


def train_loader(
    data: DataSource, backend: Backend, batch_size: int, steps: int = 0
) -> BatchLoader:
    """Return the loader of training images, in global batches of ``batch_size``; ``steps``: the
    number of batches of the whole training."""
    open_shard = functools.partial(data.train_loader, batch_size, steps=steps)
    return backend.loader(open_shard, batch_size, reads_rows=data.reads_rows)


def val_loader(data: DataSource, backend: Backend, batch_size: int) -> BatchLoader:
    """Return the loader of validation images, in global batches of ``batch_size``."""
    open_shard = functools.partial(data.val_loader, batch_size)
    return backend.loader(open_shard, batch_size, reads_rows=data.reads_rows)
