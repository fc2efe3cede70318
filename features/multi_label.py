"""Several labels an image: ``--multi_label``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.config import RunConfig
from training.errors import UsageError
from training.feature import Feature, SmallSizes
from training.objectives.multi_label_config import MultiLabelConfig

if TYPE_CHECKING:
    from models.spec import ModelSpec

_ONE_LABEL = "it needs one label an image"


class MultiLabel(Feature):
    """What several labels an image ask of other flags, also where a checkpoint has turned it on."""

    flags = MultiLabelConfig
    objective = "training.objectives.multi_label:MultiLabelClassification"
    multi_label = True
    turned_on_by = ("--multi_label",)
    excludes = {
        **dict.fromkeys(("--knn", "--probe", "--knn_every", "--probe_every"), _ONE_LABEL),
        "--teacher": "",
    }
    saved_with_weights = True

    def resolve_model(self, config: RunConfig, model: ModelSpec) -> RunConfig:
        use = config.use
        if use.predict or use.without_labels:
            return config
        if not config.data.labels:
            raise UsageError(
                "--multi_label requires --labels, a table with the labels of each image"
            )
        if not (use.eval_only or use.features or config.loss.bce_loss):
            raise UsageError("--multi_label requires --bce_loss, a loss for each label")
        return config

    def shrink(self, config: RunConfig, small: SmallSizes) -> RunConfig:
        return config.with_flags(MultiLabelConfig())
