"""k-NN on frozen features: how well the nearest training images name a validation image's class.

The vote is DINO's (arXiv 2104.14294, appendix F.1): the k training images with the highest cosine
similarity s vote for their classes with weight exp(s / 0.07). Each process has the features of the
images that it has loaded, on its host, and compares those of all validation images with them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from data.source import DataSource
from training.backend import Backend, bad_data_is_the_users
from training.errors import BAD_IMAGES, UsageError
from training.features import Features, default_kind, fit_backbone, open_plainly
from training.initial_weights import InitialWeights
from training.logs.bad_images import TRAIN, VAL, BadImages
from training.logs.records import KnnAccuracy
from training.loop import Hook, Session, StepDone
from training.predict import place_trained, printer
from training.processes import exchange
from training.processes.exchange import check_alike
from training.resolve import Run
from training.weights import Weights, with_preprocessing_of

NEIGHBORS = (10, 20, 100, 200)
"""The numbers k of neighbors that vote."""
TEMPERATURE = 0.07
_SIMILARITIES = 2**25
"""How many similarities, in fp32, a process computes at a time: 128 MiB."""

Labelled = tuple[torch.Tensor, torch.Tensor]
"""Features of images, (images, width), of length 1 in fp32, and their labels, (images,), int64."""


def neighbors_of(images: int) -> list[int]:
    """Return ``NEIGHBORS``, each at most the number of training ``images``."""
    return [*dict.fromkeys(min(k, images) for k in NEIGHBORS)]


def knn(bank: Labelled, queries: Labelled, alive: Callable[[], None] = lambda: None) -> KnnAccuracy:
    """Return how many of the ``queries`` of all processes their neighbors among the ``bank`` of all
    processes name right.

    All processes must call it; ``alive`` is called after each part.
    """
    (keys, key_labels), (features, labels) = bank, queries
    most = int(key_labels.max()) if len(key_labels) else -1
    sizes = exchange.gather([len(keys), len(features), most])
    in_bank, asked = sum(each[0] for each in sizes), sum(each[1] for each in sizes)
    if not in_bank or not asked:
        return KnnAccuracy({}, asked, in_bank)
    classes, ks = 1 + max(each[2] for each in sizes), neighbors_of(in_bank)
    part = max(1, _SIMILARITIES // max(each[0] for each in sizes))
    right = torch.zeros(len(ks), dtype=torch.int64)
    for owner, (_, count, _) in enumerate(sizes):
        is_mine = owner == exchange.rank()
        for start in range(0, count, part):
            shape = (min(part, count - start), keys.shape[1])
            chunk = features[start : start + part] if is_mine else torch.empty(shape)
            found = _nearest(chunk, owner, bank, ks[-1])
            if found is not None:
                of_chunk = labels[start : start + part, None]
                right += (_votes(*found, ks, classes) == of_chunk).sum(dim=0)
            alive()
    totals = np.sum(exchange.gather(right.tolist()), axis=0)
    accuracy = {k: 100 * int(n) / asked for k, n in zip(ks, totals, strict=True)}
    return KnnAccuracy(accuracy, asked, in_bank)


def _nearest(
    chunk: torch.Tensor, owner: int, bank: Labelled, k: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the similarities and the labels of the ``k`` nearest of all processes' images to each
    of the ``owner``'s queries, (queries, k), the nearest first; None in other processes.

    ``chunk``: the queries in the owner, else a tensor of their shape.
    """
    keys, labels = bank
    several, is_mine = exchange.count() > 1, owner == exchange.rank()
    if several:
        chunk = chunk.contiguous()
        dist.broadcast(chunk, owner)
    near = torch.full((len(chunk), k), -torch.inf)
    near_labels = torch.zeros(len(chunk), k, dtype=torch.int64)
    here = min(k, len(keys))
    near[:, :here], places = (chunk @ keys.T).topk(here)
    near_labels[:, :here] = labels[places]
    if not several:
        return near, near_labels
    lists: list[list[torch.Tensor] | None] = [None, None]
    for i, mine in enumerate((near, near_labels)):
        if is_mine:
            lists[i] = [torch.empty_like(mine) for _ in range(exchange.count())]
        dist.gather(mine, lists[i], owner)
    if lists[0] is None or lists[1] is None:
        return None
    near, places = torch.cat(lists[0], dim=1).topk(k)
    return near, torch.cat(lists[1], dim=1).gather(1, places)


