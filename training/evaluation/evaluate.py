"""Evaluation: measure the model on a validation set.

``Evaluations`` (``hooks.py``) decides when a training run evaluates; the objective
(``training/objectives``) decides what is measured. ``class_report.py`` reports results by class.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import nn

from data.loader import BatchLoader, prefetch
from data.source import DataSource
from training.backend import Backend
from training.evaluation.trained import place_trained, printer
from training.logs.bad_images import BadImages
from training.logs.records import Evaluation
from training.objectives.base import Measure
from training.processes.exchange import check_alike
from training.resolve import Run
from training.weights.adapt import Adapter

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
    stopped, pending = False, deque[Future]()
    with contextlib.closing(prefetch(source, put, loader.prefetch_depth)) as ready:
        for batch in ready:
            values = measure.of_batch(model, batch)
            backend.end_step()
            pending.append(backend.read(values))
            if len(pending) > _AHEAD:
                measure.add(pending.popleft().result())
            if batch_done():
                stopped = True
                break
    for future in pending:
        measure.add(future.result())
    model.train()
    return None if stopped else measure.result()


def open_trained(
    adapter: Adapter,
    data: DataSource,
    run: Run,
    backend: Backend,
) -> tuple[nn.Module, BadImages, Callable[[str], None]]:
    """Place trained weights on the devices; return the model, the unreadable images, and a function
    that prints a line. Raises UsageError in all processes if they differ."""
    say = printer(backend, json=run.config.use.json)
    check_alike(run, data)
    say(f"data: {data}")
    model = place_trained(adapter, run, backend, say)
    say(backend.describe())
    if backend.compiles:
        say("compiling takes a while ...")
    return model, BadImages(run.config.data.max_bad_images, data, is_main=backend.is_main), say
