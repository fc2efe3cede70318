"""The training loop, the same for every backend, top to bottom."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from data.loader import Batch, BatchLoader
from training.backend import Backend
from training.bad_images import BadImages
from training.checkpoints.choose import folder_of
from training.checkpoints.content import Position
from training.checkpoints.saver import CheckpointSaver
from training.evaluation import evaluate
from training.prefetch import prefetch
from training.profiling import StepProfiler
from training.reports import Interval, Reports
from training.schedule import WarmupCosine
from training.stopping import NOT_FINITE, StopRequest
from training.watchdog import Watchdog


def forward_backward(
    model: nn.Module, backend: Backend, step: int, micro_batches: list[Batch]
) -> torch.Tensor:
    """Leave the gradients of the mean loss over all micro-batches; return that loss."""
    count, losses = len(micro_batches), []
    for index, (images, labels) in enumerate(micro_batches):
        backend.begin_step(step * count + index)
        loss = F.cross_entropy(model(images).float(), labels) / count
        losses.append(loss.detach())
        backend.backward(loss, is_last=index == count - 1)
    return backend.mean(sum(losses[1:], start=losses[0]))


def put_micro_batches(backend: Backend, batch: Batch, count: int) -> list[Batch]:
    """A process's share of a batch as ``count`` micro-batches on the devices."""
    images, labels = (part.chunk(count) for part in batch)
    return [backend.put(micro_batch) for micro_batch in zip(images, labels, strict=True)]


