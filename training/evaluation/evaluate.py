"""Evaluation: run the model on a validation set.

``Evaluations`` (``hooks.py``) decides when a training run evaluates; the objective
(``training/objectives``) decides what is measured.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from data.batch import Batch
from data.loader import BatchLoader, prefetch
from training.backend import Backend, Tensors
from training.logs.records import Evaluation
from training.objectives.base import OF_IMAGES, Measure, without_padding

_AHEAD = 8
"""How many batches the host may be ahead of the devices; enough that they never wait."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    measure: Measure,
    loader: BatchLoader,
    backend: Backend,
    batches: int = 0,
    batch_done: Callable[[], bool | None] = lambda: None,
) -> Evaluation | None:
    """Run the model on ``batches`` batches of ``loader`` (0: all) and return what ``measure``
    finds.

    Stops and returns None if ``batch_done``, called after each batch, returns True.
    """
    source = itertools.islice(loader.epoch(0), batches or None)
    put = functools.partial(backend.put, fields=loader.fields)
    model.eval()
    stopped = False
    pending: deque[tuple[Future, Future | None]] = deque()

    def compute(inputs: tuple[Batch, Tensors]) -> tuple[dict[str, Any], Tensors]:
        batch, measure.carried = inputs
        return measure.of_batch(model, batch), measure.carried

    def add_earliest() -> None:
        values, of_images = pending.popleft()
        arrived = values.result()
        if of_images is not None:
            arrived[OF_IMAGES] = without_padding(of_images.result())
        measure.add(arrived)

    with contextlib.closing(prefetch(source, put, loader.prefetch_depth)) as ready:
        for index, batch in enumerate(ready):
            inputs = (batch, measure.carried)
            values, measure.carried = backend.run_evaluation(compute, inputs, index)
            backend.end_step()
            of_images = values.pop(OF_IMAGES, None)
            pending.append(
                (backend.read(values), backend.read_images(of_images) if of_images else None)
            )
            if len(pending) > _AHEAD:
                add_earliest()
            if batch_done():
                stopped = True
                break
    while pending:
        add_earliest()
    model.train()
    return None if stopped else measure.result()
