"""The training loop, which is the same for every backend and reads from top to bottom."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from torch import nn

from training.batches import TrainBatches
from training.checkpoints.format import Position
from training.checkpoints.saver import Saves
from training.evaluate import Evaluations
from training.logs.reports import Session, StepLog, StepProfiler
from training.losses import Objective
from training.processes.stopping import BAD_IMAGES, NO_BATCH, NOT_FINITE, NOT_SAVED
from training.resolve import Run
from training.schedule import Schedule
from training.step import train_step


@dataclass
class Trainer:
    """Trains a run of which everything is on the devices."""

    run: Run
    session: Session
    model: nn.Module
    objective: Objective
    batches: TrainBatches
    schedule: Schedule
    log: StepLog
    saves: Saves
    evaluations: Evaluations
    profiler: StepProfiler

    def train(self, start: Position) -> None:
        """Train from ``start`` to the last step, or until ``session.stop`` tells to stop."""
        session, config, at = self.session, self.run.config, start
        stop, last_step = session.stop, session.last_step
        self.model.train()
        if at.step >= last_step:
            self.saves.tidy()
        if self.evaluations.owed(at) and not self._evaluate(at):
            return

        while at.step < last_step and at.epoch < config.num_epochs:
            epoch = at.epoch
            self.log.begin()
            if at == start:
                session.watchdog.starting()
            with contextlib.closing(self.batches.rest_of_epoch(at)) as batches:
                for micro_batches in batches:
                    lr = self.schedule.lr(self.batches.number(at))
                    is_first = session.is_first(micro_batches[0][0])
                    if is_first:
                        self.log.compiles_now()
                    with (
                        session.first_run("training step", is_first),
                        self.profiler.around(at.step + 1),
                    ):
                        outcome = train_step(
                            self.model,
                            self.objective,
                            session.backend,
                            at.step,
                            micro_batches,
                            lr=lr,
                            max_norm=config.optimizer.clip_grad_norm,
                        )
                    at = self.batches.after(at)
                    session.watchdog.alive()
                    self.log.step_done(at.step, epoch, lr, outcome, is_first=is_first)
                    if is_first:
                        stop.first_step_done()

                    if at.step >= last_step:
                        break
                    if self._must_stop():
                        self.saves.save_stopped(at)
                        return
                    if self.saves.due_after_step(at.step):
                        self.saves.save(at)
                        self.log.begin()
                    if self.evaluations.due_after_step(at.step):
                        if not self._evaluate(at):
                            return
                        self.log.begin()

            is_last = at.step >= last_step
            if is_last and self._diverged():
                return
            if is_last or self.saves.due_after_epoch(epoch + 1):
                self.saves.save(at, must=is_last)
            if self.evaluations.owed(at) and not self._evaluate(at):
                return
        if session.bad_images.excess:  # found with the last step
            stop.number = BAD_IMAGES

    def _evaluate(self, at: Position) -> bool:
        """Evaluate the model; if that cannot be, or a signal stops it, save and return False."""
        result = self.evaluations.evaluate(at)
        if result is None:
            self.saves.save_stopped(at)
            return False
        if result.top1 > self.evaluations.best:
            self.evaluations.best = result.top1
            self.saves.save_best(at)
        return True

    def _must_stop(self) -> bool:
        if self.batches.failed:
            self.session.stop.ask(NO_BATCH)
        if self.session.bad_images.excess:
            self.session.stop.ask(BAD_IMAGES)
        if self.log.diverges():
            self.session.stop.ask(NOT_FINITE)
        if self.saves.failed_too_often():
            self.session.stop.ask(NOT_SAVED)
        return self.session.stop.due()

    def _diverged(self) -> bool:
        """Tell, alike in all processes, whether too many of the last steps were not finite."""
        self.session.reports.flush()
        if self.log.diverges():
            self.session.stop.number = NOT_FINITE
        return self.session.stop.number == NOT_FINITE
