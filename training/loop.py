"""The training loop, shared by all backends, and the interface of the hooks around each step."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from training.backend import Backend
from training.objectives.base import Objective
from training.schedule import Position, Schedule
from training.step import StepTimer, TrainBatches, train_step

if TYPE_CHECKING:
    from data.source import DataSource
    from training.checkpoints.saver import CheckpointSaver
    from training.config import RunConfig
    from training.logs.bad_images import BadImages
    from training.logs.reports import Reports
    from training.processes.stopping import StopRequest, Watchdog
    from training.resolve import Run


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
        self.watchdog.stop()
        self.reports.close()

    @contextlib.contextmanager
    def first_run(self, what: str, is_first: bool) -> Iterator[None]:
        """Run ``what`` inside; if the first one compiles, log that and wait for it."""
        if not (is_first and self.backend.compiles):
            yield
            return
        with self.watchdog.compiling(), self.reports.compiling(what):
            yield
            self.backend.wait()


@dataclass(frozen=True)
class Training:
    """A training before its first step, for features that add hooks."""

    run: Run
    session: Session
    model: nn.Module
    objective: Objective
    saver: CheckpointSaver
    batches: TrainBatches
    schedule: Schedule
    start: Position
    """The position that this start continues from."""
    opened: Mapping[type, Any]
    """By its class, what ``check_data`` of a feature returned."""
    evaluated: Mapping[str, Collection[int]]
    """By kind of evaluation (``training.logs.records.FROZEN``), the steps that the run's folder has
    one for."""

    @property
    def data(self) -> DataSource:
        return self.session.bad_images.data


class StepDone(NamedTuple):
    """A step that has just been made."""

    at: Position
    """Where training stands after it."""
    epoch: int
    """The epoch of its batch, from 0."""
    lr: float
    values: dict[str, torch.Tensor]
    """What ``train_step`` returned."""
    shapes: Mapping[str, torch.Size]
    """The shapes of a micro-batch's fields."""
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
    seen: set[tuple[torch.Size, ...]] = set()
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
                shapes = {name: tensor.shape for name, tensor in micro_batches[0].items()}
                key = tuple(shapes.values())
                # The first step of this start or, on a backend that compiles, the first with these
                # shapes.
                is_first = not seen or (backend.compiles and key not in seen)
                seen.add(key)
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
                done = StepDone(at, before.epoch, rates.lr, values, shapes, is_first, is_last)
                for hook in hooks:
                    hook.after_step(done)
                    hook.reached(at)
                    if stop.exit_code:
                        return at
    return at


def last_epoch(at: Position) -> int:
    """Return the number, from 1, of the epoch that was trained on last."""
    return at.epoch + 1 if at.images_in_epoch or not at.epoch else at.epoch
