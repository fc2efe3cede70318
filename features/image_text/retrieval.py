"""Retrieval: how often the text of an image is among the texts most similar to it, and vice versa.

Computed on the hosts, over all pairs of an evaluation, exactly. Each process keeps the embeddings
of the pairs on its devices. Those of all processes pass by in chunks, as in the loss (``loss.py``):
no host ever has the matrix of all similarities, nor the embeddings of all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from data.batch import PADDING
from features.image_text.loss import Pairs, contrast, rows_of_chunk
from training.logs.records import Evaluation
from training.processes import exchange

RANKS = (1, 5, 10)
"""The numbers k of recall@k."""
IMAGE_TO_TEXT, TEXT_TO_IMAGE = "image_to_text", "text_to_image"


class EmbeddedPairs(NamedTuple):
    """Pairs of this process, in any order, on the host."""

    numbers: torch.Tensor
    """(pairs,), int64: the number of each pair in its split."""
    image_ids: torch.Tensor
    """(pairs,), int64: equal for pairs of the same image."""
    text_ids: torch.Tensor
    """(pairs,), int64: equal for pairs with the same text."""
    images: torch.Tensor
    """(pairs, width), fp32, of length 1."""
    texts: torch.Tensor
    """(pairs, width), fp32, of length 1."""


def ids_of_texts(tokens: np.ndarray) -> np.ndarray:
    """Return checksums of texts, (texts,) int64, given their tokens, (texts, length)."""
    rows = np.ascontiguousarray(tokens)
    return np.array([xxhash.xxh3_64_intdigest(row) for row in rows], np.uint64).view(np.int64)


@dataclass(frozen=True)
class PairEvaluation(Evaluation):
    """The loss of all pairs compared with each other, and recalls in percent."""

    texts: int = 0
    """The number of different texts."""
    recalls: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """By direction, recall@k by k: of images among all different texts, and of texts among all
    images; {} without pairs."""

    @property
    def values(self) -> dict[str, float]:
        found = {
            f"val_{direction}_r{k}": recall
            for direction, by_rank in self.recalls.items()
            for k, recall in by_rank.items()
        }
        if found:
            first = [by_rank[RANKS[0]] for by_rank in self.recalls.values()]
            found["val_recall_at_1"] = sum(first) / len(first)
        return super().values | found

    @property
    def quality(self) -> str:
        at = "/".join(map(str, RANKS))
        return ", ".join(
            f"{direction.replace('_', ' ')} recall@{at} "
            + "/".join(f"{by_rank[k]:.2f}" for k in RANKS)
            + " %"
            for direction, by_rank in self.recalls.items()
        )

    def __str__(self) -> str:
        if not self.recalls:
            return super().__str__()
        return f"{super().__str__()}, {self.quality}, {self.texts:,} different texts"


class Ranks(NamedTuple):
    """Where the right candidates of this process's queries are among all candidates."""

    queries: torch.Tensor
    """(queries,), the place of each query among this process's pairs."""
    ranks: torch.Tensor
    """(queries,), int64: how many wrong candidates are at least as similar as the most similar
    right one."""


