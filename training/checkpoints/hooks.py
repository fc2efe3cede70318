"""Hooks that save checkpoints, and stop training if it cannot continue."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.errors import BAD_IMAGES, NO_BATCH, NOT_FINITE, NOT_SAVED
from training.loop import Hook, Session, StepDone
from training.processes.exchange import MinutesInterval

if TYPE_CHECKING:
    from training.checkpoints.local_tier import LocalTier
    from training.checkpoints.saver import CheckpointSaver
    from training.schedule import Position
    from training.step import TrainBatches


@dataclass
class StopCheck(Hook):
    """Stops training on a signal, or if it cannot continue; ``Saves`` writes the checkpoint."""

    session: Session
    batches: TrainBatches
    saver: CheckpointSaver

    def after_step(self, done: StepDone) -> None:
        session, stop = self.session, self.session.stop
        if done.is_last:
            session.reports.flush()
        limit = session.config.log.max_bad_steps
        diverges = bool(limit) and session.reports.longest_row_skipped >= limit
        if done.is_last:  # too late to stop, but do not save weights that are not finite
            if diverges:
                stop.exit_code = NOT_FINITE
            return
        if self.batches.failed:
            stop.ask(NO_BATCH)
        if session.bad_images.excess:
            stop.ask(BAD_IMAGES)
        if diverges:
            stop.ask(NOT_FINITE)
        if self.saver.failed_too_often():
            stop.ask(NOT_SAVED)
        stop.due()


class Saves(Hook):
    """Saves checkpoints after the steps, minutes and epochs set by the flags, and at the end. Stops
    training if the last step was not finite."""

    def __init__(self, session: Session, saver: CheckpointSaver) -> None:
        self._config, self._session, self.saver = session.config.checkpoints, session, saver
        self._minutes = MinutesInterval(session.backend, self._config.ckpt_minutes_interval)

    def after_step(self, done: StepDone) -> None:
        at, config = done.at, self._config
        due = done.is_last or self._minutes.over()  # all processes ask this after each step
        due |= bool(config.ckpt_step_interval) and at.step % config.ckpt_step_interval == 0
        due |= at.images_in_epoch == 0 and at.epoch % config.ckpt_epoch_interval == 0
        if due:
            self.save(at, must=done.is_last)
        if done.is_last and self._session.reports.not_finite:
            self._session.stop.exit_code = NOT_FINITE

    def save(self, at: Position, *, must: bool = False) -> None:
        """Write a checkpoint. With ``must``, wait for it, and fail if it cannot be written."""
        session = self._session
        session.reports.flush()
        session.reports.upload()
        session.watchdog.alive()
        with session.reports.events.span("save") as event:
            event["written"] = self.saver.save(at, must=must)
            event["completed"], self.saver.figures = self.saver.figures, []
        self._minutes.restart()
        session.timer.restart()


@dataclass
class LocalSaves(Hook):
    """Saves to the hosts' local disks every ``--local_ckpt_step_interval`` steps, but the last."""

    session: Session
    saver: CheckpointSaver
    tier: LocalTier

    def after_step(self, done: StepDone) -> None:
        session = self.session
        if done.is_last or done.at.step % session.config.checkpoints.local_ckpt_step_interval:
            return
        session.reports.flush()
        session.watchdog.alive()
        with session.reports.events.span("local_save") as event:
            # Before any process writes: the others wait for this one, which writes the logs for
            # all.
            session.reports.sync()
            session.reports.upload()
            copy = functools.partial(self.saver.content, done.at, copy=True)
            event |= self.tier.save(done.at.step, copy, session.reports.say)
        session.timer.restart()
