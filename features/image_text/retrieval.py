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
from training.backend import scan_eagerly
from training.logs.records import Evaluation
from training.processes import exchange

RANKS = (1, 5, 10)
"""The numbers k of recall@k."""
IMAGE_TO_TEXT, TEXT_TO_IMAGE = "image_to_text", "text_to_image"


class EmbeddedPairs(NamedTuple):
    """Images of this process with their texts, on the host. No other process has the same
    images."""

    numbers: torch.Tensor
    """(images,), int64: the number of each in its split."""
    images: torch.Tensor
    """(images, width), fp32, of length 1."""
    texts: torch.Tensor
    """(images, texts, width), fp32, of length 1."""
    text_ids: torch.Tensor
    """(images, texts), int64: equal for equal texts."""
    exists: torch.Tensor
    """(images, texts), boolean: an image may have fewer texts than others, but has the first."""


def ids_of_texts(tokens: np.ndarray) -> np.ndarray:
    """Return checksums of texts, (...), int64, given their tokens, (..., length)."""
    rows = tokens.reshape(-1, tokens.shape[-1])
    ids = [xxhash.xxh3_64_intdigest(row.tobytes()) for row in rows]
    return np.array(ids, np.uint64).view(np.int64).reshape(tokens.shape[:-1])


@dataclass(frozen=True)
class PairEvaluation(Evaluation):
    """The loss of all pairs compared with each other, and recalls in percent."""

    texts: int = 0
    """The number of different texts."""
    recalls: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """By direction, recall@k by k: of images among all different texts, and of these texts among
    all images; {} without pairs."""

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


def evaluate_pairs(mine: EmbeddedPairs, kind: str, scale: float, bias: float) -> PairEvaluation:
    """Return the loss and the recalls of the pairs of all processes; all must call it. ``kind``,
    ``scale`` and ``bias``: of the loss."""
    images = sum(exchange.all_gather_object(len(mine.numbers)))
    if not images:
        return PairEvaluation(float("nan"))
    links = Links.of(mine)
    return PairEvaluation(
        loss_of_all(mine, kind, scale, bias),
        images=images,
        texts=links.shown_by.shape[1],
        recalls={
            IMAGE_TO_TEXT: recalls(ranks(links.images, links.texts, links.pairs)),
            TEXT_TO_IMAGE: recalls(ranks(links.texts, links.images, links.pairs.flip(0))),
        },
    )


# -- the loss --------------------------------------------------------------------------------------


class _Processes:
    """The processes of a run as ``loss.Replicas``: each has its pairs on its host."""

    scan = staticmethod(scan_eagerly)

    @staticmethod
    def all_gather(values: torch.Tensor) -> torch.Tensor:
        if exchange.count() == 1:
            return values
        parts = [torch.empty_like(values) for _ in range(exchange.count())]
        dist.all_gather(parts, values.contiguous())
        return torch.cat(parts)


def loss_of_all(mine: EmbeddedPairs, kind: str, scale: float, bias: float) -> float:
    """Return the loss of the images of all processes and their first texts, each compared with all
    others; all must call it."""
    counts = exchange.all_gather_object(len(mine.numbers))
    ids = padded(mine.numbers, max(counts), PADDING)[None].int()
    images, texts = (padded(x, max(counts))[None] for x in (mine.images, mine.texts[:, 0]))
    ones = torch.ones(ids.shape)
    pairs = Pairs(images, texts, scale * ones, bias * ones)
    processes = _Processes()
    found = contrast(kind, pairs, ids, sum(counts), processes, padded=True, gradients=False)
    return float(processes.all_gather(found.loss[None]).mean())


def padded(values: torch.Tensor, length: int, fill: float = 0) -> torch.Tensor:
    """Return ``values`` with ``length`` rows, of which those added are ``fill``."""
    more = values.new_full((length - len(values), *values.shape[1:]), fill)
    return torch.cat([values, more])


# -- different images and texts, and which belong together -----------------------------------------


class Items(NamedTuple):
    """Images or texts of this process; no two of all processes are the same."""

    numbers: torch.Tensor
    """(items,), int64: from 0 on, over all processes."""
    embeddings: torch.Tensor
    """(items, width), fp32, of length 1."""


