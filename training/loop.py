"""The training loop, the same for every backend, top to bottom."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from data.loader import Batch, BatchLoader
from training import checkpoint
from training.backend import Backend
from training.checkpoint import Position
from training.evaluation import evaluate
from training.prefetch import prefetch
from training.profiling import StepProfiler
from training.reports import Interval, Reports
from training.schedule import WarmupCosine
from training.stopping import StopRequest


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
    last_step: int
    profiler: StepProfiler
    stop: StopRequest
    classes: list[str] | None
    """Names by label, for the checkpoints."""
    best: tuple[float, int] = (-1.0, 0)
    """Highest top-1 so far, in percent, and the step of it."""
    interval: Interval = field(default_factory=Interval)
    evaluated: bool = False
    saved: Path | None = None

    def train(self, start: Position) -> Path | None:
        """Train from ``start`` to the last step, or until a signal stops it.

        Returns the newest checkpoint written.
        """
        args, backend, reports = self.args, self.backend, self.reports
        step = start.step
        first_batch = start.images_in_epoch // args.batch_size
        self.model.train()

        for epoch in range(start.epoch, args.num_epochs):
            if step >= self.last_step:
                break
            batch_index = first_batch
            self.interval = Interval()
            with contextlib.closing(self._batches(epoch, first_batch)) as batches:
                for micro_batches in batches:
                    lr = self.schedule.lr(step)
                    is_first = step == start.step
                    with self._first_run("training step", is_first), self.profiler.around(step + 1):
                        loss = forward_backward(self.model, backend, step, micro_batches)
                        grad_norm = backend.optimizer_step(lr, args.clip_grad_norm)
                    step, batch_index = step + 1, batch_index + 1
                    self.interval.steps += 1

                    if is_first or step % args.log_step_interval == 0 or step == self.last_step:
                        # The first step's time is the compiler's: it says nothing of the pace.
                        pace = None if is_first else self.interval
                        values = backend.read({"loss": loss, "grad_norm": grad_norm})
                        reports.log(step, epoch + 1, lr, pace, values)
                        self.interval = Interval()
                    reports.step_done()
                    if is_first:
                        self.stop.first_step_done()

                    if step >= self.last_step:
                        break
                    if self.stop.due():
                        self._save(step, epoch, batch_index)
                        return self.saved
                    if args.ckpt_step_interval and step % args.ckpt_step_interval == 0:
                        self._save(step, epoch, batch_index)
                        self.interval = Interval()
                    if args.test_step_interval and step % args.test_step_interval == 0:
                        self._evaluate(step, epoch, batch_index)
                        self.interval = Interval()

            first_batch = 0
            is_last = step >= self.last_step
            if is_last or (epoch + 1) % args.ckpt_epoch_interval == 0:
                self._save(step, epoch, batch_index)
            if is_last or (epoch + 1) % args.test_epoch_interval == 0:
                self._evaluate(step, epoch, batch_index)
        return self.saved

    def evaluate_only(self, at: Position) -> None:
        """Evaluate a run that has nothing left to train."""
        epoch = at.epoch if at.images_in_epoch else at.epoch - 1
        self._evaluate(at.step, epoch, batches_done=None)

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
        with self.reports.compiling(what):
            yield
            self.backend.wait()

    def _save(self, step: int, epoch: int, batches_done: int) -> None:
        temporary, final = checkpoint.begin(Path(self.args.ckpt_dir), step)
        if self.saved == final:  # both intervals end here
            return
        if batches_done == len(self.train_loader):  # the position is the next epoch's start
            position = Position(step, epoch + 1, 0)
        else:
            position = Position(step, epoch, batches_done * self.args.batch_size)
        self.reports.flush()
        if self.backend.is_main:
            checkpoint.clear(temporary)
        self.backend.barrier()
        entries = checkpoint.training_tensors(position, vars(self.args), self.classes)
        self.backend.save(temporary, entries)
        self.backend.barrier()
        if self.backend.is_main:
            spared = final.with_name(f"step_{self.best[1]}") if self.args.ckpt_best else None
            checkpoint.finish(temporary, final, self.args.keep_checkpoints, spared)
        self.saved = final
        self.reports.say(f"checkpoint: {final}")

    def _evaluate(self, step: int, epoch: int, batches_done: int | None) -> None:
        with self._first_run("evaluation", not self.evaluated):
            result = evaluate(self.model, self.val_loader, self.backend)
        self.evaluated = True
        self.reports.evaluation(step, epoch + 1, result.loss, result.top1, result.images)
        if result.top1 > self.best[0]:
            self.best = result.top1, step
            if self.args.ckpt_best and batches_done is not None:
                self._save(step, epoch, batches_done)