def _votes(
    similarities: torch.Tensor, labels: torch.Tensor, ks: Sequence[int], classes: int
) -> torch.Tensor:
    """Return the class that the first k of (queries, most) neighbors vote for, for each of ``ks``:
    (queries, len(ks))."""
    weights = (similarities / TEMPERATURE).exp()
    votes, found, counted = torch.zeros(len(labels), classes), [], 0
    for k in ks:
        votes.scatter_add_(1, labels[:, counted:k], weights[:, counted:k])
        counted = k
        found.append(votes.argmax(dim=1))
    return torch.stack(found, dim=1)


# -- of a model on its devices ---------------------------------------------------------------------


class KnnEvaluation:
    """Computes the features of training and validation images, and their k-NN accuracy."""

    def __init__(
        self, model: nn.Module, run: Run, backend: Backend, data: DataSource, images: BadImages
    ) -> None:
        """``data``: training images are not augmented. ``images``: counts the unreadable ones.

        Must be made before the first step is recorded.
        """
        self._kind, self._images = default_kind(run.model), images
        self._features = Features(model, run, backend, data, [self._kind])
        self._width = run.model.sizes.embed_dim

    def measure(
        self,
        say: Callable[[str], None],
        batch_done: Callable[[], bool | None] = lambda: None,
        alive: Callable[[], None] = lambda: None,
    ) -> KnnAccuracy | None:
        """Return the accuracy; None if ``batch_done``, called after each batch, returned True.

        ``alive`` is called at least every few seconds after that. All processes must call this.
        """
        stopped, labelled = False, {}

        def done() -> bool | None:
            nonlocal stopped
            stopped = bool(batch_done())
            return stopped

        for split in (TRAIN, VAL):
            loader, found = self._features.loader(split), list[torch.Tensor]()
            numbers = [np.zeros(0, np.int64)]
            for which, values in self._features.of(loader, done):
                numbers.append(which)
                found.append(F.normalize(values[self._kind], dim=1))
            if stopped:
                return None
            self._images.collect(split, loader, say)
            labels = np.asarray(self._features.data.splits[split].labels)[np.concatenate(numbers)]
            features = torch.cat([torch.zeros(0, self._width), *found])
            labelled[split] = features, torch.from_numpy(labels.astype(np.int64))
        return knn(labelled[TRAIN], labelled[VAL], alive)


# -- --eval_only --knn -----------------------------------------------------------------------------


def prepare_knn(weights: Weights, run: Run) -> tuple[Run, Callable[[Run, Backend], None]]:
    """Return the run with its data, and the body of every process. Raises UsageError."""
    weights, run = with_preprocessing_of(weights, run)
    data = open_plainly(run)
    return run, functools.partial(_evaluate_knn, weights, fit_backbone(weights, run, data), data)


@bad_data_is_the_users()
def _evaluate_knn(
    weights: Weights, initial: InitialWeights | None, data: DataSource, run: Run, backend: Backend
) -> None:
    say = printer(backend, json=run.config.use.json)
    check_alike(run, data)
    say(f"data: {data}")
    images = BadImages(run.config.data.max_bad_images, data, is_main=backend.is_main)
    model = place_trained(weights, run, backend, say, initial)
    evaluation = KnnEvaluation(model, run, backend, data, images)
    say(backend.describe())
    say("computing features" + (" (compiling takes a while) ..." if backend.compiles else " ..."))
    result = evaluation.measure(say)
    assert result is not None  # nothing stops it
    if images.excess:
        raise UsageError(images.excess, agreed=True)
    if not result.top1:
        raise UsageError(f"no image of {data.name} can be read", agreed=True)
    say(str(result))
    if backend.is_main and run.config.use.json:
        print(json.dumps(result.values))


# -- --knn_every -----------------------------------------------------------------------------------


@dataclass
class KnnEvaluations(Hook):
    """Evaluates the model, or its EMA if there is one, after every ``every`` steps and the last."""

    session: Session
    evaluation: KnnEvaluation
    every: int
    _count: int = field(default=0, init=False)

    def after_step(self, done: StepDone) -> None:
        if done.at.step % self.every and not done.is_last:
            return
        session = self.session
        if session.config.ema.model_ema:
            with session.backend.ema_weights():
                result = self._measure()
        else:
            result = self._measure()
        if result is None:
            return
        if session.bad_images.excess:
            session.stop.exit_code = BAD_IMAGES
            return
        session.reports.knn(done.at.step, done.epoch + 1, result)
        session.timer.restart()

    def _measure(self) -> KnnAccuracy | None:
        session, is_first = self.session, self._count == 0

        def batch_done() -> bool:
            if not is_first:
                session.watchdog.alive()
            return session.stop.due()

        with session.first_run("k-NN evaluation", is_first), session.reports.events.span("eval"):
            result = self.evaluation.measure(
                session.reports.say, batch_done, session.watchdog.alive
            )
        self._count += 1
        session.watchdog.alive()
        return result
