"""The program's own training step as graphs, with nothing allocated at the model's size.

The backend runs as it does in training, except that what would be data on the devices is a
placeholder, and that a graph is kept where it would be run.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from training.losses import Objective
from training.step import forward_backward, put_micro_batches, shard_and_optimize
from xla_fsdp.resolve_xla import XlaRun

# ------------------------------------------------------------------------------------------------
# The graphs of a training step, as its trace hands them to the compiler.


REPLICATED = "{replicated}"
"""How XLA writes that every device has the whole."""


@dataclass(frozen=True)
class Result:
    """One of a graph's results."""

    graph: int
    number: int


@dataclass(frozen=True)
class Value:
    """Data on the devices: bytes in all, and how it lies there, in XLA's notation."""

    size: int
    sharding: str | Result
    """A ``Result`` where the program has not marked one: the compiler's choice, known later."""

    def lies(self, shardings: Shardings) -> str | None:
        return shardings(self.sharding) if isinstance(self.sharding, Result) else self.sharding


Shardings = Callable[[Result], str | None]
"""Tells how the compiler laid out a result; None if that is not known."""


@dataclass(frozen=True)
class Graph:
    """A graph as HLO, and how its arguments and results lie on the devices."""

    hlo: bytes
    arguments: dict[int, Value]
    """Arguments by their number; those that are not here are small and replicated."""
    results: tuple[str | None, ...]
    """How each result lies; None where that is left to the compiler."""
    donated: dict[int, int]
    """Maps an argument to the result that takes its place in memory."""
    resident: tuple[Value, ...]
    """Values that live on the devices meanwhile without being arguments."""

    def given(self, shardings: Shardings) -> Graph:
        """Return the graph with the sharding of every argument resolved."""
        arguments = {}
        for number, value in self.arguments.items():
            sharding = value.lies(shardings)
            assert sharding, (number, value)
            arguments[number] = Value(value.size, sharding)
        return replace(self, arguments=arguments)

    def sharding_of(self, number: int) -> str:
        """Return how an argument lies on the devices, in XLA's notation; it must be known."""
        sharding = self.arguments[number].sharding if number in self.arguments else REPLICATED
        assert isinstance(sharding, str)
        return sharding


@dataclass(frozen=True)
class Step:
    """A training step as the graphs that it runs, one after the other."""

    graphs: list[Graph]
    replicas: int
    """Programs that run together: nested FSDP has one a device, SPMD one for all."""
    state_bytes: int
    """Parameters and optimizer state on one device."""
    description: str

    def distinct(self) -> list[list[Graph]]:
        """Return the graphs, those of the same HLO together.

        What is resident beside them may differ from run to run: losses of earlier micro-batches.
        """
        found: dict[bytes, list[Graph]] = {}
        for graph in self.graphs:
            found.setdefault(graph.hlo, []).append(graph)
        return list(found.values())


def local_bytes(values: Iterable[Value], shardings: Shardings) -> int:
    """Return the bytes on one device, leaving out values whose sharding is not known."""
    total = 0
    for value in values:
        sharding = value.lies(shardings)
        total += value.size // tiles(sharding) if sharding else 0
    return total


def tiles(sharding: str) -> int:
    """Return over how many different parts a value is spread: 4 for {devices=[4,1]0,1,2,3}."""
    found = re.match(r"\{devices=\[([\d,]+)\]", sharding)
    if not found:
        return 1
    sizes = [int(size) for size in found[1].split(",")]
    return math.prod(sizes[:-1] if "last_tile_dim_replicate" in sharding else sizes)


# ------------------------------------------------------------------------------------------------


def start_xla(devices: int, form: str) -> None:
    """XLA on the CPU, made to believe that it has this many devices, for this form of FSDP."""
    os.environ["PJRT_DEVICE"] = "CPU"
    # A few virtual ones stand for all: many crash autograd (128 do), and one is never sharded.
    os.environ["CPU_NUM_DEVICES"] = "1" if form == "nested" else str(min(devices, 4))
    import torch_xla.runtime as xr

    xr.global_runtime_device_count = lambda: devices  # asked by Mesh and by the backend
    if form == "spmd":
        xr.use_spmd()
    else:
        xr.world_size = lambda: devices
        xr.global_ordinal = lambda: 0


def trace_step(run: XlaRun, named: bool = False) -> Step:
    """Trace one step of ``run``, sharded as in training. Call ``start_xla`` before.

    ``named``: the graphs tell which module of the model each operation comes from.
    """
    from tools.compile_only import recorder
    from tools.compile_only.names import LOSS, OPTIMIZER, Names

    backend: recorder.TracingBackend
    if run.own.xla_fsdp == "spmd":
        backend = recorder.TracingSpmdBackend(run)
    else:
        backend = recorder.TracingNestedBackend(run)
    sharded = shard_and_optimize(run, backend)
    sharded.train()
    names = Names() if named else None
    if names:
        names.watch(sharded)
        backend.before_backward = functools.partial(names.name_backward, module=LOSS)
    inside = names.inside if names else _nowhere
    data, optimizer = run.config.data, run.config.optimizer
    share = data.batch_size // backend.world_size
    shape = (share, *run.model.sizes.input_shape)
    dtype = getattr(torch, data.image_dtype(len(shape) - 2))
    images = torch.empty(shape, dtype=dtype, device="meta")
    batch = images, torch.empty(share, dtype=torch.int64, device="meta")
    objective = Objective(run, backend)
    backend.start_recording()
    micro_batches = put_micro_batches(backend, batch, data.grad_accum_steps)
    with backend.recorder.seeing_saved_tensors(), inside(LOSS, "forward"):
        loss = forward_backward(sharded, objective, backend, 0, micro_batches)
    with inside(OPTIMIZER, "update"):
        outcome = backend.optimizer_step(optimizer.lr, optimizer.clip_grad_norm, loss)
    del loss, outcome  # until here they live, and so are results
    return Step(
        graphs=backend.recorder.graphs,
        replicas=backend.world_size,
        state_bytes=backend.local_state_bytes(),
        description=backend.describe(),
    )


def _nowhere(module: str, phase: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
