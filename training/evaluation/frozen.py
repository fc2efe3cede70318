"""Evaluate a backbone by its frozen features, alone (``--eval_only``) or during training.

Features of images: k-NN, linear probes and the effective rank (``knn_and_probe.py``). Features of
patches: segmentation of a data set with masks (``segment.py``, imported only when needed).
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from data.source import DataSource, check_several_classes
from training.backend import Backend
from training.config import LogConfig
from training.data import dataset_request
from training.errors import BAD_IMAGES, UsageError, data_errors_as_usage_errors
from training.evaluation import knn_and_probe
from training.evaluation.features import Features, open_plainly
from training.evaluation.knn_and_probe import OfImages
from training.evaluation.report import report_folder
from training.evaluation.trained import adapt_trained, open_trained
from training.logs.bad_images import BadImages
from training.logs.records import FROZEN, KNN, PROBE, RANK, SEGMENT
from training.loop import Hook, Session, Training, last_epoch
from training.processes import exchange
from training.resolve import Run
from training.schedule import Position
from training.weights.adapt import Adapter
from training.weights.source import Source

if TYPE_CHECKING:
    from data.segmentation import MaskedSource
    from training.evaluation.segment import Segmentation

Result: TypeAlias = "OfImages | Segmentation"


class Measured(Protocol):
    """What an evaluation during training has found."""

    @property
    def values(self) -> dict[str, float]:
        """The figures by their names in records; {} if nothing could be measured."""


class FeatureEvalData(NamedTuple):
    """The data that features are computed on."""

    images: DataSource | None
    """For KNN, PROBE and RANK: the run's images, without augmentation."""
    masked: MaskedSource | None
    """For SEGMENT."""

    @property
    def first(self) -> DataSource:
        """Return the first source that exists."""
        first = self.images or self.masked
        assert first is not None
        return first


@data_errors_as_usage_errors()
def open_plain_images(run: Run, kinds: Collection[str]) -> DataSource:
    """Open the run's images, without augmentation, for evaluations of these ``kinds``. Raises
    UsageError."""
    images = open_plainly(run, labels=not {KNN, PROBE}.isdisjoint(kinds))
    check_several_classes(images)
    return images


@data_errors_as_usage_errors()
def open_images_with_masks(run: Run) -> MaskedSource:
    """Open the images of ``--segment_probe``. Raises UsageError."""
    from data.segmentation import open_masked

    return open_masked(dataset_request(run, augment=False))


def open_frozen(run: Run, kinds: Collection[str]) -> FeatureEvalData:
    """Open the data that evaluations of these ``kinds`` need. Raises UsageError."""
    of_images = not {RANK, KNN, PROBE}.isdisjoint(kinds)
    return FeatureEvalData(
        open_plain_images(run, kinds) if of_images else None,
        open_images_with_masks(run) if SEGMENT in kinds else None,
    )


# -- alone -----------------------------------------------------------------------------------------


def prepare_frozen(source: Source, run: Run) -> tuple[Run, Callable[[Run, Backend], None]]:
    """Return the run, and the function to run in every process. Raises UsageError."""
    use = run.config.use
    folder = report_folder(run) if use.eval_report else None
    asked = {RANK: use.rank, KNN: use.knn, PROBE: use.probe, SEGMENT: use.segment_probe}
    kinds = [kind for kind in FROZEN if asked[kind]]
    data = open_frozen(run, kinds)
    adapter = adapt_trained(source, run, data.images.classes if data.images else None)
    return run, functools.partial(_evaluate, adapter, data, kinds, folder)


@data_errors_as_usage_errors()
def _evaluate(
    adapter: Adapter,
    data: FeatureEvalData,
    kinds: list[str],
    folder: Path | None,
    run: Run,
    backend: Backend,
) -> None:
    use, results = run.config.use, list[Result]()
    model, bad_images, say = open_trained(adapter, data.first, run, backend)
    if data.images:
        say("computing features ...")
        features = Features(model, run, backend, data.images)
        of_images = knn_and_probe.measure(features, kinds, bad_images, say)
        assert of_images is not None  # nothing stops it
        results += _checked(of_images, bad_images, f"no image of {data.images.name} can be read")
    if data.masked:
        from training.evaluation import segment

        if data.images:
            bad_images = _open_masked(run, backend, data.masked, say)
        features = Features(model, run, backend, data.masked)
        picture = folder / segment.PICTURE if folder else None
        of_patches = segment.measure(features, bad_images, say, picture=picture)
        assert of_patches is not None
        results += _checked([of_patches], bad_images, _nothing(data.masked))
        if folder and backend.is_main:
            try:
                segment.write_table(of_patches, folder)
            except OSError as error:
                reason = error.strerror
                raise UsageError(f"cannot write to --eval_report {folder}: {reason}") from None
    for result in results:
        say(str(result))
    if folder:
        say(f"report on the classes: {folder}")
    if backend.is_main and use.json:
        print(json.dumps({k: v for result in results for k, v in result.values.items()}))


