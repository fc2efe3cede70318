"""Evaluations of a backbone by its frozen features, alone and in training: k-NN, linear probes, and
the effective rank (``rank.py``), which needs no labels.

The features of all training and validation images are computed on the devices, once for all three.
Each process then has those of the images that it has loaded, on its host.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from data.source import DataSource
from training.backend import Backend, data_errors_as_usage_errors
from training.errors import BAD_IMAGES, UsageError
from training.evaluation.evaluate import open_trained
from training.evaluation.features import CLASS, MEAN, Features, open_plainly
from training.evaluation.rank import MOST_IMAGES, FeatureRank, rank
from training.initial_weights import InitialWeights, fit_backbone
from training.logs.bad_images import TRAIN, VAL, BadImages
from training.logs.figures import spread
from training.logs.records import KNN, PROBE, RANK
from training.loop import Hook, Session, last_epoch
from training.processes import exchange
from training.resolve import Run
from training.schedule import Position
from training.weights import Weights


@dataclass(frozen=True)
class KnnAccuracy:
    """How many validation images their nearest training images name right."""

    top1: dict[int, float]
    """The percentage by the number k of neighbors that vote; empty without images."""
    images: int
    """How many validation images were asked about."""
    bank: int
    """How many training images they were compared with."""

    @property
    def values(self) -> dict[str, float]:
        """The figures by their names in records."""
        return {f"val_{KNN}_{k}": top1 for k, top1 in self.top1.items()}

    def __str__(self) -> str:
        by_k = ", ".join(f"{top1:.2f} % (k {k})" for k, top1 in self.top1.items())
        return f"k-NN on val: {by_k} of {self.images:,} images, by {self.bank:,} of train"


@dataclass(frozen=True)
class ProbeAccuracy:
    """How many validation images linear probes name right, which training images have trained."""

    top1: dict[float, float]
    """The percentage by learning rate; empty without images."""
    images: int
    """How many validation images were asked about."""
    trained_on: int
    """How many training images there were."""

    @property
    def best(self) -> float:
        """The learning rate of the best probe, the smallest one of those."""
        return max(self.top1, key=self.top1.__getitem__)

    @property
    def values(self) -> dict[str, float]:
        """The figures by their names in records."""
        if not self.top1:
            return {}
        return {f"val_{PROBE}": self.top1[self.best], f"val_{PROBE}_lr": self.best}

    def __str__(self) -> str:
        return (
            f"linear probe on val: {self.top1[self.best]:.2f} % of {self.images:,} images, trained "
            f"on {self.trained_on:,} of train, best with learning rate {self.best:g} of "
            f"{', '.join(f'{rate:g}' for rate in self.top1)}"
        )


Result = KnnAccuracy | ProbeAccuracy | FeatureRank
"""What an evaluation finds: ``values`` has its figures, none if no image could be read."""


class Labelled(NamedTuple):
    """Images of a split, those of this process: features and labels on the host."""

    numbers: torch.Tensor
    """The place of each in the split, int64."""
    features: torch.Tensor
    """(images, width), fp32."""
    labels: torch.Tensor
    """int64."""
    images: int
    """How many the split has, over all processes, with those that cannot be read."""


def measure(
    features: Features,
    by: Collection[str],
    bad_images: BadImages,
    say: Callable[[str], None],
    part_done: Callable[[], bool | None] = lambda: None,
) -> list[Result] | None:
    """Return what is found ``by`` KNN, PROBE and RANK, of class tokens, or else means of patches;
    None if ``part_done``, called after each batch and part, returned True. All processes must call
    this. RANK alone reads no more training images than it needs, and no others."""
    stopped = False
    kind = CLASS if features.run.model.has_class_token else MEAN

    def batch_done() -> bool:
        nonlocal stopped
        stopped = bool(part_done())
        return stopped

    by_split: list[Labelled] = []
    chosen = spread(MOST_IMAGES, len(features.data.splits[TRAIN]))
    for_rank_alone = set(by) == {RANK}
    for split in (TRAIN,) if for_rank_alone else (TRAIN, VAL):
        images = features.data.splits[split]
        few = for_rank_alone and len(chosen) < len(images)
        loader = features.loader(split, chosen if few else None)
        numbers = [torch.zeros(0, dtype=torch.int64)]
        values = [torch.zeros(0, features.run.model.sizes.embed_dim)]
        for batch_numbers, batch in features.compute(loader, [kind], batch_done):
            numbers.append(torch.from_numpy(batch_numbers))
            values.append(batch[kind])
        if stopped:
            return None
        place = torch.cat(numbers)
        labels = torch.from_numpy(np.asarray(images.labels)[place.numpy()].astype(np.int64))
        by_split.append(Labelled(place, torch.cat(values), labels, len(images)))
        bad_images.collect(split, loader, say)
    train, val = by_split[0], by_split[-1]
    results: list[Result | None] = []
    if RANK in by:
        results.append(rank(train.features[torch.isin(train.numbers, torch.tensor(chosen))]))
    if KNN in by:
        results.append(knn(train, val, part_done))
    if PROBE in by and None not in results:
        results.append(probe(train, val, features.run.config.seed, part_done))
    return None if None in results else cast(list[Result], results)


def _counts(train: Labelled, val: Labelled) -> tuple[list[tuple[int, int]], int]:
    """Return how many images of both each process has, and how many classes those of ``train`` are
    of: one more than their largest label. All processes must call it."""
    largest = int(train.labels.max()) if len(train.labels) else -1
    counts = exchange.gather([len(train.labels), len(val.labels), largest])
    return [(trained, asked) for trained, asked, _ in counts], 1 + max(n for *_, n in counts)


# -- k-NN: how well the nearest training images name a validation image's class --------------------
#
# The vote is DINO's (arXiv 2104.14294, appendix F.1): the k training images with the highest cosine
# similarity s vote for their classes with weight exp(s / 0.07).

NEIGHBORS = (10, 20, 100, 200)
"""The numbers k of neighbors that vote, each at most the number of training images."""
TEMPERATURE = 0.07
_SIMILARITIES = 2**25
"""How many similarities, in fp32, a process computes at a time: 128 MiB."""


def knn(
    bank: Labelled, queries: Labelled, part_done: Callable[[], bool | None] = lambda: None
) -> KnnAccuracy | None:
    """Return how many of the ``queries`` of all processes their neighbors among the ``bank`` of all
    name right; None if ``part_done``, called after each part, returns True. All must call it."""
    sizes, classes = _counts(bank, queries)
    in_bank, asked = map(sum, zip(*sizes, strict=True))
    if not in_bank or not asked:
        return KnnAccuracy({}, asked, in_bank)
    ks = [*dict.fromkeys(min(k, in_bank) for k in NEIGHBORS)]
    most, here = ks[-1], min(ks[-1], len(bank.features))
    part = max(1, _SIMILARITIES // max(trained for trained, _ in sizes))
    lengths = bank.features.norm(dim=1).clamp(min=1e-12)
    right = torch.zeros(len(ks), dtype=torch.int64)
    for owner, (_, count) in enumerate(sizes):
        is_mine = owner == exchange.rank()
        for start in range(0, count, part):
            # Some queries of the owner, of length 1, to all processes.
            chunk = torch.empty(min(part, count - start), bank.features.shape[1])
            if is_mine:
                chunk = F.normalize(queries.features[start : start + part], dim=1)
            if len(sizes) > 1:
                dist.broadcast(chunk, owner)

            # The nearest images here; in the owner then those of all processes, the nearest first.
            near = torch.full((len(chunk), most), -torch.inf)
            labels = torch.zeros(len(chunk), most, dtype=torch.int64)
            near[:, :here], places = (chunk @ bank.features.T).div_(lengths).topk(here)
            labels[:, :here] = bank.labels[places]
            if len(sizes) > 1:
                lists = [[torch.empty_like(x) for _ in sizes if is_mine] for x in (near, labels)]
                for x, gathered in zip((near, labels), lists, strict=True):
                    dist.gather(x, gathered or None, owner)
                if is_mine:
                    near, places = torch.cat(lists[0], dim=1).topk(most)
                    labels = torch.cat(lists[1], dim=1).gather(1, places)

            if is_mine:  # the votes of the first k, for each k
                weights = (near / TEMPERATURE).exp()
                votes, counted = torch.zeros(len(labels), classes), 0
                for place, k in enumerate(ks):
                    votes.scatter_add_(1, labels[:, counted:k], weights[:, counted:k])
                    counted = k
                    named = votes.argmax(dim=1)
                    right[place] += (named == queries.labels[start : start + part]).sum()
            if part_done():
                return None
    totals = torch.tensor(exchange.gather(right.tolist())).sum(dim=0).tolist()
    accuracy = {k: 100 * n / asked for k, n in zip(ks, totals, strict=True)}
    return KnnAccuracy(accuracy, asked, in_bank)


# -- Linear probes: how well one linear layer distinguishes the classes ----------------------------
#
# Several are trained at once, each with its own learning rate, and the best one on the validation
# images counts. They are trained on the hosts, by SGD with momentum and a cosine schedule. Features
# are standardized by the training images' mean and deviation, as the normalization without
# parameters before MAE's linear probe does (arXiv 2111.06377, appendix A.1).

RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""The learning rates, one for each probe."""
BATCH_SIZE = 1024
EPOCHS = 10
LEAST_STEPS = 500
"""Steps of few images, whose epochs are short."""
MOMENTUM = 0.9


