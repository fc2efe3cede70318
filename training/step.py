"""A training step, shared by the loop, ``--compile_only``, ``--self_check`` and the benchmarks."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import nn

from data.loader import Batch
from training.backend import Backend, InitializeModule
from training.losses import Objective
from training.optimizers import updates_of
from training.resolve import Run


class Outcome(NamedTuple):
    """What a step leaves on the device, besides new weights."""

    loss: torch.Tensor
    """The mean over the global batch."""
    grad_norm: torch.Tensor
    """Before clipping."""
    skipped: torch.Tensor
    """The counts of steps skipped so far (``training.optimizers``)."""


def shard_and_optimize(
    run: Run, backend: Backend, initialize: InitializeModule | None = None
) -> nn.Module:
    """Build the model, fill it, shard it on the backend, and make its optimizer there.

    ``initialize`` fills it with other values than the run's first ones.
    """
    model = run.build_model(backend.constant)
    if initialize is None:
        initialize = functools.partial(run.model.initialize, seed=run.config.seed)
    optimizer = run.config.optimizer
    updates = updates_of(optimizer, run.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in updates)
    sharded = backend.shard(model, list(run.model.units(model)), initialize)
    assert optimizer.betas is not None  # resolved
    backend.build_optimizer(updates, betas=optimizer.betas, eps=optimizer.eps)
    return sharded


def put_micro_batches(backend: Backend, batch: Batch, count: int) -> list[Batch]:
    """Put a process's share of a batch on the devices, as ``count`` micro-batches."""
    images, labels = (part.chunk(count) for part in batch)
    return [backend.put(micro_batch) for micro_batch in zip(images, labels, strict=True)]


def forward_backward(
    model: nn.Module,
    objective: Objective,
    backend: Backend,
    step: int,
    micro_batches: list[Batch],
) -> torch.Tensor:
    """Leave the gradients of the mean loss over all micro-batches; return that loss."""
    count, losses = len(micro_batches), []
    for index, (images, labels) in enumerate(micro_batches):
        backend.begin_step(step * count + index)
        shown, targets = objective.example(images, labels, step * count + index)
        loss = objective.loss(model(shown), targets) / count
        losses.append(loss.detach())
        backend.backward(loss, is_last=index == count - 1)
    return backend.mean(sum(losses[1:], start=losses[0]))


def train_step(
    model: nn.Module,
    objective: Objective,
    backend: Backend,
    step: int,
    micro_batches: list[Batch],
    *,
    lr: float,
    max_norm: float,
) -> Outcome:
    """Update the weights once; ``step`` is the number of updates before."""
    loss = forward_backward(model, objective, backend, step, micro_batches)
    return Outcome(loss, *backend.optimizer_step(lr, max_norm, loss))