class Links(NamedTuple):
    """Which images and texts belong together."""

    images: Items
    texts: Items
    pairs: torch.Tensor
    """The numbers of the image and of the text of each pair of all processes, (2, pairs),
    int64."""
    shown_by: torch.Tensor
    """Of each text, by number, an image that has it, by its number in the split, and its place
    among the texts of that image, (2, texts), int64."""

    @classmethod
    def of(cls, mine: EmbeddedPairs) -> Links:
        """Return those of all processes; all must call it."""
        of_image = mine.numbers[:, None].expand(mine.exists.shape)[mine.exists]
        place = torch.arange(mine.exists.shape[1]).expand(mine.exists.shape)[mine.exists]
        ids = mine.text_ids[mine.exists]
        of_images, places, of_texts = (torch.cat(gathered(x)) for x in (of_image, place, ids))
        numbers = [x.unique(return_inverse=True)[1] for x in (of_images, of_texts)]
        _, first = np.unique(of_texts.numpy(), return_index=True)
        return cls(
            items(mine.numbers, mine.images),
            items(ids, mine.texts[mine.exists]),
            torch.stack(numbers),
            torch.stack([of_images, places])[:, torch.from_numpy(first)],
        )


def items(ids: torch.Tensor, embeddings: torch.Tensor) -> Items:
    """Return the different ones of this process's images or texts, in the order of their ids,
    without those that an earlier process has, too; all must call it. ``ids``: (items,), int64."""
    by_process = gathered(ids)
    _, first = np.unique(torch.cat(by_process).numpy(), return_index=True)
    start = sum(map(len, by_process[: exchange.rank()]))
    is_mine = (first >= start) & (first < start + len(ids))
    places = torch.from_numpy(first[is_mine] - start)
    return Items(torch.from_numpy(is_mine.nonzero()[0]), embeddings[places])


def gathered(values: torch.Tensor) -> list[torch.Tensor]:
    """Return the values of all processes, (n, ...) each, by rank; all must call it."""
    counts = exchange.all_gather_object(len(values))
    whole = _Processes.all_gather(padded(values, max(counts))[None])
    return [part[:count] for part, count in zip(whole, counts, strict=True)]


def chunks_of(mine: Items, queries: int) -> Iterator[Items]:
    """Yield the items of all processes, part by part, with the number PADDING for no item; all must
    consume all of it. ``queries``: how many items each part is compared with."""
    counts = exchange.all_gather_object([len(mine.numbers), queries])
    longest, most = map(max, zip(*counts, strict=True))
    width = mine.embeddings.shape[1]
    rows = rows_of_chunk(len(counts), max(longest, most), width)
    embeddings, numbers = padded(mine.embeddings, longest), padded(mine.numbers, longest, PADDING)
    for start in range(0, longest, rows):
        part = slice(start, start + rows)
        parts = (_Processes.all_gather(x[None, part]).flatten(0, 1) for x in (numbers, embeddings))
        yield Items(*parts)


# -- ranks -----------------------------------------------------------------------------------------


def ranks(queries: Items, candidates: Items, links: torch.Tensor) -> torch.Tensor:
    """Return, for each of this process's ``queries``, how many wrong candidates of all processes
    are at least as similar as the most similar right one, (queries,), int64. ``links``: the numbers
    of queries and candidates that belong together, (2, links), of all processes. All must call
    it."""
    last = int(links.max()) + 1
    row_of = torch.full((last,), -1)
    row_of[queries.numbers] = torch.arange(len(queries.numbers))
    asked, found = links[:, row_of[links[0]] >= 0]
    rows = row_of[asked]

    def compared() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield similarities to a part of the candidates, which of them are right, both (queries,
        candidates), and which exist, (candidates,)."""
        for part in chunks_of(candidates, len(queries.numbers)):
            exists = part.numbers != PADDING
            column_of = torch.full((last,), -1)
            column_of[part.numbers[exists]] = exists.nonzero()[:, 0]
            here = column_of[found] >= 0
            is_right = torch.zeros(len(queries.numbers), len(exists), dtype=torch.bool)
            is_right[rows[here], column_of[found[here]]] = True
            yield queries.embeddings @ part.embeddings.T, is_right, exists

    best = torch.full((len(queries.numbers),), -torch.inf)
    for similarities, is_right, _ in compared():
        best = torch.maximum(best, similarities.where(is_right, -torch.inf).amax(1))
    wrong = torch.zeros(len(queries.numbers), dtype=torch.int64)
    for similarities, is_right, exists in compared():
        # Not >=: a model that has diverged, whose similarities are not numbers, is never right.
        wrong += (~(similarities < best[:, None]) & ~is_right & exists).sum(1)
    return wrong


def recalls(ranks_here: torch.Tensor) -> dict[int, float]:
    """Return the recalls of the queries of all processes in percent, by k, given the ranks of this
    process's; all must call it."""
    counts = [len(ranks_here), *(int((ranks_here < k).sum()) for k in RANKS)]
    asked, *hits = map(sum, zip(*exchange.all_gather_object(counts), strict=True))
    return {k: 100 * hit / asked for k, hit in zip(RANKS, hits, strict=True)}
