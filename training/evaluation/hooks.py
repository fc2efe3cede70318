"""The hook that evaluates the model during training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from training.checkpoints.inventory import folder_of
from training.errors import BAD_IMAGES, NOT_FINITE
from training.evaluation.evaluate import evaluate
from training.logs.bad_images import VAL
from training.logs.records import BEST
from training.loop import Hook, last_epoch

if TYPE_CHECKING:
    from torch import nn

    from data.loader import BatchLoader
    from training.checkpoints.hooks import Saves
    from training.logs.records import Evaluation
    from training.loop import Session
    from training.objectives.base import Objective
    from training.schedule import Position


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
