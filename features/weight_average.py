"""The moving average of the weights (EMA): whether it has the time to forget the first weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.feature import Feature

if TYPE_CHECKING:
    from training.config import EmaConfig
    from training.loop import Hook, Training

_MOST_LEFT = 0.1
"""The largest fraction of the average that the first weights may still be at the end."""
_LITTLE_LEFT = 0.01
"""That fraction with the decay that the warning names."""


class ModelEma(Feature):
    """``--model_ema``: warns, before the first step, of a decay that is too slow for the run."""

    turned_on_by = ("--model_ema",)

    def hooks(self, training: Training) -> Sequence[Hook]:
        session = training.session
        if training.start.step < session.last_step:
            for warning in warnings(training.run.config.ema, session.last_step):
                session.reports.say(warning)
        return ()


def warnings(config: EmaConfig, updates: int) -> list[str]:
    """Return a warning, or none, for a run of this many updates."""
    from training.optimizers import share_of_first

    left = share_of_first(config, updates)
    if updates < 2 or left <= _MOST_LEFT:  # the first update copies the weights
        return []
    faster = 1 - float(f"{1 - _LITTLE_LEFT ** (1 / (updates - 1)):.1g}")
    how = f"use --model_ema_decay {faster:g} or less"
    if not config.model_ema_warmup:
        how = f"add --model_ema_warmup, or use --model_ema_decay {faster:g} or less"
    return [
        f"warning: after the {updates:,} steps of this run, {left:.0%} of the EMA of the weights "
        f"are still the first weights (--model_ema_decay {config.model_ema_decay:g}), so its "
        f"accuracy says little: {how} (docs/ema_and_schedules.md)"
    ]
