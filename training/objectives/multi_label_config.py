"""The flag of several labels an image."""

from dataclasses import dataclass
from typing import ClassVar

from config_fields import flag


@dataclass(frozen=True)
class MultiLabelConfig:
    """Whether an image may have several labels."""

    group: ClassVar[str] = "optimization"
    after: ClassVar[str] = "smoothing"

    multi_label: bool = flag(
        False,
        "images may have any number of labels: the label column of --labels has names separated by "
        "|, or --columns names a column of 0 and 1 for each label; an evaluation reports average "
        "precision and ROC AUC; requires --labels and, in training, --bce_loss (docs/tables.md)",
    )
