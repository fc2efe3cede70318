"""Decides when a checkpoint is written, and which one is never removed."""

from __future__ import annotations

from training.checkpoints.choose import folder_of
from training.checkpoints.content import Position
from training.checkpoints.saver import CheckpointSaver
from training.hosts.minutes import MinutesInterval
from training.hosts.stopping import NOT_FINITE
from training.options.config import CheckpointConfig
from training.session import Session


class Saves:
    """Writes checkpoints after the steps and epochs that the flags name, and at the end."""

    def __init__(
        self, config: CheckpointConfig, session: Session, saver: CheckpointSaver, best_step: int
    ) -> None:
        """Write checkpoints by ``saver``. ``best_step``: the step of the evaluation with the
        highest top-1 so far; 0: there is none."""
        self._config, self._session, self._saver = config, session, saver
        self._minutes = MinutesInterval(session.backend, config.ckpt_minutes_interval)
        self.best_step = best_step

    def due_after_step(self, step: int) -> bool:
        """Tell, alike in all processes, whether to save now; all call it after each step."""
        interval = self._config.ckpt_step_interval
        minutes_over = self._minutes.over()
        return minutes_over or (bool(interval) and step % interval == 0)

    def due_after_epoch(self, epochs_done: int) -> bool:
        return epochs_done % self._config.ckpt_epoch_interval == 0

    def save(self, at: Position, *, must: bool = False) -> None:
        """Write a checkpoint; with ``must`` the run fails if that fails, and waits for it."""
        self._session.reports.flush()
        self._session.reports.upload()
        self._session.watchdog.alive()
        self._spare_best()
        with self._session.reports.events.span("save") as event:
            event["written"] = self._saver.save(at, must=must)
        self._minutes.begin()

    def failed_too_often(self) -> bool:
        """Tell whether this process knows of too many failed saves to go on."""
        return self._saver.failed_too_often()

    def save_stopped(self, at: Position) -> None:
        """Write the checkpoint of a run that was told to stop, unless its weights are no good."""
        if self._session.stop.number != NOT_FINITE:
            self.save(at, must=True)

    def save_best(self, at: Position) -> None:
        """Write a checkpoint of the best evaluation so far, if such ones are wanted."""
        self.best_step = at.step
        if self._config.ckpt_best:
            self.save(at)

    def tidy(self) -> None:
        """Remove what is left of a start that was killed after its last checkpoint."""
        self._spare_best()
        self._saver.tidy()

    def _spare_best(self) -> None:
        if self._config.ckpt_best and self.best_step:
            self._saver.spared = folder_of(self._saver.ckpt_dir, self.best_step)
