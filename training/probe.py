"""Linear probes on frozen features: how well one linear layer distinguishes the classes by them.

Several are trained at once, each with its own learning rate, and the best one on the validation
images counts. They are trained on the hosts, by SGD with momentum and a cosine schedule. Features
are standardized by the training images' mean and deviation, as the normalization without parameters
before MAE's linear probe does (arXiv 2111.06377, appendix A.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from training.features import Labelled, counts_of
from training.logs.records import ProbeAccuracy
from training.processes import exchange

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
    return None if ``part_done``, called after each step, returns True.

    The seed and the images alone decide the batches: sums over processes are all that differs. All
    processes must call it.
    """
    sizes, classes = counts_of(train, val)
    seen, asked = map(sum, zip(*sizes, strict=True))
    if not seen or not asked:
        return ProbeAccuracy({}, asked, seen)
    width = train.features.shape[1]

    # Standardize: a feature that is the same for all images stays 0.
    mean = _sum_of_rows(train.features, lambda x: x) / seen
    variance = _sum_of_rows(train.features, lambda x: (x - mean).square()) / seen
    scale = torch.where(variance > 0, variance, 1.0).rsqrt().float()
    mean = mean.float()

    rates = torch.tensor(RATES)[:, None, None]
    weights = torch.zeros(len(RATES), width + 1, classes)  # the last row is the bias
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
        x = _with_one((train.features[places] - mean) * scale)
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
        x = _with_one((val.features[start : start + size] - mean) * scale)
        logits, labels = torch.matmul(x, weights), val.labels[start : start + size]
        is_right = (logits.argmax(dim=-1) == labels) & logits.isfinite().all(dim=-1)
        right += is_right.sum(dim=1)
    top1 = (100 * _sum(right.double()) / asked).tolist()
    return ProbeAccuracy(dict(zip(RATES, top1, strict=True)), asked, seen)


def _with_one(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, torch.ones(len(x), 1)], dim=1)


def _sum_of_rows(x: torch.Tensor, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the sum over all processes of ``of`` the rows of ``x``, in fp64, part by part."""
    total = torch.zeros(x.shape[1], dtype=torch.float64)
    for part in x.split(2**14):
        total += of(part.double()).sum(dim=0)
    return _sum(total)


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over all processes."""
    if exchange.count() > 1:
        dist.all_reduce(values)
    return values
