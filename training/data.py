"""The data of a run: what it requests of its source, the opened source, and the model's input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from data.batch import Batch
from data.open import open_data
from data.source import (
    ANY_CLASSES,
    Constant,
    DatasetRequest,
    DataSource,
    View,
    check_several_classes,
    image_normalizer,
)
from training.errors import data_errors_as_usage_errors
from training.feature_table import features

if TYPE_CHECKING:
    from training.config import RunConfig
    from training.resolve import Run


def dataset_request(
    run: Run, *, with_train: bool = True, labels: bool = True, augment: bool = True
) -> DatasetRequest:
    """Return what a run requests from its data source; see ``DatasetRequest``.

    Without ``augment`` the images may have any number of classes: nothing is trained.
    """
    channels, *size = run.model.sizes.input_shape
    active = run.config.active_features
    multi_label = any(feature.multi_label for feature in active)
    return DatasetRequest(
        run.config.data,
        channels,
        tuple(size),
        run.model.sizes.num_classes if augment or multi_label else ANY_CLASSES,
        run.config.seed,
        with_train=with_train,
        labels=labels,
        multi_label=multi_label,
        augment=augment,
        view=view_of(run, augment=augment),
        sampler=next(filter(None, (each.sampler(run) for each in active)), None),
        opened_by=opener_of(run.config),
    )


def opener_of(config: RunConfig) -> Callable[[DatasetRequest], DataSource] | None:
    """Return what opens a source that a feature adds, given a request without the feature's flags;
    None for the program's own."""
    for feature in features():
        if open_source := feature.sources.get(config.data.data_source):
            flags = config.of(feature.flags) if feature.flags else None
            # The source may keep its request, and loader processes get a copy of the source.
            return lambda request: open_source(replace(request, flags=flags, opened_by=None))
    return None


def view_of(run: Run, *, augment: bool) -> View:
    """Return what the run reads of an image; ``augment``: in training."""
    active = run.config.active_features
    views = (feature.view(run, augment=augment) for feature in active)
    view = next((view for view in views if view is not None), View())
    for feature in active:
        view = feature.arranged(run, view, augment=augment)
    return view


def input_of(run: Run, constant: Constant) -> Callable[[Batch], Any]:
    """Return the function from a batch on the devices to the input of the run's model; see
    ``View.model_input``."""
    channels, *spatial = run.model.sizes.input_shape
    mean, std = map(torch.tensor, run.config.data.preprocessing.of_channels(channels))
    return view_of(run, augment=False).model_input(mean, std, len(spatial), constant)


def normalizer(run: Run, constant: Constant) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function that normalizes images; see ``image_normalizer``."""
    channels, *spatial = run.model.sizes.input_shape
    mean, std = map(torch.tensor, run.config.data.preprocessing.of_channels(channels))
    return image_normalizer(mean, std, len(spatial), constant)


@data_errors_as_usage_errors()
def open_images(run: Run, *, with_train: bool = True) -> DataSource:
    """Open the images that ``run`` trains on and is evaluated on. Raises UsageError."""
    labels = run.config.objective.uses_labels
    data = open_data(dataset_request(run, with_train=with_train, labels=labels))
    check_several_classes(data)
    return data
