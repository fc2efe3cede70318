"""Evaluations of features: k-NN, linear probes, effective rank, segmentation; ``--features``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.config import RunConfig
from training.errors import UsageError
from training.feature import Feature
from training.resolve import check_channels

if TYPE_CHECKING:
    from models.spec import ModelSpec

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