def batches_of(images: int) -> tuple[int, int]:
    """Return how many images a batch has, of so many training images, and how many steps there are:
    ``EPOCHS``, and at least ``LEAST_STEPS``."""
    size = min(BATCH_SIZE, images)
    return size, max(LEAST_STEPS, EPOCHS * -(-images // size))


def epoch_order(seed: int, epoch: int, images: int) -> torch.Tensor:
    """Return the numbers of the training images in the random order of an epoch."""
    state = np.random.SeedSequence((seed, epoch)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0]) >> 1)
    return torch.randperm(images, generator=generator)


def probe(
    train: Labelled,
    val: Labelled,
    seed: int,
    part_done: Callable[[], bool | None] = lambda: None,
) -> ProbeAccuracy | None:
    """Train probes on the ``train`` images of all processes, and measure them on those of ``val``;
    None if ``part_done``, called after each step, returns True. All processes must call it. The
    seed and the images alone decide the batches."""
    sizes, classes = _counts(train, val)
    seen, asked = map(sum, zip(*sizes, strict=True))
    if not seen or not asked:
        return ProbeAccuracy({}, asked, seen)

    # Standardize: a feature that is the same for all images stays 0.
    parts = train.features.split(2**14)  # in fp64, part by part
    zeros = torch.zeros(train.features.shape[1], dtype=torch.float64)
    mean = _sum(sum((x.double().sum(dim=0) for x in parts), start=zeros)) / seen
    squares = ((x.double() - mean).square().sum(dim=0) for x in parts)
    variance = _sum(sum(squares, start=zeros)) / seen
    scale = torch.where(variance > 0, variance, 1.0).rsqrt().float()
    mean = mean.float()

    rates = torch.tensor(RATES)[:, None, None]
    # The last row is the bias: features have a 1 at the end.
    weights = torch.zeros(len(RATES), train.features.shape[1] + 1, classes)
    velocity = torch.zeros_like(weights)
    place_of = torch.full((train.images,), -1)  # in this process, by the image's number
    place_of[train.numbers] = torch.arange(len(train.numbers))
    size, steps = batches_of(train.images)
    per_epoch = -(-train.images // size)
    for step in range(steps):
        epoch, index = divmod(step, per_epoch)
        if index == 0:
            order = epoch_order(seed, epoch, train.images)
        places = place_of[order[index * size : (index + 1) * size]]
        places = places[places >= 0]
        x = F.pad((train.features[places] - mean) * scale, (0, 1), value=1.0)
        # The gradient of the sum of the cross-entropies, of all probes at once.
        wrong = torch.matmul(x, weights).softmax(dim=-1)
        wrong[:, torch.arange(len(places)), train.labels[places]] -= 1.0
        gradient = _sum(torch.matmul(x.T, wrong))
        count = _sum(torch.tensor([float(len(places))]))
        velocity = MOMENTUM * velocity + gradient / count.clamp(min=1.0)
        weights -= rates * 0.5 * (1 + math.cos(math.pi * step / steps)) * velocity
        if part_done():
            return None

    right = torch.zeros(len(RATES))
    for start in range(0, len(val.labels), size):
        x = F.pad((val.features[start : start + size] - mean) * scale, (0, 1), value=1.0)
        logits, labels = torch.matmul(x, weights), val.labels[start : start + size]
        is_right = (logits.argmax(dim=-1) == labels) & logits.isfinite().all(dim=-1)
        right += is_right.sum(dim=1)
    top1 = (100 * _sum(right.double()) / asked).tolist()
    return ProbeAccuracy(dict(zip(RATES, top1, strict=True)), asked, seen)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over all processes."""
    if exchange.count() > 1:
        dist.all_reduce(values)
    return values


# -- --eval_only, with --knn, --probe or --rank ----------------------------------------------------


def prepare_frozen(weights: Weights, run: Run) -> tuple[Run, Callable[[Run, Backend], None]]:
    """Return the run with its data, and the body of every process. Raises UsageError."""
    use = run.config.use
    data = open_plainly(run, labels=use.knn or use.probe)
    initial = fit_backbone(weights, run, data.classes)
    return run, functools.partial(_evaluate, weights, initial, data)


@data_errors_as_usage_errors()
def _evaluate(
    weights: Weights, initial: InitialWeights | None, data: DataSource, run: Run, backend: Backend
) -> None:
    use = run.config.use
    model, bad_images, say = open_trained(weights, initial, data, run, backend)
    features = Features(model, run, backend, data)
    say("computing features ...")
    asked_for = {RANK: use.rank, KNN: use.knn, PROBE: use.probe}
    by = [name for name, asked in asked_for.items() if asked]
    results = measure(features, by, bad_images, say)
    assert results is not None  # nothing stops it
    bad_images.check()
    if not all(result.values for result in results):
        raise UsageError(f"no image of {data.name} can be read", agreed=True)
    for result in results:
        say(str(result))
    if backend.is_main and use.json:
        print(json.dumps({k: v for result in results for k, v in result.values.items()}))


# -- --knn_every, --probe_every and --rank_every ---------------------------------------------------


@dataclass
class FrozenEvaluations(Hook):
    """Evaluates the model, or its EMA if there is one, after so many steps, and after the last."""

    session: Session
    features: Features
    done: Mapping[str, Collection[int]]
    """By KNN, PROBE and RANK, the steps after which the run's folder has such an evaluation."""
    _is_first: bool = field(default=True, init=False)

    def reached(self, at: Position) -> None:
        session, config = self.session, self.session.config
        log = config.log
        intervals = {RANK: log.rank_every, KNN: log.knn_every, PROBE: log.probe_every}
        is_last = at.step >= session.last_step
        due = [
            name
            for name, interval in intervals.items()
            if interval and at.step and (at.step % interval == 0 or is_last)
            if at.step not in self.done[name]
        ]
        if not due:
            return

        def part_done() -> bool:
            if not self._is_first:
                session.watchdog.alive()
            return session.stop.due()

        weights = session.backend.ema_weights if config.averages else contextlib.nullcontext
        with (
            weights(),
            session.first_run("evaluation of features", self._is_first),
            session.reports.events.span("eval"),
        ):
            say, bad_images = session.reports.say, session.bad_images
            results = measure(self.features, due, bad_images, say, part_done)
        self._is_first = False
        session.watchdog.alive()
        if results is None:
            return
        if bad_images.excess:
            session.stop.exit_code = BAD_IMAGES
            return
        for result in results:
            text = str(result) if result.values else ""
            session.reports.record_evaluation(at.step, last_epoch(at), result.values, text)
        session.timer.restart()