def _open_masked(
    run: Run, backend: Backend, masked: MaskedSource, say: Callable[[str], None]
) -> BadImages:
    """Return the unreadable images of a second source. Raises UsageError in all processes if the
    source differs between them."""
    exchange.check_alike(run, masked)
    say(f"data with masks: {masked}")
    return BadImages(run.config.data.max_bad_images, masked, is_main=backend.is_main)


def _nothing(masked: MaskedSource) -> str:
    return (
        f"{masked.name} has no usable image for training, or none for validation: the image must "
        "be readable, and its mask must have labels other than those of --segment_ignore"
    )


def _checked(results: Sequence[Result], bad_images: BadImages, nothing: str) -> Sequence[Result]:
    """Return the results. Raises UsageError in all processes if too few images could be read;
    ``nothing``: the message if there are no results."""
    bad_images.check()
    if not all(result.values for result in results):
        raise UsageError(nothing, agreed=True)
    return results


# -- in training -----------------------------------------------------------------------------------

Measure = Callable[[list[str], Callable[[], bool]], Sequence[Measured] | None]
"""Returns the results of evaluations of these kinds; None if the function that it calls after each
batch and part returned True."""


def kinds_in_training(log: LogConfig) -> list[str]:
    """Return the kinds of evaluations that a training run makes."""
    return [kind for kind, interval in _intervals(log, FROZEN).items() if interval]


def _intervals(log: LogConfig, kinds: Collection[str]) -> dict[str, int]:
    """Return the number of steps between evaluations of each of these kinds; 0: none are made."""
    intervals = {
        RANK: log.rank_every,
        KNN: log.knn_every,
        PROBE: log.probe_every,
        SEGMENT: log.segment_probe_every,
    }
    return {kind: intervals[kind] for kind in kinds}


def evaluations_of_images(training: Training, images: DataSource) -> Hook:
    """Return the hook that evaluates features of ``images`` during training. Must be called before
    the first step is recorded."""
    session, run = training.session, training.run
    features = Features(training.model, run, session.backend, images)

    def measure(kinds: list[str], part_done: Callable[[], bool]) -> Sequence[Result] | None:
        return knn_and_probe.measure(
            features, kinds, session.bad_images, session.reports.say, part_done
        )

    intervals = _intervals(session.config.log, (RANK, KNN, PROBE))
    return RegularEvaluations(session, intervals, measure, training.evaluated)


def evaluations_of_patches(training: Training, masked: MaskedSource) -> Hook:
    """Return the hook that evaluates segmentation during training. Must be called before the first
    step is recorded. Raises UsageError in all processes if the masks differ between them."""
    from training.evaluation import segment

    session, run = training.session, training.run
    backend, say = session.backend, session.reports.say
    bad_images = _open_masked(run, backend, masked, say)
    features = Features(training.model, run, backend, masked)

    def measure(kinds: list[str], part_done: Callable[[], bool]) -> Sequence[Result] | None:
        picture = run.log_dir / segment.PICTURE
        result = segment.measure(features, bad_images, say, part_done, picture)
        if result is None:
            return None
        why = bad_images.excess or ("" if result.values else _nothing(masked))
        if why:  # unlike unreadable training images, this does not end the run
            say(f"warning: no segmentation results: {why}")
            return []
        return [result]

    intervals = _intervals(session.config.log, (SEGMENT,))
    return RegularEvaluations(session, intervals, measure, training.evaluated)


@dataclass
class RegularEvaluations(Hook):
    """Evaluates the model, or its EMA if there is one, every so many steps and after the last."""

    session: Session
    intervals: Mapping[str, int]
    """By kind, the number of steps between evaluations; 0: none are made."""
    measure: Measure
    done: Mapping[str, Collection[int]]
    """By kind, the steps for which the run's folder has such an evaluation."""
    what: str = "evaluation of features"
    """For the log, if the first one compiles."""
    _is_first: bool = field(default=True, init=False)

    def reached(self, at: Position) -> None:
        session, config = self.session, self.session.config
        is_last = at.step >= session.last_step
        due = [
            kind
            for kind, interval in self.intervals.items()
            if interval and at.step
            if (at.step % interval == 0 or is_last) and at.step not in self.done[kind]
        ]
        if not due:
            return

        def part_done() -> bool:
            session.watchdog.alive()
            return session.stop.due()

        weights = session.backend.ema_weights if config.averages else contextlib.nullcontext
        with (
            weights(),
            session.first_run(self.what, self._is_first),
            session.reports.events.span("eval"),
        ):
            results = self.measure(due, part_done)
        self._is_first = False
        session.watchdog.alive()
        if results is None:
            return
        if session.bad_images.excess:
            session.stop.exit_code = BAD_IMAGES
            return
        for result in results:
            text = str(result) if result.values else ""
            session.reports.record_evaluation(at.step, last_epoch(at), result.values, text)
        session.timer.restart()
