"""Hooks that log steps and epochs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from training.logs.bad_images import TRAIN
from training.loop import Hook
from training.processes.exchange import SlowHosts

if TYPE_CHECKING:
    from training.loop import Session, StepDone
    from training.step import TrainBatches


@dataclass
class StepLog(Hook):
    """Reports every ``--log_step_interval``-th step, without waiting for the device."""

    session: Session
    batches: TrainBatches
    _slow_hosts: SlowHosts = field(default_factory=SlowHosts, init=False)
    _compile_s: float = field(default=0.0, init=False)

    def before_step(self, step: int, *, is_first: bool) -> None:
        if is_first:  # mostly compilation: measured separately, with its batch
            self.session.reports.events.steps()
            self.session.timer.restart()
            self.session.timer.started -= self.batches.last_wait_s
            self._compile_s = self.session.backend.compile_seconds()

    def after_step(self, done: StepDone) -> None:
        session, step = self.session, done.at.step
        reports, timer, waited = session.reports, session.timer, self.batches.last_wait_s
        timer.steps += 1
        timer.waited += waited
        timer.flops += reports.step_flops(done.shapes)
        reports.events.stepped(step, waited)
        self._slow_hosts.stepped(self.batches.last_read_s, session.backend.local_compute_seconds())
        interval = session.config.log.log_step_interval
        if done.is_first or done.is_last or step % interval == 0:
            values = session.backend.read(done.values)
            measured, slowest = None if done.is_first else timer, dict[str, float]()
            if measured:
                seconds = measured.seconds() / measured.steps
                slowest = self._slow_hosts.compare(seconds, reports.say)
            reports.log(step, done.epoch + 1, done.lr, measured, values, slowest)
            session.bad_images.collect(TRAIN, self.batches.loader, reports.say)
            if done.is_first:
                compiled = session.backend.compile_seconds() - self._compile_s
                reports.events.first_step(timer.seconds(), waited, compiled)
            else:
                reports.events.steps()
            timer.restart()
        reports.step_done()


@dataclass
class EpochLog(Hook):
    """Reports the mean training loss of each epoch, and of the part of one that ends the run, over
    the steps that this start has trained."""

    session: Session
    batches: TrainBatches

    def after_step(self, done: StepDone) -> None:
        if done.is_last or done.at.images_in_epoch == 0:
            backend, steps = self.session.backend, len(self.batches.loader)
            values = backend.read({"epoch_loss": backend.epoch_loss})
            self.session.reports.log_epoch(done.at.step, done.epoch + 1, steps, values)
