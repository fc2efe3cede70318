"""Evaluations of features: k-NN, linear probes, effective rank, segmentation; ``--features``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.config import RunConfig
from training.errors import UsageError
from training.feature import Feature
from training.resolve import check_channels

if TYPE_CHECKING:
    from data.segmentation import MaskedSource
    from data.source import DataSource
    from models.spec import ModelSpec
    from training.loop import Hook, Training
    from training.resolve import Run

_EXCLUDES = {
    "--buckets": "features are of images of one size",
    "--mesh_domain": "a device computes the features of whole images",
    "--mesh_tensor": "",
}


class FeatureEvaluation(Feature):
    """What the evaluations of one feature vector per image require (``training/evaluation/``)."""

    turned_on_by = (
        *("--features", "--knn", "--probe", "--rank"),
        *("--knn_every", "--probe_every", "--rank_every"),
    )
    excludes = _EXCLUDES

    def resolve_flags(self, config: RunConfig) -> RunConfig:
        if config.data.data_source == "fake":
            flag = self.shown(config).partition(" ")[0]
            raise UsageError(f"{flag} requires images: --fake_data has none")
        return config

    def check_data(self, run: Run, data: DataSource) -> DataSource:
        from training.evaluation.frozen import kinds_in_training, open_plain_images

        return open_plain_images(run, kinds_in_training(run.config.log))

    def evaluations(self, training: Training) -> Sequence[Hook]:
        from training.evaluation.frozen import evaluations_of_images

        return [evaluations_of_images(training, training.opened[type(self)])]


class SegmentProbe(Feature):
    """What images with masks require (``training/evaluation/segment.py``)."""

    turned_on_by = ("--segment_probe", "--segment_probe_every")
    excludes = _EXCLUDES

    def resolve_model(self, config: RunConfig, model: ModelSpec) -> RunConfig:
        if len(model.sizes.input_shape) > 3:
            flag = self.shown(config).partition(" ")[0]
            raise UsageError(f"{flag} requires a model of images, not of volumes")
        check_channels(model)  # whatever the data source
        return config

    def check_data(self, run: Run, data: DataSource) -> MaskedSource:
        from training.evaluation.frozen import open_images_with_masks

        return open_images_with_masks(run)

    def evaluations(self, training: Training) -> Sequence[Hook]:
        from training.evaluation.frozen import evaluations_of_patches

        return [evaluations_of_patches(training, training.opened[type(self)])]
