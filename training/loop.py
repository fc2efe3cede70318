"""The training loop, shared by all backends, and the hooks that it calls around each step."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from data.loader import BatchLoader
from data.size_schedule import SizeSchedule
from training.backend import Backend
from training.checkpoints.choose import BEST, folder_of
from training.checkpoints.local_tier import LocalTier
from training.checkpoints.saver import CheckpointSaver
from training.config import RunConfig
from training.errors import BAD_IMAGES, NO_BATCH, NOT_FINITE, NOT_SAVED
from training.evaluation.evaluate import evaluate
from training.logs.bad_images import TRAIN, VAL, BadImages
from training.logs.records import Evaluation
from training.logs.reports import Reports, StepTimer
from training.objectives.objective import Objective
from training.processes.exchange import MinutesInterval, SlowHosts
from training.processes.stopping import StopRequest, Watchdog
from training.schedule import Position, Schedule
from training.step import TrainBatches, train_step


@dataclass(frozen=True)
class Session:
    """What the loop and the hooks share from the first step of a start to the last."""

    config: RunConfig
    backend: Backend
    reports: Reports
    stop: StopRequest
    watchdog: Watchdog
    bad_images: BadImages
    last_step: int
    """The number of the last step of the run."""
    timer: StepTimer = field(default_factory=StepTimer, init=False)
    """Measures the throughput; restarted after everything that is not training."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self.watchdog.pause()
        self.reports.close()

    @contextlib.contextmanager
    def first_run(self, what: str, is_first: bool) -> Iterator[None]:
        """Run ``what`` inside; if the first one compiles, log that and wait for it."""
        if not (is_first and self.backend.compiles):
            yield
            return
        self.watchdog.pause()  # a compilation may take minutes
        with self.reports.compiling(what):
            yield
            self.backend.wait()


class StepDone(NamedTuple):
    """A step that has just been made."""

    at: Position
    """Where training stands after it."""
    epoch: int
    """The epoch of its batch, from 0."""
    lr: float
    values: dict[str, torch.Tensor]
    """What ``train_step`` returned."""
    shape: torch.Size
    """The shape of a micro-batch's images."""
    is_first: bool
    """Whether it compiled, or was the first step of this start."""
    is_last: bool


class Hook:
    """An action around the steps of a training run.

    All processes call their hooks in the same order. To stop training, a hook sets
    ``Session.stop.exit_code`` to the same value in all processes.
    """

    def reached(self, at: Position) -> None:
        """Called at each position: once before training, even if no step is left, and after each
        step."""

    def before_step(self, step: int, *, is_first: bool) -> None:
        """Called when the batch of the step is ready; ``step`` counts from 1."""

    def after_step(self, done: StepDone) -> None:
        """Called after the step was dispatched; the device may still be computing it."""


def train_loop(
    session: Session,
    model: nn.Module,
    objective: Objective,
    hooks: Sequence[Hook],
    batches: TrainBatches,
    schedule: Schedule,
    at: Position,
) -> Position:
    """Train from ``at`` to the last step, or until a hook stops training; return the position
    reached. When a hook stops training, the hooks after it are not called."""
    backend, stop, watchdog = session.backend, session.stop, session.watchdog
    config = session.config
    shapes: set[torch.Size] = set()
    model.train()
    for hook in hooks:
        hook.reached(at)
        if stop.exit_code:
            return at
    watchdog.alive(before_first_step=True)
    while at.step < session.last_step and at.epoch < config.num_epochs:
        session.timer.restart()
        backend.begin_epoch()
        with contextlib.closing(batches.rest_of_epoch(at)) as epoch:
            for micro_batches in epoch:
                rates = schedule.at(batches.number(at))
                shape = micro_batches[0][0].shape
                # The first step of this start or, on a backend that compiles, the first with this
                # shape.
                is_first = not shapes or (backend.compiles and shape not in shapes)
                shapes.add(shape)
                for hook in hooks:
                    hook.before_step(at.step + 1, is_first=is_first)
                with session.first_run("training step", is_first):
                    values = train_step(
                        model,
                        objective,
                        backend,
                        at.step,
                        micro_batches,
                        rates=rates,
                        max_norm=config.optimizer.clip_grad_norm,
                    )
                watchdog.alive()
                if is_first:
                    stop.listen()

                before, at = at, batches.after(at)
                is_last = at.step >= session.last_step
                if is_last:
                    epoch.close()  # its loader should not compete with what follows
                done = StepDone(at, before.epoch, rates.lr, values, shape, is_first, is_last)
                for hook in hooks:
                    hook.after_step(done)
                    hook.reached(at)
                    if stop.exit_code:
                        return at
    return at


