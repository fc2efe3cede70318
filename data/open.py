"""Opens the source of images that a run requests."""

from collections.abc import Sequence
from importlib import import_module

from data import loader
from data.batch import Batch, SampleIndex, collate
from data.config import OPENED_BY
from data.files import DataFolderError
from data.source import DatasetRequest, DataSource


def open_data(request: DatasetRequest) -> DataSource:
    """Open the source selected by ``--data_source``. Raises DataFolderError if it is unusable."""
    kind = request.config.data_source
    request.view.check(request)
    if request.config.num_workers != 0:
        loader.prepare_sockets()
    opened_by = request.opened_by
    if opened_by is None:
        module, _, name = OPENED_BY[kind].partition(":")
        opened_by = getattr(import_module(module), name)
    source: DataSource = opened_by(request)
    if request.with_train and request.augment:  # an incomplete last batch is dropped
        train = source.splits["train"]
        if train.samples < request.config.batch_size:
            raise DataFolderError(
                f"{source.name} has {train.samples} {train.samples_are}, fewer than one batch: use "
                f"--batch_size {train.samples} or less"
            )
    return source


def draw_samples(request: DatasetRequest, numbers: Sequence[int], epochs: int = 1) -> list[Batch]:
    """Return the training samples with these numbers, as in each of the first epochs. Raises
    DataFolderError."""
    train = open_data(request).splits["train"]
    return [
        collate([train[SampleIndex(epoch, number)].fields for number in numbers])
        for epoch in range(epochs)
    ]
