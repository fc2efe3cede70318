"""Knows every source of images by its name, what ``--data_source`` chooses from.

A new source is a file beside this one, with a function from ``Wanted`` to ``DataSource``, and a
line here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from data.errors import DataFolderError

if TYPE_CHECKING:  # torch takes seconds, and the names are for --help
    from data.source import DataSource, Wanted

OPENED_BY = {
    "folder": "data.image_folder:open_folder",
    "fake": "data.fake:FakeSource",
    "digits": "data.digits:open_digits",
}
"""Where each source's function is found; imported when it is chosen, since some need packages of
their own."""


def open_data(wanted: Wanted) -> DataSource:
    """Open the source that ``wanted.config`` chooses.

    Raises DataFolderError if it cannot be used.
    """
    module, _, name = OPENED_BY[wanted.config.data_source].partition(":")
    open_source: Callable[[Wanted], DataSource] = getattr(import_module(module), name)
    source = open_source(wanted)
    if wanted.with_train and source.train_length < wanted.config.batch_size:
        raise DataFolderError(
            f"{source.name} has {source.train_length} training images, fewer than one batch: "
            f"use --batch_size {source.train_length} or less"
        )
    return source
