"""Evaluate a backbone by its frozen features: k-NN, linear probes, and the effective rank
(``rank.py``), which needs no labels.

The features of all training and validation images are computed on the devices, once for all three.
Each host then has the features of the images that its processes loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from training.evaluation.features import CLASS, MEAN, Features
from training.evaluation.rank import MOST_IMAGES, FeatureRank, rank
from training.logs.bad_images import TRAIN, VAL, BadImages
from training.logs.figures import spread
from training.logs.records import KNN, PROBE, RANK
from training.processes import exchange


@dataclass(frozen=True)
class KnnAccuracy:
    """How many validation images are classified correctly by their nearest training images."""

    top1: dict[int, float]
    """The accuracy in percent by the number k of neighbors that vote; empty without images."""
    images: int
    """How many validation images were asked about."""
    bank: int
    """The number of training images they were compared with."""

    @property
    def values(self) -> dict[str, float]:
        """The figures by their names in records."""
        return {f"val_{KNN}_{k}": top1 for k, top1 in self.top1.items()}

    def __str__(self) -> str:
        by_k = ", ".join(f"{top1:.2f} % (k {k})" for k, top1 in self.top1.items())
        return (
            f"k-NN on val: {by_k} of {self.images:,} images, compared with {self.bank:,} of train"
        )


@dataclass(frozen=True)
class ProbeAccuracy:
    """How many validation images are classified correctly by linear probes trained on training
    images."""

    top1: dict[float, float]
    """The accuracy in percent by learning rate; empty without images."""
    images: int
    """How many validation images were asked about."""
    trained_on: int
    """The number of training images."""

    @property
    def best(self) -> float:
        """The learning rate of the best probe; the smallest if several are equally good."""
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


class Labelled(NamedTuple):
    """This process's images of a split, or patches of images: features and labels on the host."""

    numbers: torch.Tensor
    """The index of each among all, int64."""
    features: torch.Tensor
    """(images, width), fp32."""
    labels: torch.Tensor
    """(images,), int64; for patches (patches, pixels), int16, negative for pixels without a
    label."""
    images: int
    """The number over all processes, including unreadable ones."""


OfImages = KnnAccuracy | ProbeAccuracy | FeatureRank
"""The result of an evaluation by features of images; ``values`` is empty if no image could be
read."""


class PartCheck:
    """Remembers whether ``part_done`` has ever returned True, to stop."""

    def __init__(self, part_done: Callable[[], bool | None]) -> None:
        self._part_done, self.stopped = part_done, False

    def __call__(self) -> bool:
        self.stopped = self.stopped or bool(self._part_done())
        return self.stopped


def measure(
    features: Features,
    by: Collection[str],
    bad_images: BadImages,
    say: Callable[[str], None],
    part_done: Callable[[], bool | None] = lambda: None,
) -> list[OfImages] | None:
    """Return the results of KNN, PROBE and RANK (those in ``by``), from class tokens, or else from
    means of patch tokens; None if ``part_done``, called after each batch and part, returned True.
    All processes must call this. RANK alone reads only the training images that it needs."""
    check = PartCheck(part_done)
    kind = CLASS if features.run.model.has_class_token else MEAN

    by_split: list[Labelled] = []
    chosen = spread(MOST_IMAGES, len(features.data.splits[TRAIN]))
    for_rank_alone = set(by) == {RANK}
    for split in (TRAIN,) if for_rank_alone else (TRAIN, VAL):
        images = features.data.splits[split]
        few = for_rank_alone and len(chosen) < len(images)
        loader = features.loader(split, chosen if few else None)
        numbers = [torch.zeros(0, dtype=torch.int64)]
        values = [torch.zeros(0, features.run.model.sizes.embed_dim)]
        for batch_numbers, batch in features.compute(loader, [kind], check):
            numbers.append(torch.from_numpy(batch_numbers))
            values.append(batch[kind])
        if check.stopped:
            return None
        place = torch.cat(numbers)
        labels = torch.from_numpy(np.asarray(images.labels)[place.numpy()].astype(np.int64))
        by_split.append(Labelled(place, torch.cat(values), labels, len(images)))
        bad_images.collect(split, loader, say)
    train, val = by_split[0], by_split[-1]
    results: list[OfImages | None] = []
    if RANK in by:
        results.append(rank(train.features[torch.isin(train.numbers, torch.tensor(chosen))]))
    if KNN in by:
        results.append(knn(train, val, part_done))
    if PROBE in by and None not in results:
        results.append(probe(train, val, features.run.config.seed, part_done))
    return None if None in results else cast(list[OfImages], results)


# -- k-NN: classify validation images by their nearest training images -----------------------------
#
# The vote is that of arXiv 2104.14294, appendix F.1: the k training images with the highest cosine
# similarity s vote for their classes with weight exp(s / 0.07).

