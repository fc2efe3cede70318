"""Notices a collapse of features in a run's records, and says so in one line.

In self-supervised training a model may find that the same answer to all images costs least. The
loss hardly shows it; three figures do, at three places.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class _Symptom:
    """A figure of records that shows a collapse."""

    name: str
    limit: float
    """It is collapsed beyond it."""
    above: bool
    in_a_row: int
    """So many records in a row must agree."""
    text: str
    """What the warning says, with the ``value``."""
    falls: bool = False
    """It is low in untrained models, too: only what is not above its first value counts."""
    collapsed: bool | None = None
    """What the records have confirmed; None: nothing yet."""
    _first: float | None = None
    _newest: bool | None = None
    """What the newest record has shown."""
    _times: int = 0
    """How many records in a row have shown it."""

    def changes(self, value: float, *, early: bool) -> bool:
        """Return True if with this value a collapse is shown for the first time, or again after it
        had recovered. ``early``: so near to the start of training that features may not differ
        yet, which is no collapse."""
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
    """Reads the records of a run, one after the other, from its first epoch on."""

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
        """Yield a line for each sign of a collapse that this record is the first to confirm."""
        for sign in self._signs:
            value = record.get(sign.name)
            if value is not None and sign.changes(value, early=record["epoch"] <= 1):
                yield f"warning: collapse: {sign.text.format(value=value)} (docs/pretraining.md)"
