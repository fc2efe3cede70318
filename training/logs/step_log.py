"""Decides when a step is logged, and measures the pace that is logged with it."""

from __future__ import annotations

from training.logs.bad_images import TRAIN
from training.logs.reports import Interval
from training.options.config import LogConfig
from training.session import Session
from training.step import Outcome
from training.train_batches import TrainBatches


class StepLog:
    """Hands every so many steps' figures to the reports, without waiting for the device."""

    def __init__(self, config: LogConfig, session: Session, batches: TrainBatches) -> None:
        self._config, self._session, self._batches = config, session, batches
        self._interval = Interval()

    def begin(self) -> None:
        """Measure the pace anew, since what came before was no training."""
        self._interval = Interval()
        self._batches.waited_s = 0.0

    def compiles_now(self) -> None:
        """Tell the steps before apart from the one whose batch has just come: it compiles."""
        self._session.reports.events.steps()
        self.begin()
        self._interval.started -= self._batches.last_wait_s

    def step_done(
        self, step: int, epoch: int, lr: float, outcome: Outcome, *, is_first: bool
    ) -> None:
        """Log the step if it is one to be logged; ``epoch`` counts from 0."""
        session, every = self._session, self._config.log_step_interval
        events = session.reports.events
        self._interval.steps += 1
        events.stepped(step, self._batches.last_wait_s)
        if is_first or step % every == 0 or step == session.last_step:
            self._interval.waited = self._batches.waited_s
            # The first step's time is the compiler's: it says nothing of the pace.
            pace = None if is_first else self._interval
            values = session.backend.read(outcome._asdict())
            session.reports.log(step, epoch + 1, lr, pace, values)
            session.bad_images.collect(TRAIN, self._batches.loader, session.reports.say)
            if is_first:
                events.first_step(self._interval.seconds())
            else:
                events.steps()
            self.begin()
        session.reports.step_done()

    def diverges(self) -> bool:
        """Tell whether too many steps in a row were not finite, as far as log steps have told."""
        limit = self._config.max_bad_steps
        return bool(limit) and self._session.reports.longest_row_skipped >= limit