# -- hooks, in the order of train.py ---------------------------------------------------------------


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
        timer.flops += reports.step_flops(done.shape)
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


@dataclass
class SizeLog(Hook):
    """Logs the step at which the image size changes, or the sizes that are drawn."""

    session: Session
    batches: TrainBatches
    sizes: SizeSchedule
    _side: int | None = field(default=None, init=False)

    def reached(self, at: Position) -> None:
        sizes, say = self.sizes, self.session.reports.say
        if at.step >= self.session.last_step:
            return
        side = sizes.side(self.batches.number(at))
        if sizes.shares and side != self._side:
            say(f"image size {side} x {side} from step {at.step + 1:,}")
        elif self._side is None:
            sides = ", ".join(f"{side} x {side}" for side in sorted({*sizes.sides}))
            say(f"image size of each step drawn at random from {sides}")
        self._side = side


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


def last_epoch(at: Position) -> int:
    """Return the number, from 1, of the epoch that was trained on last."""
    return at.epoch + 1 if at.images_in_epoch or not at.epoch else at.epoch


@dataclass
class Evaluations(Hook):
    """Evaluates the model after the steps and epochs set by the flags, and at the end."""

    session: Session
    model: nn.Module
    objective: Objective
    loader: BatchLoader
    images: int
    """The number of validation images."""
    saves: Saves
    done: set[int]
    """The steps for which the run's folder already has an evaluation."""
    best: float
    """The highest score so far, by ``--ckpt_best``; that of the EMA, if there is one."""
    _count: int = field(default=0, init=False)

    def reached(self, at: Position) -> None:
        """If an evaluation is due, evaluate the model, and its EMA if there is one, report the
        results and save the best. Stop training if a signal interrupts the evaluation, if too many
        images cannot be read, or if the last evaluation is not finite."""
        session, config = self.session, self.session.config.log
        interval = config.test_step_interval
        is_due = bool(at.step and interval) and at.step % interval == 0
        if at.step and at.images_in_epoch == 0:
            is_due |= at.epoch % config.test_epoch_interval == 0
        if at.step in self.done or not (is_due or at.step >= session.last_step):
            return

        result, ema, with_ema = self._measure(), None, session.config.ema.model_ema
        if result and with_ema:
            with session.backend.ema_weights():
                ema = self._measure()
        if result is None or (with_ema and ema is None):
            return
        session.bad_images.collect(VAL, self.loader, session.reports.say)
        result = session.bad_images.excluding_unreadable(result)
        if session.bad_images.excess:
            session.stop.exit_code = BAD_IMAGES
            return
        session.reports.evaluation(at.step, last_epoch(at), result, ema)
        self.done.add(at.step)
        best_by = session.config.checkpoints.ckpt_best
        new_score = BEST[best_by or "best"]((ema or result).values)
        if not (result.is_finite and (ema or result).is_finite):
            if at.step >= session.last_step:
                session.reports.not_finite = "val loss"
                session.stop.exit_code = NOT_FINITE
        elif new_score > self.best:
            self.best = new_score
            if best_by:
                saver = self.saves.saver
                saver.protected = folder_of(saver.ckpt_dir, at.step)
                self.saves.save(at)
        session.timer.restart()

    def _measure(self) -> Evaluation | None:
        """Evaluate the model with its current weights; return None if interrupted by a signal."""
        session, is_first, count = self.session, self._count == 0, len(self.loader)
        batches = min(session.config.log.eval_batches or count, count)
        with (
            session.first_run("evaluation", is_first),
            session.reports.evaluating(batches) as advance_bar,
        ):

            def batch_done() -> bool:
                advance_bar()
                if not is_first:
                    session.watchdog.alive()
                return session.stop.due()

            images = min(self.images, batches * session.config.data.global_micro_batch_size)
            measure = self.objective.measure(images)
            result = evaluate(
                self.model, measure, self.loader, session.backend, batches, batch_done
            )
        self._count += 1
        session.watchdog.alive()
        return result