NEIGHBORS = (10, 20, 100, 200)
"""The numbers k of neighbors that vote, each at most the number of training images."""
TEMPERATURE = 0.07
_SIMILARITIES = 2**25
"""The number of similarities, in fp32, that a process computes at a time: 128 MiB."""


def knn(
    bank: Labelled, queries: Labelled, part_done: Callable[[], bool | None] = lambda: None
) -> KnnAccuracy | None:
    """Return the accuracy of classifying all processes' ``queries`` by their neighbors in all
    processes' ``bank``; None if ``part_done``, called after each part, returns True. All processes
    must call it."""
    in_bank, asked = total(len(bank.labels)), total(len(queries.labels))
    if not in_bank or not asked:
        return KnnAccuracy({}, asked, in_bank)
    ks = [*dict.fromkeys(min(k, in_bank) for k in NEIGHBORS)]
    right = torch.zeros(len(ks), dtype=torch.int64)
    for part in votes(bank, queries.features, ks, count_classes(bank)):
        if part:
            start, part_votes = part
            labels = queries.labels[start : start + part_votes.shape[1]]
            right += (part_votes.argmax(dim=-1) == labels).sum(dim=1)
        if part_done():
            return None
    accuracy = {k: 100 * n / asked for k, n in zip(ks, sum_of(right).tolist(), strict=True)}
    return KnnAccuracy(accuracy, asked, in_bank)


