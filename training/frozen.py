"""Evaluations of a backbone by its frozen features: k-NN and linear probes, alone and in training.

The features of all training and validation images are computed on the devices, once for both.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from torch import nn

from data.source import DataSource
from training.backend import Backend, bad_data_is_the_users
from training.checkpoints.format import Position
from training.errors import BAD_IMAGES, UsageError
from training.features import Features, Labelled, default_kind, fit_backbone, open_plainly
from training.initial_weights import InitialWeights
from training.knn import knn
from training.logs.bad_images import TRAIN, VAL, BadImages
from training.logs.records import KNN, PROBE, KnnAccuracy, ProbeAccuracy
from training.loop import Hook, Session, last_epoch
from training.predict import place_trained, printer
from training.probe import probe
from training.processes.exchange import check_alike
from training.resolve import Run
from training.weights import Weights, with_preprocessing_of

Accuracy = KnnAccuracy | ProbeAccuracy


class FrozenEvaluation:
    """Computes the features of training and validation images, and what they are good for."""

    def __init__(
        self, model: nn.Module, run: Run, backend: Backend, data: DataSource, images: BadImages
    ) -> None:
        """``data``: training images are not augmented. ``images``: counts the unreadable ones.

        Must be made before the first step is recorded.
        """
        self._kind, self._images = default_kind(run.model), images
        self._features = Features(model, run, backend, data, [self._kind])
        self._seed = run.config.seed

    def measure(
        self,
        by: Collection[str],
        say: Callable[[str], None],
        part_done: Callable[[], bool | None] = lambda: None,
    ) -> list[Accuracy] | None:
        """Return the accuracy ``by`` KNN and PROBE; None if ``part_done``, called after each batch
        and each part of what the hosts compute, returned True.

        All processes must call this.
        """
        found: dict[str, Labelled] = {}
        for split in (TRAIN, VAL):
            loader = self._features.loader(split)
            labelled = self._features.labelled(split, loader, self._kind, part_done)
            if labelled is None:
                return None
            self._images.collect(split, loader, say)
            found[split] = labelled
        probed = functools.partial(probe, seed=self._seed)
        results: list[Accuracy] = []
        for name, compute in ((KNN, knn), (PROBE, probed)):
            if name in by:
                result = compute(found[TRAIN], found[VAL], part_done=part_done)
                if result is None:
                    return None
                results.append(result)
        return results


# -- --eval_only, with --knn or --probe ------------------------------------------------------------


def prepare_frozen(weights: Weights, run: Run) -> tuple[Run, Callable[[Run, Backend], None]]:
    """Return the run with its data, and the body of every process. Raises UsageError."""
    weights, run = with_preprocessing_of(weights, run)
    data = open_plainly(run)
    return run, functools.partial(_evaluate, weights, fit_backbone(weights, run, data), data)


@bad_data_is_the_users()
def _evaluate(
    weights: Weights, initial: InitialWeights | None, data: DataSource, run: Run, backend: Backend
) -> None:
    use = run.config.use
    say = printer(backend, json=use.json)
    check_alike(run, data)
    say(f"data: {data}")
    images = BadImages(run.config.data.max_bad_images, data, is_main=backend.is_main)
    model = place_trained(weights, run, backend, say, initial)
    evaluation = FrozenEvaluation(model, run, backend, data, images)
    say(backend.describe())
    say("computing features" + (" (compiling takes a while) ..." if backend.compiles else " ..."))
    by = [name for name, asked in ((KNN, use.knn), (PROBE, use.probe)) if asked]
    results = evaluation.measure(by, say)
    assert results is not None  # nothing stops it
    if images.excess:
        raise UsageError(images.excess, agreed=True)
    if not all(result.top1 for result in results):
        raise UsageError(f"no image of {data.name} can be read", agreed=True)
    for result in results:
        say(str(result))
    if backend.is_main and use.json:
        print(json.dumps({k: v for result in results for k, v in result.values.items()}))


# -- --knn_every and --probe_every -----------------------------------------------------------------


@dataclass
class FrozenEvaluations(Hook):
    """Evaluates the model, or its EMA if there is one, after so many steps, and after the last."""

    session: Session
    evaluation: FrozenEvaluation
    done: Mapping[str, Collection[int]]
    """By KNN and PROBE, the steps after which the run's folder has such an evaluation."""
    _count: int = field(default=0, init=False)

    def reached(self, at: Position) -> None:
        session, config = self.session, self.session.config
        every = {KNN: config.log.knn_every, PROBE: config.log.probe_every}
        is_last = at.step >= session.last_step
        due = [
            name
            for name, interval in every.items()
            if interval and at.step and (at.step % interval == 0 or is_last)
            if at.step not in self.done[name]
        ]
        if not due:
            return
        weights = session.backend.ema_weights if config.averages else contextlib.nullcontext
        with weights():
            results = self._measure(due)
        if results is None:
            return
        if session.bad_images.excess:
            session.stop.exit_code = BAD_IMAGES
            return
        session.reports.frozen(at.step, last_epoch(at), results)
        session.timer.restart()

    def _measure(self, by: Collection[str]) -> list[Accuracy] | None:
        session, is_first = self.session, self._count == 0

        def part_done() -> bool:
            if not is_first:
                session.watchdog.alive()
            return session.stop.due()

        what = "evaluation of features"
        with session.first_run(what, is_first), session.reports.events.span("eval"):
            results = self.evaluation.measure(by, session.reports.say, part_done)
        self._count += 1
        session.watchdog.alive()
        return results