class AllPairs:
    """The pairs of all processes: each has the embeddings of its own, and the numbers of all. All
    processes must call its methods alike."""

    def __init__(self, mine: EmbeddedPairs) -> None:
        longest = max(exchange.all_gather_object(len(mine.numbers)))
        fill = {"numbers": PADDING}
        self.mine = EmbeddedPairs(
            *(
                padded(values, longest, fill.get(name, 0))
                for name, values in zip(EmbeddedPairs._fields, mine, strict=True)
            )
        )
        numbers = self.all_gather(self.mine.numbers[None])
        # Processes that share images, each with other rows, have the same pairs: the first counts.
        flat = numbers.flatten().numpy()
        _, first = np.unique(flat, return_index=True)
        is_first = np.zeros(len(flat), bool)
        is_first[first] = True
        self._is_pair = torch.from_numpy(is_first & (flat != PADDING)).view(numbers.shape)
        self._numbers = numbers.where(self._is_pair, PADDING)
        self.count = int(self._is_pair.sum())
        """How many pairs all processes have."""

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all processes, (processes, ...), given this one's, (1, ...)."""
        if exchange.count() == 1:
            return values
        parts = [torch.empty_like(values) for _ in range(exchange.count())]
        dist.all_gather(parts, values.contiguous())
        return torch.cat(parts)

    def reduce_scatter(self, values: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("an evaluation has no gradients")

    def loss(self, kind: str, scale: float, bias: float) -> float:
        """Return the loss of all pairs, each compared with all others."""
        ones = torch.ones(1, len(self.mine.numbers))
        pairs = Pairs(self.mine.images[None], self.mine.texts[None], scale * ones, bias * ones)
        ids = self._numbers[exchange.rank()][None].int()
        of_mine, _ = contrast(kind, pairs, ids, self.count, self, padded=True, gradients=False)
        return float(self.all_gather(of_mine[None]).mean())

    def distinct(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the different ids of all pairs, (processes, pairs), from 0 on,
        PADDING where there is no pair. ``ids``: of this process's pairs, (pairs,)."""
        found = np.full(self._is_pair.shape, PADDING, np.int64)
        is_pair = self._is_pair.numpy()
        _, found[is_pair] = np.unique(
            self.all_gather(ids[None]).numpy()[is_pair], return_inverse=True
        )
        return torch.from_numpy(found)

    def first_of_each(self, distinct: torch.Tensor) -> torch.Tensor:
        """Return ``distinct`` with PADDING in place of all but the pair with the smallest number of
        each, (processes, pairs)."""
        flat, order = distinct.flatten().numpy(), self._numbers.flatten().numpy().argsort()
        values, first = np.unique(flat[order], return_index=True)
        kept = np.full(len(flat), PADDING, np.int64)
        kept[order[first]] = values
        return torch.from_numpy(kept).view(distinct.shape)

    def chunks(self, embeddings: torch.Tensor, numbers: torch.Tensor) -> Iterator[Chunk]:
        """Yield the embeddings of all processes and their numbers, part by part.

        ``embeddings``: this process's, (pairs, width); ``numbers``: of all, (processes, pairs).
        """
        count, width = embeddings.shape
        rows = rows_of_chunk(len(numbers), count, width)
        for start in range(0, count, rows):
            part = self.all_gather(embeddings[None, start : start + rows]).flatten(0, 1)
            yield Chunk(part, numbers[:, start : start + rows].flatten())


class Chunk(NamedTuple):
    """Some candidates of all processes."""

    embeddings: torch.Tensor
    """(candidates, width)."""
    numbers: torch.Tensor
    """(candidates,); PADDING is no candidate."""


def padded(values: torch.Tensor, length: int, fill: int) -> torch.Tensor:
    """Return ``values`` with ``length`` rows, of which those added are ``fill``."""
    more = values.new_full((length - len(values), *values.shape[1:]), fill)
    return torch.cat([values, more])


def ranks(pairs: AllPairs, direction: str, images: torch.Tensor, texts: torch.Tensor) -> Ranks:
    """Return the ranks of this process's queries: of each different image among all different
    texts, or vice versa. ``images``, ``texts``: the numbers of those of all pairs
    (``AllPairs.distinct``)."""
    asked, found, of_queries, candidates = images, texts, pairs.mine.images, pairs.mine.texts
    if direction == TEXT_TO_IMAGE:
        asked, found, of_queries, candidates = texts, images, candidates, of_queries
    own = pairs.first_of_each(asked)[exchange.rank()]
    places = (own != PADDING).nonzero()[:, 0]
    queries, shown = of_queries[places], pairs.first_of_each(found)

    # Which queries of this process belong to which candidates.
    row_of = torch.full((int(asked.max()) + 2,), -1)  # the last one is PADDING's
    row_of[own[places]] = torch.arange(len(places))
    rows, columns = row_of[asked.flatten()], found.flatten()
    belongs = (rows >= 0) & (columns != PADDING)
    rows, columns = rows[belongs], columns[belongs]

    def compared() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        column_of = torch.empty(int(found.max()) + 2, dtype=torch.int64)
        for chunk in pairs.chunks(candidates, shown):
            column_of.fill_(-1)
            column_of[chunk.numbers] = torch.arange(len(chunk.numbers))
            column_of[PADDING] = -1
            here = column_of[columns] >= 0
            matches = torch.zeros(len(queries), len(chunk.numbers), dtype=torch.bool)
            matches[rows[here], column_of[columns[here]]] = True
            yield queries @ chunk.embeddings.T, matches, chunk.numbers != PADDING

    best = torch.full((len(queries),), -torch.inf)
    for similarities, matches, _ in compared():
        best = torch.maximum(best, similarities.where(matches, -torch.inf).amax(1))
    wrong = torch.zeros(len(queries), dtype=torch.int64)
    for similarities, matches, exists in compared():
        # Not >=: a model that has diverged, whose similarities are not numbers, is never right.
        wrong += (~(similarities < best[:, None]) & ~matches & exists).sum(1)
    return Ranks(places, wrong)


def recalls(of_mine: Ranks) -> dict[int, float]:
    """Return the recalls of the queries of all processes in percent, by k; all must call it."""
    counts = [len(of_mine.ranks), *(int((of_mine.ranks < k).sum()) for k in RANKS)]
    asked, *hits = map(sum, zip(*exchange.all_gather_object(counts), strict=True))
    return {k: 100 * hit / asked for k, hit in zip(RANKS, hits, strict=True)}


def evaluate_pairs(mine: EmbeddedPairs, kind: str, scale: float, bias: float) -> PairEvaluation:
    """Return the loss and the recalls of the pairs of all processes; all must call it. ``kind``,
    ``scale`` and ``bias``: of the loss."""
    pairs = AllPairs(mine)
    if not pairs.count:
        return PairEvaluation(float("nan"))
    images, texts = pairs.distinct(pairs.mine.image_ids), pairs.distinct(pairs.mine.text_ids)
    return PairEvaluation(
        pairs.loss(kind, scale, bias),
        images=pairs.count,
        texts=1 + int(texts.max()),
        recalls={
            direction: recalls(ranks(pairs, direction, images, texts))
            for direction in (IMAGE_TO_TEXT, TEXT_TO_IMAGE)
        },
    )
