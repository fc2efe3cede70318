"""The training loop, the same for every backend, top to bottom."""

from __future__ import annotations

import argparse
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from torch import nn

from data.loader import BatchLoader
from training import checkpoint
from training.backend import Backend
from training.checkpoint import Position
from training.evaluation import evaluate
from training.prefetch import prefetch
from training.reports import Interval, Reports
from training.schedule import WarmupCosine


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

    def train(self, start: Position) -> Path | None:
        """Train from ``start`` to the last step; returns the newest checkpoint written."""
        args, backend, reports = self.args, self.backend, self.reports
        step, saved = start.step, None
        first_batch = start.images_in_epoch // args.batch_size
        compiled = evaluated = False
        self.model.train()

        for epoch in range(start.epoch, args.num_epochs):
            if step >= self.last_step:
                break
            interval = Interval()
            batches = prefetch(self.train_loader.epoch(epoch, first_batch), backend.put)
            batch_index = first_batch
            with contextlib.closing(batches):
                while True:
                    asked = time.perf_counter()
                    batch = next(batches, None)
                    if batch is None:
                        break
                    interval.waited += time.perf_counter() - asked
                    images, labels = batch
                    lr = self.schedule.lr(step)

                    with contextlib.ExitStack() as first_step:
                        if not compiled:
                            note = reports.compiling("training step", backend.device_count)
                            first_step.enter_context(note)
                        loss = F.cross_entropy(self.model(images).float(), labels)
                        backend.backward(loss)
                        loss = backend.mean(loss.detach())
                        grad_norm = backend.optimizer_step(lr, args.clip_grad_norm)
                        if not compiled:
                            backend.wait()

                    step, batch_index = step + 1, batch_index + 1
                    interval.steps += 1
                    if not compiled or step % args.log_step_interval == 0 or step == self.last_step:
                        if not compiled:
                            interval.steps = 0  # its time is the compiler's
                        reports.log(
                            step=step, epoch=epoch + 1, lr=lr, batch_size=args.batch_size,
                            devices=backend.device_count, interval=interval,
                            values=backend.read({"loss": loss, "grad_norm": grad_norm}),
                            counters=backend.counters(), memory=backend.memory(),
                        )  # fmt: skip
                        interval, compiled = Interval(), True
                    reports.step_done()

                    if step >= self.last_step:
                        break
                    if args.ckpt_step_interval and step % args.ckpt_step_interval == 0:
                        saved = self._save(step, epoch, batch_index)
                        interval = Interval()

            first_batch = 0
            done = step >= self.last_step or epoch + 1 == args.num_epochs
            if done or (epoch + 1) % args.ckpt_epoch_interval == 0:
                saved = self._save(step, epoch, batch_index)
            if done or (epoch + 1) % args.test_epoch_interval == 0:
                self._evaluate(step, epoch, compile_note=not evaluated)
                evaluated = True
        return saved

    def _save(self, step: int, epoch: int, batches_done: int) -> Path:
        if batches_done == len(self.train_loader):  # the position is the next epoch's start
            position = Position(step, epoch + 1, 0)
        else:
            position = Position(step, epoch, batches_done * self.args.batch_size)
        self.reports.flush()
        temporary, final = checkpoint.begin(Path(self.args.ckpt_dir), step)
        if self.backend.is_main:
            checkpoint.clear(temporary)
        self.backend.barrier("checkpoint folder cleared")
        self.backend.save(temporary, checkpoint.training_tensors(position, vars(self.args)))
        self.backend.barrier("checkpoint written")
        if self.backend.is_main:
            checkpoint.finish(temporary, final, self.args.keep_checkpoints)
        self.reports.say(f"checkpoint: {final}")
        return final

    def evaluate_only(self, at: Position) -> None:
        """Evaluate a run that has nothing left to train."""
        self._evaluate(at.step, at.epoch - 1 if at.images_in_epoch == 0 else at.epoch, True)

    def _evaluate(self, step: int, epoch: int, compile_note: bool) -> None:
        with contextlib.ExitStack() as first:
            if compile_note:
                note = self.reports.compiling("evaluation", self.backend.device_count)
                first.enter_context(note)
            result = evaluate(self.model, self.val_loader, self.backend)
        self.reports.evaluation(
            step=step, epoch=epoch + 1, loss=result.loss, top1=result.top1, images=result.images
        )
