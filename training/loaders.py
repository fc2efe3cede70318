"""Opens loaders of what a backend puts on its devices: some images, of each all rows or a few."""

from __future__ import annotations

import functools

from data.loading.loader import BatchLoader
from data.source import DataSource
from training.backend import Backend


def train_loader(data: DataSource, backend: Backend, batch_size: int) -> BatchLoader:
    """Return the loader of training images, of global batches of ``batch_size``."""
    open_share = functools.partial(data.train_loader, batch_size)
    return backend.loader(open_share, batch_size, reads_rows=data.reads_rows)


def val_loader(data: DataSource, backend: Backend, batch_size: int) -> BatchLoader:
    """Return the loader of validation images, of global batches of ``batch_size``."""
    open_share = functools.partial(data.val_loader, batch_size)
    return backend.loader(open_share, batch_size, reads_rows=data.reads_rows)
