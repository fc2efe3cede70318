"""Updates on the devices, and what is compared of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from data.loading.loader import Batch
from training.backend import Backend
from training.hosts import processes
from training.losses.objective import Objective
from training.options.resolve import Run
from training.self_check.compare import Tolerances, apart, distance
from training.self_check.content import UPDATES, batches
from training.self_check.reference import MOMENTS, Outcome, Settings, Tensors
from training.self_check.table import Table
from training.step import put_micro_batches, train_step

_TRIES = 24
"""In fp16: a loss scale that is too large is halved, and its update not made."""
_ROW = 0.01
"""Of the typical weight of a row in their sum."""
EQUAL = 1e-5
"""What should be the same number, but for the order of sums on a GPU."""


@dataclass
class Devices:
    """The small run on the backend."""

    run: Run
    backend: Backend
    model: nn.Module
    settings: Settings
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.objective = Objective(self.run, self.backend)
        # The one after the last update is for going on from a checkpoint.
        self.batches = [
            put_micro_batches(self.backend, batch, self.run.config.data.grad_accum_steps)
            for batch in batches(self.run, self.backend)
        ]

    def update(self, number: int) -> tuple[float, float]:
        """Make the update of this number, from 1 on; returns its loss and gradient norm."""
        tries = _TRIES if self.run.config.sharding.precision == "fp16" else 1
        for _ in range(tries):
            batch = self.batches[number - 1]
            loss, norm, _ = train_step(
                self.model,
                self.objective,
                self.backend,
                number - 1,
                batch,
                lr=self.settings.lr,
                max_norm=self.settings.max_norm,
            )
            found = self.backend.read({"loss": loss, "norm": norm}).result()
            if math.isfinite(found["norm"][0]):
                break
        return found["loss"][0], found["norm"][0]

    def updates(self, first: int, last: int) -> None:
        for number in range(first, last + 1):
            loss, norm = self.update(number)
            self.losses.append(loss)
            self.norms.append(norm)


# -- rows -----------------------------------------------------------------------------


def check_rows(devices: Devices, table: Table) -> None:
    """Check that the devices have each image of the batch once, with its label.

    Each row's label times a weighted sum of its pixels, summed by ``Backend.sum`` and ``mean``.
    """
    backend, batch_size = devices.backend, devices.run.config.data.batch_size
    micro_batches = devices.batches[0]
    total = _sum_of_rows(micro_batches, devices)
    count = sum(len(labels) for _, labels in micro_batches)
    values = {"sum": backend.sum(total), "mean": backend.mean(total / count)}
    backend.end_step()
    found = backend.read(values).result()
    shape = devices.run.model.sizes.input_shape
    rows = _weights_of_rows(next(iter(batches(devices.run))), shape, range(shape[1]))
    expected = rows.sum().item()
    for name, value in (("sum", found["sum"][0]), ("mean", found["mean"][0] * batch_size)):
        off = abs(value - expected) / rows.abs().mean().item()
        off = max(map(float, processes.gather(repr(off))))
        what = f"{name} over the devices of a batch of {batch_size}, a row as the unit"
        table.within(f"rows, {name}", off, _ROW, what)


def _sum_of_rows(micro_batches: Sequence[Batch], devices: Devices) -> torch.Tensor:
    shape, times = devices.run.model.sizes.input_shape, 1
    rows = devices.backend.image_rows
    if micro_batches[0][0].shape[2] == shape[1]:  # whole images, or a global tensor of them
        rows = range(shape[1])
    else:  # parts, whose sums add up to those that ``Backend.sum`` takes to be the same
        times = devices.run.mesh.domain
    sums = [_weights_of_rows(each, shape, rows).sum() * times for each in micro_batches]
    return sum(sums[1:], start=sums[0])


def _weights_of_rows(batch: Batch, shape: Sequence[int], rows: range) -> torch.Tensor:
    """Return a weight of each image, which parts of it, these ``rows`` of pixels, add up to."""
    images, labels = batch
    ramp = torch.linspace(-1.0, 1.0, math.prod(shape), device=images.device).view(*shape)
    part = ramp[:, rows.start : rows.stop]
    return (images.float() * part).flatten(1).sum(1) * (labels + 1)


# -- numbers --------------------------------------------------------------------------


def check_scalars(
    devices: Devices, plain: Outcome | None, allowed: Tolerances | None, table: Table
) -> None:
    """Losses and norms against the reference, and those of all processes against each other."""
    if plain and allowed:
        off = apart(devices.losses, plain.losses)
        table.within("loss", off, allowed.loss(), f"{UPDATES} updates")
        off = apart(devices.norms, plain.norms)
        table.within("gradient norm", off, allowed.norm(), f"{UPDATES} updates, before clipping")
    everyone = processes.gather([repr(each) for each in devices.losses + devices.norms])
    numbers = [[float(each) for each in of_one] for of_one in everyone]
    off = max(apart(of_one, numbers[0]) for of_one in numbers)
    what = f"apart, losses and norms of {len(numbers)} process(es)"
    table.within("processes agree", off, EQUAL, what)


def check_states(
    found: dict[int, dict[str, Tensors]],
    plain: Outcome,
    allowed: Tolerances,
    run: Run,
    table: Table,
) -> None:
    """Gradients, moments and weights, tensor by tensor, in the first process."""
    moved_from = plain.states[0]["weights"] if run.own.keeps_fp32_weights else None

    def compare(name: str, update: int, kinds: Sequence[str], what: str) -> None:
        figures = []
        for kind in kinds:
            start = moved_from if kind == "weights" else None
            far = distance(found[update][kind], plain.states[update][kind], start)
            limit = allowed.state(update, kind, start)
            figures.append((far.whole, limit.whole, "all together"))
            figures.append((far.worst, limit.worst, f"the worst: {far.name}"))
        # Of these the one to be told; what is not a number is above any limit.
        off, limit_, which = max(figures, key=lambda each: _share(each[0], each[1]))
        table.within(name, off, limit_, f"{what}; {which}")

    compare("gradients", 1, MOMENTS[:1], "update 1, clipped")
    compare("moments", UPDATES, MOMENTS, f"update {UPDATES}")
    compare("weights", UPDATES, ["weights"], f"update {UPDATES}")


def _share(off: float, allowed: float) -> float:
    return off / allowed if math.isfinite(off) else math.inf
