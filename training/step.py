"""A training step, the loaders and batches it consumes; used by training, tools, benchmarks."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from data.batch import Batch, Fields
from data.files import DataFolderError
from data.loader import BatchLoader, prefetch
from models.positions import set_rope_factors
from training.backend import Backend, InitializeModule, StepInputs
from training.objectives.base import Objective
from training.optimizers import Updates, updates_of
from training.schedule import Position, StepRates

if TYPE_CHECKING:
    from data.source import DataSource
    from training.resolve import Run


def shard_and_optimize(
    run: Run, backend: Backend, initialize: InitializeModule | None = None
) -> nn.Module:
    """Build the model, fill it, shard it on the backend, and create its optimizer there.
    ``initialize`` fills it; by default with the run's random initial weights."""
    if initialize is None:
        initialize = functools.partial(run.model.initialize, seed=run.config.seed)
    optimizer, heads_first = run.config.optimizer, run.config.schedule.freeze_backbone_epochs > 0
    updates = updates_of(optimizer, run.model, heads_first=heads_first)
    sharded = shard(run, backend, initialize, updates)
    assert optimizer.betas is not None  # resolved
    backend.build_optimizer(updates, betas=optimizer.betas, eps=optimizer.eps)
    return sharded


def shard(run: Run, backend: Backend, initialize: InitializeModule, updates: Updates) -> nn.Module:
    """Build the model, let ``initialize`` fill it, and shard it on the backend, together with its
    teacher. Parameters that are not in ``updates`` are frozen."""
    model = run.build_model(backend.constant)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in updates)
    sharded = backend.shard(model, list(run.model.units(model)), initialize)
    if run.config.objective.has_teacher:
        teacher = run.build_model(backend.constant).requires_grad_(False)
        backend.shard_frozen(run, teacher, initialize)
    return sharded


def train_step(
    model: nn.Module,
    objective: Objective,
    backend: Backend,
    step: int,
    micro_batches: list[Batch],
    *,
    rates: StepRates,
    max_norm: float,
) -> dict[str, torch.Tensor]:
    """Update the weights once; ``step`` is the number of previous updates. Returns, on the device,
    the mean "loss", "grad_norm" before clipping, the counts "skipped" and ``Objective.parts``."""
    objective.begin_step(rates)

    def compute(inputs: StepInputs) -> dict[str, torch.Tensor]:
        if inputs.rope_factors is not None:
            set_rope_factors(model, inputs.rope_factors)
        loss = forward_backward(model, objective, backend, step, inputs.micro_batches)
        parts = objective.parts()
        norm, skipped = backend.optimizer_step(inputs.rates, max_norm, loss)
        return {"loss": loss, "grad_norm": norm, "skipped": skipped, **parts}

    first, complete = step * len(micro_batches), []
    for index, batch in enumerate(micro_batches, first):
        added = objective.host_inputs(batch, index)
        complete.append(batch | {name: backend.constant(x) for name, x in added.items()})
    factors = rates.rope_factors
    on_devices = backend.constant(torch.tensor(factors)) if factors else None
    values = backend.run_step(compute, StepInputs(first, complete, rates, on_devices))
    objective.end_step(step + 1)
    return values


def begin_step(model: nn.Module, objective: Objective, backend: Backend, rates: StepRates) -> None:
    """Pass this step's rates to the objective and the model."""
    objective.begin_step(rates)
    if rates.rope_factors:
        set_rope_factors(model, backend.constant(torch.tensor(rates.rope_factors)))


def forward_backward(
    model: nn.Module, objective: Objective, backend: Backend, step: int, micro_batches: list[Batch]
) -> torch.Tensor:
    """Compute the gradients of the mean loss over all micro-batches; return that loss."""
    count, losses = len(micro_batches), []
    objective.before_micro_batches(model, micro_batches, step * count)
    for index, batch in enumerate(micro_batches):
        backend.begin_micro_batch(step * count + index)
        loss = objective.loss(model, batch, step * count + index) / count
        losses.append(loss.detach())
        backend.backward(loss, is_last=index == count - 1)
    return backend.mean(sum(losses[1:], start=losses[0]))


