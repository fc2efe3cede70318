"""k-NN on frozen features: how well the nearest training images name a validation image's class.

The vote is DINO's (arXiv 2104.14294, appendix F.1): the k training images with the highest cosine
similarity s vote for their classes with weight exp(s / 0.07). Each process has the features of the
images that it has loaded, on its host, and compares those of all validation images with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F

from training.features import Labelled, counts_of
from training.logs.records import KnnAccuracy
from training.processes import exchange

NEIGHBORS = (10, 20, 100, 200)
"""The numbers k of neighbors that vote."""
TEMPERATURE = 0.07
_SIMILARITIES = 2**25
"""How many similarities, in fp32, a process computes at a time: 128 MiB."""


def neighbors_of(images: int) -> list[int]:
    """Return ``NEIGHBORS``, each at most the number of training ``images``."""
    return [*dict.fromkeys(min(k, images) for k in NEIGHBORS)]


def knn(
    bank: Labelled, queries: Labelled, part_done: Callable[[], bool | None] = lambda: None
) -> KnnAccuracy | None:
    """Return how many of the ``queries`` of all processes their neighbors among the ``bank`` of all
    processes name right; None if ``part_done``, called after each part, returns True.

    All processes must call it.
    """
    sizes, classes = counts_of(bank, queries)
    in_bank, asked = map(sum, zip(*sizes, strict=True))
    if not in_bank or not asked:
        return KnnAccuracy({}, asked, in_bank)
    ks = neighbors_of(in_bank)
    part = max(1, _SIMILARITIES // max(here for here, _ in sizes))
    lengths = bank.features.norm(dim=1).clamp(min=1e-12)
    right = torch.zeros(len(ks), dtype=torch.int64)
    for owner, (_, count) in enumerate(sizes):
        is_mine = owner == exchange.rank()
        for start in range(0, count, part):
            shape = (min(part, count - start), bank.features.shape[1])
            chunk = torch.empty(shape)
            if is_mine:
                chunk = F.normalize(queries.features[start : start + part], dim=1)
            found = _nearest(chunk, owner, bank, lengths, ks[-1])
            if found is not None:
                of_chunk = queries.labels[start : start + part, None]
                right += (_votes(*found, ks, classes) == of_chunk).sum(dim=0)
            if part_done():
                return None
    totals = torch.tensor(exchange.gather(right.tolist())).sum(dim=0).tolist()
    accuracy = {k: 100 * n / asked for k, n in zip(ks, totals, strict=True)}
    return KnnAccuracy(accuracy, asked, in_bank)


def _nearest(
    chunk: torch.Tensor, owner: int, bank: Labelled, lengths: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the similarities and the labels of the ``k`` nearest of all processes' images to each
    of the ``owner``'s queries, (queries, k), the nearest first; None in other processes.

    ``chunk``: the queries in the owner, of length 1, else a tensor of their shape. ``lengths``: of
    the features of ``bank``.
    """
    several, is_mine = exchange.count() > 1, owner == exchange.rank()
    if several:
        dist.broadcast(chunk, owner)
    near = torch.full((len(chunk), k), -torch.inf)
    labels = torch.zeros(len(chunk), k, dtype=torch.int64)
    here = min(k, len(lengths))
    near[:, :here], places = (chunk @ bank.features.T).div_(lengths).topk(here)
    labels[:, :here] = bank.labels[places]
    if not several:
        return near, labels
    lists: list[list[torch.Tensor] | None] = [None, None]
    for i, mine in enumerate((near, labels)):
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
