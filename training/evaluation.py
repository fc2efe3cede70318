"""Loss and top-1 accuracy over a whole validation set, each image counted once."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from data.loader import BatchLoader
from data.sampler import PADDING
from training.backend import Backend
from training.prefetch import prefetch

_AHEAD = 8
"""Batches that the host may be ahead of the devices: enough that these never wait."""


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """Mean cross-entropy."""
    top1: float
    """Percent of images whose highest logit is their label."""
    images: int


@dataclass
class _Totals:
    """Sums over batches, added up on the host: exact, and no graph that depends on their number."""

    loss: float = 0.0
    correct: float = 0.0
    images: float = 0.0

    def add(self, values: Future[dict[str, list[float]]]) -> None:
        loss, correct, images = values.result()["totals"]
        self.loss, self.correct, self.images = (
            self.loss + loss, self.correct + correct, self.images + images
        )  # fmt: skip


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: BatchLoader,
    backend: Backend,
    batches: int = 0,
    batch_done: Callable[[], bool | None] = lambda: None,
) -> Evaluation | None:
    """Run the model over ``loader`` (0: all its batches); padding (label -1) counts for nothing.

    Returns None if ``batch_done``, called after each batch, says True: to stop.
    """
    model.eval()
    totals, pending = _Totals(), deque[Future]()
    source = itertools.islice(loader.epoch(0), batches or None)
    stopped = False
    with contextlib.closing(prefetch(source, backend.put, loader.prefetch_depth)) as ready:
        for images, labels in ready:
            logits = model(images).float()
            loss = F.cross_entropy(logits, labels, ignore_index=PADDING, reduction="sum")
            correct = (logits.argmax(dim=-1) == labels).sum()
            present = (labels != PADDING).sum()
            sums = backend.sum(torch.stack([loss, correct.float(), present.float()]))
            backend.end_step()
            pending.append(backend.read({"totals": sums}))
            if len(pending) > _AHEAD:
                totals.add(pending.popleft())
            if batch_done():
                stopped = True
                break
    for values in pending:
        totals.add(values)
    model.train()
    if stopped:
        return None
    count = totals.images or float("nan")  # where no image could be read
    return Evaluation(totals.loss / count, 100 * totals.correct / count, int(totals.images))
