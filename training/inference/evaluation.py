"""Computes loss and accuracy over a validation set, and decides when."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from data.loading.loader import Batch, BatchLoader
from data.loading.sampler import PADDING
from training.backend import Backend
from training.checkpoints.content import Position
from training.hosts.stopping import BAD_IMAGES
from training.inference.predictions import TOP, Predictions, classes_before
from training.logs.bad_images import VAL
from training.logs.metrics import Evaluation
from training.losses.objective import Objective
from training.options.config import LogConfig
from training.prefetch import prefetch
from training.session import Session

_AHEAD = 8
"""How many batches the host may be ahead of the devices: enough that these never wait."""


@dataclass
class _Totals:
    """Adds up sums over batches on the host: exact, and no graph depends on how many there are."""

    loss: float = 0.0
    correct: float = 0.0
    in_top5: float = 0.0
    images: float = 0.0
    predictions: Predictions | None = None
    labels: set[int] = field(default_factory=set)

    def passing(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches, on the host, and note which labels they have."""
        for images, labels in batches:
            self.labels.update(labels.tolist())
            yield images, labels

    def add(self, values: Future[dict[str, list[float]]]) -> None:
        read = values.result()
        loss, correct, in_top5, images = read["totals"]
        self.loss += loss
        self.correct += correct
        self.in_top5 += in_top5
        self.images += images
        if self.predictions is not None:
            self.predictions.add(read["images"])

    def evaluation(self) -> Evaluation:
        count = self.images or float("nan")  # where no image could be read
        top1, top5 = (100 * each / count for each in (self.correct, self.in_top5))
        seen = frozenset(self.labels)
        return Evaluation(self.loss / count, top1, top5, int(self.images), seen)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    objective: Objective,
    loader: BatchLoader,
    backend: Backend,
    batches: int = 0,
    batch_done: Callable[[], bool | None] = lambda: None,
    predictions: Predictions | None = None,
) -> Evaluation | None:
    """Run the model over ``loader`` (0: all its batches); padding (label -1) counts for nothing.

    Returns None if ``batch_done``, called after each batch, says True: to stop. ``predictions``
    collects what each image was taken for.
    """
    model.eval()
    totals, pending = _Totals(predictions=predictions), deque[Future]()
    source = totals.passing(itertools.islice(loader.epoch(0), batches or None))
    stopped = False
    with contextlib.closing(prefetch(source, backend.put, loader.prefetch_depth)) as ready:
        for images, labels in ready:
            logits = model(objective.normalize(images)).float()
            loss = F.cross_entropy(logits, labels, ignore_index=PADDING, reduction="sum")
            present, before = labels != PADDING, classes_before(logits, labels)
            counts = [(present & (before < most)).sum().float() for most in (1, TOP)]
            sums = backend.sum(torch.stack([loss, *counts, present.sum().float()]))
            values = {"totals": sums}
            if predictions is not None:
                values["images"] = predictions.of_batch(logits, labels, before)
            backend.end_step()
            pending.append(backend.read(values))
            if len(pending) > _AHEAD:
                totals.add(pending.popleft())
            if batch_done():
                stopped = True
                break
    for left in pending:
        totals.add(left)
    model.train()
    return None if stopped else totals.evaluation()


@dataclass
class Evaluations:
    """Evaluates the model after the steps and epochs that the flags name, and at the end."""

    config: LogConfig
    session: Session
    model: nn.Module
    objective: Objective
    loader: BatchLoader
    done: set[int]
    """The steps after which the run's folder has an evaluation."""
    best: float = -1.0
    """The highest top-1 so far, in percent; the EMA's, where there is one."""
    with_ema: bool = False
    """Whether the EMA of the weights is evaluated, too."""
    _count: int = field(default=0, init=False)

    def due_after_step(self, step: int) -> bool:
        interval = self.config.test_step_interval
        return bool(step and interval) and step % interval == 0

    def owed(self, at: Position) -> bool:
        """Tell whether the model is to be evaluated after this step, and has not been."""
        if at.step in self.done:
            return False
        if at.step >= self.session.last_step:
            return True
        if at.step and at.images_in_epoch == 0 and at.epoch % self.config.test_epoch_interval == 0:
            return True
        return self.due_after_step(at.step)

    def evaluate(self, at: Position) -> Evaluation | None:
        """Evaluate the model, and its EMA if there is one, and report it.

        Returns the evaluation by which the best checkpoint is chosen, the EMA's if there is one;
        None if a signal has stopped it, or too many images cannot be read.
        """
        session, ema = self.session, None
        result = self._measure()
        if result is None:
            return None
        if self.with_ema:
            with session.backend.averaged_weights():
                ema = self._measure()
            if ema is None:
                return None
        session.bad_images.collect(VAL, self.loader, session.reports.say)
        result = session.bad_images.left_out_of(result)
        if session.bad_images.excess:
            session.stop.number = BAD_IMAGES
            return None
        epoch = at.epoch + 1 if at.images_in_epoch or not at.epoch else at.epoch
        session.reports.evaluation(at.step, epoch, result, ema)
        self.done.add(at.step)
        return ema or result

    def _measure(self) -> Evaluation | None:
        """Evaluate the model with the weights that it has; return None if a signal has stopped."""
        session, count = self.session, len(self.loader)
        batches = min(self.config.eval_batches or count, count)
        with (
            session.first_run("evaluation", self._count == 0),
            session.reports.evaluating(batches) as bar_moves,
        ):

            def batch_done() -> bool:
                bar_moves()
                if self._count:
                    session.watchdog.alive()
                return session.stop.due()

            result = evaluate(
                self.model, self.objective, self.loader, session.backend, batches, batch_done
            )
        self._count += 1
        session.watchdog.alive()
        return result
