"""``--save_bad_step``: keeps what ``tools.replay_step`` needs to compute a bad step again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.feature import Feature

if TYPE_CHECKING:
    from training.loop import Hook, Training


class SaveBadStep(Feature):
    """Saves the weights and the batch's position, before any hook that stops the run."""

    turned_on_by = ("--save_bad_step",)

    def hooks(self, training: Training) -> Sequence[Hook]:
        from training.bad_step import SaveBadStepHook

        return [SaveBadStepHook(training)]