def votes(
    bank: Labelled, queries: torch.Tensor, ks: Sequence[int], classes: int
) -> Iterator[tuple[int, torch.Tensor] | None]:
    """Yield how the nearest k of the ``bank`` of all processes vote on this process's ``queries``,
    (queries, width), part by part: the first query of a part, and the weights of the votes, (ks,
    queries, classes), for each of ``ks``, which ascend, each at most the size of the bank. None
    stands for a part of another process's queries. All processes must consume all of it."""
    sizes = exchange.all_gather_object([len(bank.labels), len(queries)])
    most, here = ks[-1], min(ks[-1], len(bank.features))
    in_memory = max(classes * len(ks), *(in_bank for in_bank, _ in sizes))
    part = max(1, _SIMILARITIES // in_memory)
    lengths = bank.features.norm(dim=1).clamp(min=1e-12)
    for owner, (_, count) in enumerate(sizes):
        is_mine = owner == exchange.rank()
        for start in range(0, count, part):
            # Send some normalized queries of the owner to all processes.
            chunk = torch.empty(min(part, count - start), bank.features.shape[1])
            if is_mine:
                chunk = F.normalize(queries[start : start + part], dim=1)
            if len(sizes) > 1:
                dist.broadcast(chunk, owner)

            # Find the nearest images here; the owner then merges those of all processes, nearest
            # first.
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
            if not is_mine:
                yield None
                continue
            weights = (near / TEMPERATURE).exp()
            by_k = torch.zeros(len(ks), len(chunk), classes)
            for k, its_votes in zip(ks, by_k, strict=True):
                its_votes.scatter_add_(1, labels[:, :k], weights[:, :k])
            yield start, by_k


# -- Linear probes: how well one linear layer distinguishes the classes ----------------------------
#
# Several probes are trained at once, each with its own learning rate; the best one on the
# validation images is reported. They are trained on the hosts, with SGD with momentum and a cosine
# schedule. Features are standardized by the mean and standard deviation of the training images,
# like the parameter-free normalization before MAE's linear probe (arXiv 2111.06377, appendix A.1).

RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""The learning rates, one per probe."""
BATCH_SIZE = 1024
EPOCHS = 10
LEAST_STEPS = 500
"""The minimum number of steps, for few images, whose epochs are short."""
MOMENTUM = 0.9


def batches_of(images: int) -> tuple[int, int]:
    """Return the batch size for this number of training images, and the number of steps:
    ``EPOCHS``, but at least ``LEAST_STEPS``."""
    size = min(BATCH_SIZE, images)
    return size, max(LEAST_STEPS, EPOCHS * -(-images // size))


def random_order(seed: int, number: int, count: int) -> torch.Tensor:
    """Return the integers below ``count`` in a random order that depends on ``number``: training
    images by epoch, patches by image."""
    state = np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)
    generator = torch.Generator().manual_seed(int(state[0]) >> 1)
    return torch.randperm(count, generator=generator)


def probe(
    train: Labelled,
    val: Labelled,
    seed: int,
    part_done: Callable[[], bool | None] = lambda: None,
) -> ProbeAccuracy | None:
    """Train probes on the ``train`` images of all processes, and evaluate them on the ``val``
    images; return None if ``part_done``, called after each step, returns True. All processes must
    call it. Batches depend only on the seed and the images."""
    seen, asked = total(len(train.labels)), total(len(val.labels))
    if not seen or not asked:
        return ProbeAccuracy({}, asked, seen)
    probes = train_probes(train, count_classes(train), seed, part_done)
    if probes is None:
        return None
    right = torch.zeros(len(RATES))
    for x, labels in zip(val.features.split(BATCH_SIZE), val.labels.split(BATCH_SIZE), strict=True):
        logits = probes.logits(x)
        is_right = (logits.argmax(dim=-1) == labels) & logits.isfinite().all(dim=-1)
        right += is_right.sum(dim=1)
    top1 = (100 * sum_of(right.double()) / asked).tolist()
    return ProbeAccuracy(dict(zip(RATES, top1, strict=True)), asked, seen)


class Probes(NamedTuple):
    """Linear layers on standardized features, one for each of ``RATES``."""

    mean: torch.Tensor
    """(width,)."""
    scale: torch.Tensor
    """One over the standard deviation, (width,)."""
    weights: torch.Tensor
    """(rates, width + 1, classes); the last row is the bias."""

    def standardized(self, features: torch.Tensor) -> torch.Tensor:
        """Return the input of the layers for features (rows, width): (rows, width + 1), with a 1 at
        the end."""
        return F.pad((features - self.mean) * self.scale, (0, 1), value=1.0)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Return logits (rates, rows, classes) for features (rows, width)."""
        return torch.matmul(self.standardized(features), self.weights)


def train_probes(
    train: Labelled, classes: int, seed: int, part_done: Callable[[], bool | None]
) -> Probes | None:
    """Train probes on the features of all processes with the mean cross-entropy; return None if
    ``part_done``, called after each step, returns True."""
    probes = _new_probes(train, classes)
    weights, velocity = probes.weights, torch.zeros_like(probes.weights)
    rates = torch.tensor(RATES)[:, None, None]
    place_of = torch.full((train.images,), -1)  # in this process, by image index
    place_of[train.numbers] = torch.arange(len(train.numbers))
    size, steps = batches_of(train.images)
    per_epoch = -(-train.images // size)
    for step in range(steps):
        epoch, index = divmod(step, per_epoch)
        if index == 0:
            order = random_order(seed, epoch, train.images)
        places = place_of[order[index * size : (index + 1) * size]]
        places = places[places >= 0]
        x = probes.standardized(train.features[places])
        targets = shares(train.labels[places], classes)
        # The gradient of the summed cross-entropies, for all probes at once.
        wrong = torch.matmul(x, weights).softmax(dim=-1)
        wrong = wrong * targets.sum(dim=1, keepdim=True) - targets
        gradient = sum_of(torch.matmul(x.T, wrong))
        weight = sum_of(targets.sum()[None])
        velocity = MOMENTUM * velocity + gradient / weight.clamp(min=1e-12)
        weights -= rates * 0.5 * (1 + math.cos(math.pi * step / steps)) * velocity
        if part_done():
            return None
    return probes


def _new_probes(train: Labelled, classes: int) -> Probes:
    """Return zero probes that standardize by the training features of all processes; constant
    features become 0."""
    parts = train.features.split(2**14)  # in fp64, part by part
    zeros = torch.zeros(train.features.shape[1], dtype=torch.float64)
    count = total(len(train.features))
    mean = sum_of(sum((x.double().sum(dim=0) for x in parts), start=zeros)) / count
    squares = ((x.double() - mean).square().sum(dim=0) for x in parts)
    variance = sum_of(sum(squares, start=zeros)) / count
    scale = torch.where(variance > 0, variance, 1.0).rsqrt().float()
    return Probes(mean.float(), scale, torch.zeros(len(RATES), len(mean) + 1, classes))


def shares(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the fraction of each class in the labels of each row, (rows,) or (rows, pixels), as
    (rows, classes), fp32. Negative labels are ignored."""
    labels = (labels[:, None] if labels.dim() == 1 else labels).long()
    counts = torch.zeros(len(labels), classes + 1)  # the first column: no class
    counts.scatter_add_(1, labels.clamp(min=-1) + 1, torch.ones(labels.shape))
    return counts[:, 1:] / labels.shape[1]


# -- Over all processes ----------------------------------------------------------------------------


def sum_of(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over all processes; all must call it."""
    if exchange.count() > 1:
        dist.all_reduce(values)
    return values


def total(count: int) -> int:
    """Return the sum of the counts of all processes; all must call it."""
    return sum(exchange.all_gather_object(count))


def count_classes(train: Labelled) -> int:
    """Return how many classes there are: one more than the largest label of all processes. All must
    call it."""
    return 1 + max(exchange.all_gather_object(int(train.labels.max()) if len(train.labels) else -1))
