"""Detect a collapse of features from a run's records, and warn in one line.

In self-supervised training, a model may learn to give the same output for all images. The loss
hardly shows this, but three metrics do, in three places.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class _Symptom:
    """A metric that indicates a collapse."""

    name: str
    limit: float
    """The value beyond which it counts as collapsed."""
    above: bool
    in_a_row: int
    """The number of consecutive records that must agree."""
    text: str
    """The text of the warning, with a placeholder for the ``value``."""
    falls: bool = False
    """Whether it is also low in untrained models: only values not above the first one count."""
    collapsed: bool | None = None
    """What the records confirm so far; None: nothing yet."""
    _first: float | None = None
    _newest: bool | None = None
    """What the newest record shows."""
    _times: int = 0
    """The number of consecutive records that show it."""

    def changes(self, value: float, *, early: bool) -> bool:
        """Return True if this value shows a collapse for the first time, or again after a recovery.
        ``early``: so early in training that features may not differ yet, which is not a
        collapse."""
        self._first = value if self._first is None else self._first
        shown = value > self.limit if self.above else value < self.limit
        shown &= not self.falls or value <= self._first
        if shown and early and self.collapsed is None:
            self._newest = None
            return False
        self._times = self._times + 1 if shown == self._newest else 1
        self._newest = shown
        if shown == self.collapsed or self._times < self.in_a_row:
            return False
        self.collapsed = shown
        return shown


class CollapseWatch:
    """Reads the records of a run, one after the other, from its first epoch."""

    def __init__(self, width: int) -> None:
        """``width``: of the features."""
        self._signs = (
            _Symptom(
                "teacher_entropy",
                0.99,
                True,
                3,
                "the teacher gives all prototypes nearly the same probability (teacher_entropy "
                "{value:.3f}, maximum 1), so class tokens learn nothing: lower --teacher_temp and "
                "--warmup_teacher_temp, or increase --freeze_last_layer_epochs",
            ),
            _Symptom(
                "token_std",
                0.1,
                False,
                3,
                "the class tokens of all images are nearly the same (token_std {value:.3f}, 1 if "
                "evenly spread): lower --lr, or increase --koleo_weight",
            ),
            _Symptom(
                "train_rankme",
                0.03 * width,
                False,
                2,
                f"features use few directions (effective rank {{value:.1f}} of {width}, "
                "train_rankme): lower --lr, change the augmentations, or go back to an earlier "
                "checkpoint",
                falls=True,
            ),
        )

    def warnings(self, record: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line for each symptom that this record is the first to confirm."""
        for sign in self._signs:
            value = record.get(sign.name)
            if value is not None and sign.changes(value, early=record["epoch"] <= 1):
                yield f"warning: collapse: {sign.text.format(value=value)} (docs/pretraining.md)"