@dataclass
class Trainer:
    """What a run consists of, once everything is on the devices."""

    args: argparse.Namespace
    model: nn.Module
    train_loader: BatchLoader
    val_loader: BatchLoader
    backend: Backend
    schedule: WarmupCosine
    reports: Reports
    saver: CheckpointSaver
    last_step: int
    profiler: StepProfiler
    stop: StopRequest
    bad_images: BadImages
    watchdog: Watchdog
    evaluated: set[int]
    """Steps of which the folder has an evaluation."""
    best: tuple[float, int] = (-1.0, 0)
    """Highest top-1 so far, in percent, and the step of it."""
    interval: Interval = field(default_factory=Interval)
    evaluations: int = 0

    def train(self, start: Position) -> None:
        """Train from ``start`` to the last step, or until ``stop`` says so, and then why."""
        args, backend, reports = self.args, self.backend, self.reports
        step, first_batch = start.step, start.images_in_epoch // args.batch_size
        self.model.train()
        if step >= self.last_step:
            self._spare_best()
            self.saver.tidy()
        if self._owes_evaluation(start) and not self._evaluate(start):
            return

        for epoch in range(start.epoch, args.num_epochs):
            if step >= self.last_step:
                break
            batch = first_batch
            self.interval = Interval()
            with contextlib.closing(self._batches(epoch, first_batch)) as batches:
                for micro_batches in batches:
                    lr = self.schedule.lr(epoch * len(self.train_loader) + batch)
                    is_first = step == start.step
                    with self._first_run("training step", is_first), self.profiler.around(step + 1):
                        loss = forward_backward(self.model, backend, step, micro_batches)
                        norm, skipped = backend.optimizer_step(lr, args.clip_grad_norm, loss)
                    step, batch = step + 1, batch + 1
                    self.interval.steps += 1
                    self.watchdog.alive()

                    if is_first or step % args.log_step_interval == 0 or step == self.last_step:
                        values = {"loss": loss, "grad_norm": norm, "skipped": skipped}
                        self._log(step, epoch, lr, is_first, values)
                    reports.step_done()
                    if is_first:
                        self.stop.first_step_done()

                    if step >= self.last_step:
                        break
                    at = self._position(step, epoch, batch)
                    if self._must_stop():
                        self._save_stopped(at)
                        return
                    if args.ckpt_step_interval and step % args.ckpt_step_interval == 0:
                        self._save(at)
                        self.interval = Interval()
                    if args.test_step_interval and step % args.test_step_interval == 0:
                        if not self._evaluate(at):
                            return
                        self.interval = Interval()

            first_batch = 0
            at, is_last = self._position(step, epoch, batch), step >= self.last_step
            if is_last and self._diverged():
                return
            if is_last or (epoch + 1) % args.ckpt_epoch_interval == 0:
                self._save(at, must=is_last)
            if self._owes_evaluation(at) and not self._evaluate(at):
                return

    # -- where the run stands -------------------------------------------------------------

    def _position(self, step: int, epoch: int, batches_done: int) -> Position:
        if batches_done == len(self.train_loader):  # the next epoch's start
            return Position(step, epoch + 1, 0)
        return Position(step, epoch, batches_done * self.args.batch_size)

    def _owes_evaluation(self, at: Position) -> bool:
        """Whether this step is one to be evaluated after, and has not been."""
        if at.step in self.evaluated:
            return False
        if at.step >= self.last_step:
            return True
        if at.step and at.images_in_epoch == 0 and at.epoch % self.args.test_epoch_interval == 0:
            return True
        interval = self.args.test_step_interval
        return bool(at.step and interval and at.step % interval == 0)

    def _must_stop(self) -> bool:
        limit = self.args.max_bad_steps
        if limit and self.reports.longest_row_skipped >= limit:
            self.stop.ask(NOT_FINITE)
        return self.stop.due()

    def _diverged(self) -> bool:
        """Whether the last steps were too many that were not finite; the same in all processes."""
        self.reports.flush()
        limit = self.args.max_bad_steps
        if limit and self.reports.longest_row_skipped >= limit:
            self.stop.number = NOT_FINITE
        return self.stop.number == NOT_FINITE

    # -- batches, logs, checkpoints, evaluations ------------------------------------------

    def _put(self, batch: Batch) -> list[Batch]:
        return put_micro_batches(self.backend, batch, self.args.grad_accum_steps)

    def _batches(self, epoch: int, first_batch: int) -> Generator[list[Batch]]:
        """Batches on the devices, with the time spent waiting for them added up."""
        loader = self.train_loader
        source = loader.epoch(epoch, first_batch)
        with contextlib.closing(prefetch(source, self._put, loader.prefetch_depth)) as ready:
            while True:
                asked = time.perf_counter()
                batch = next(ready, None)
                if batch is None:
                    return
                self.interval.waited += time.perf_counter() - asked
                yield batch

    @contextlib.contextmanager
    def _first_run(self, what: str, is_first: bool) -> Iterator[None]:
        """Around what may run for the first time: say that it compiles, and for how long."""
        if not (is_first and self.backend.compiles):
            yield
            return
        self.watchdog.rest()
        with self.reports.compiling(what):
            yield
            self.backend.wait()

    def _log(
        self, step: int, epoch: int, lr: float, is_first: bool, values: dict[str, torch.Tensor]
    ) -> None:
        # The first step's time is the compiler's: it says nothing of the pace.
        pace = None if is_first else self.interval
        self.reports.log(step, epoch + 1, lr, pace, self.backend.read(values))
        self.bad_images.collect([self.train_loader])
        self.interval = Interval()

    def _save(self, at: Position, *, must: bool = False) -> None:
        self.reports.flush()
        self.watchdog.alive()
        self._spare_best()
        self.saver.save(at, must=must)

    def _spare_best(self) -> None:
        if self.args.ckpt_best and self.best[1]:
            self.saver.spared = folder_of(self.saver.ckpt_dir, self.best[1])

    def _save_stopped(self, at: Position) -> None:
        if self.stop.number != NOT_FINITE:
            self._save(at, must=True)

    def _evaluate(self, at: Position) -> bool:
        """Evaluate; if a signal stops that, save in its place and return False."""
        args, loader = self.args, self.val_loader
        batches = min(args.eval_batches or len(loader), len(loader))
        with (
            self._first_run("evaluation", self.evaluations == 0),
            self.reports.evaluating(batches) as bar_moves,
        ):

            def batch_done() -> bool:
                bar_moves()
                if self.evaluations:
                    self.watchdog.alive()
                return self.stop.due()

            result = evaluate(self.model, loader, self.backend, batches, batch_done)
        self.evaluations += 1
        self.watchdog.alive()
        if result is None:
            self._save_stopped(at)
            return False
        self.bad_images.collect([loader])
        epoch = at.epoch + 1 if at.images_in_epoch or not at.epoch else at.epoch
        self.reports.evaluation(at.step, epoch, result.loss, result.top1, result.images)
        self.evaluated.add(at.step)
        if result.top1 > self.best[0]:
            self.best = result.top1, at.step
            if args.ckpt_best:
                self._save(at)
        return True