def put_micro_batches(backend: Backend, batch: Batch, fields: Fields, count: int) -> list[Batch]:
    """Put this process's shard of a batch on the devices, as ``count`` micro-batches."""
    chunks = {name: tensor.chunk(count) for name, tensor in batch.items()}
    return [
        backend.put({name: parts[index] for name, parts in chunks.items()}, fields)
        for index in range(count)
    ]


def train_loader(
    data: DataSource, backend: Backend, batch_size: int, steps: int = 0
) -> BatchLoader:
    """Return the loader of training images, in global batches of ``batch_size``; ``steps``: the
    number of batches of the whole training."""
    open_shard = functools.partial(data.train_loader, batch_size, steps=steps)
    return backend.loader(open_shard, batch_size, reads_rows=data.reads_rows)


def val_loader(data: DataSource, backend: Backend, batch_size: int) -> BatchLoader:
    """Return the loader of validation images, in global batches of ``batch_size``."""
    open_shard = functools.partial(data.val_loader, batch_size)
    return backend.loader(open_shard, batch_size, reads_rows=data.reads_rows)


class TrainBatches:
    """Iterates over the training images from any position, each batch as micro-batches. With
    ``positions``, batches have the field ``position``."""

    def __init__(
        self,
        loader: BatchLoader,
        backend: Backend,
        batch_size: int,
        micro_batches: int,
        *,
        positions: bool = False,
    ) -> None:
        self.loader, self._backend = loader, backend
        self._batch_size, self._micro_batches = batch_size, micro_batches
        self._added: Batch = {}
        """The same tensors in each step: constant batches are put on the devices once."""
        if positions:
            count = batch_size // backend.batch_shards
            self._added["position"] = backend.batch_shard * count + torch.arange(count)
        self.last_wait_s = 0.0
        """The seconds spent waiting for the latest batch."""
        self.last_read_s = 0.0
        """The part of them in which the batch was still being read, not transferred to the
        devices."""
        self.failed: DataFolderError | None = None
        """Why no batch follows those that are ready; set while these are still being trained on."""

    def number(self, at: Position) -> int:
        """Return the number of batches between the start of training and ``at``."""
        return at.epoch * len(self.loader) + at.images_in_epoch // self._batch_size

    def after(self, at: Position) -> Position:
        """Return the position one step (one batch) later."""
        batches_done = at.images_in_epoch // self._batch_size + 1
        if batches_done == len(self.loader):
            return Position(at.step + 1, at.epoch + 1, 0)
        return Position(at.step + 1, at.epoch, batches_done * self._batch_size)

    def rest_of_epoch(self, at: Position) -> Generator[list[Batch]]:
        """Yield the micro-batches of each step from ``at`` to the end of its epoch."""

        def put(batch: Batch) -> list[Batch]:
            return put_micro_batches(
                self._backend, batch | self._added, self.loader.fields, self._micro_batches
            )

        def failed(error: BaseException) -> None:
            if isinstance(error, DataFolderError):
                self.failed = error
                print(f"warning: {error}: saving a checkpoint and stopping", file=sys.stderr)

        reading: deque[float] = deque()

        def timed(batches: Iterator[Batch]) -> Iterator[Batch]:
            asked = time.perf_counter()
            for batch in batches:
                reading.append(time.perf_counter() - asked)
                yield batch
                asked = time.perf_counter()

        source = self.loader.epoch(at.epoch, at.images_in_epoch // self._batch_size)
        depth = self.loader.prefetch_depth
        with contextlib.closing(prefetch(timed(source), put, depth, failed)) as ready:
            while True:
                asked = time.perf_counter()
                batch = next(ready, None)
                if batch is None:
                    return
                self.last_wait_s = time.perf_counter() - asked
                self.last_read_s = min(self.last_wait_s, reading.popleft())
                yield batch


@dataclass
class StepTimer:
    """Measures the throughput between two log steps, by the host's clock."""

    started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    waited: float = 0.0
    """The seconds spent waiting for batches."""
    flops: float = 0.0
    """The FLOPs of the steps, as counted for MFU."""

    def restart(self) -> None:
        self.started, self.steps, self.waited = time.perf_counter(), 0, 0.0
        self.flops = 0.0

    def seconds(self) -> float:
        return time.perf_counter() - self.started
