"""The program's own training step as graphs, with nothing allocated at the model's size.

The backend runs as it does in training, except that what would be data on the devices is a
placeholder, and that a graph is saved where it would be run (``recorder``).
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

# -- the graphs of a training step, as its trace hands them to the compiler ----------------
#
# Shardings are in XLA's notation.

REPLICATED = "{replicated}"
"""Every device has the whole."""


@dataclass(frozen=True)
class Result:
    """One of a graph's results."""

    graph: int
    number: int


Shardings = Callable[[Result], str | None]
"""Returns the sharding that the compiler chose for a result; None if that is not known."""


@dataclass(frozen=True)
class Value:
    """Data on the devices: bytes in all, and its sharding."""

    size: int
    sharding: str | Result
    """A ``Result`` where the program has not marked one: the compiler's choice, known later."""

    def resolve(self, shardings: Shardings) -> str | None:
        return shardings(self.sharding) if isinstance(self.sharding, Result) else self.sharding


@dataclass(frozen=True)
class Graph:
    """A graph as HLO, and the shardings of its arguments and results."""

    hlo: bytes
    arguments: dict[int, Value]
    """Arguments by their number; those that are not here are small and replicated."""
    results: tuple[str | None, ...]
    """The sharding of each result; None where that is left to the compiler."""
    donated: dict[int, int]
    """Maps an argument to the result that takes its place in memory."""
    resident: tuple[Value, ...]
    """Values that live on the devices meanwhile without being arguments."""

    def resolve(self, shardings: Shardings) -> Graph:
        """Return the graph with the sharding of every argument known."""
        arguments = {}
        for number, value in self.arguments.items():
            sharding = value.resolve(shardings)
            assert sharding, (number, value)
            arguments[number] = Value(value.size, sharding)
        return replace(self, arguments=arguments)

    def sharding_of(self, number: int) -> str:
        """Return the sharding of an argument; it must be known."""
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
        sharding = value.resolve(shardings)
        total += value.size // tiles(sharding) if sharding else 0
    return total


def tiles(sharding: str) -> int:
    """Return over how many different parts a value is spread: 4 for {devices=[4,1]0,1,2,3}."""
    found = re.match(r"\{devices=\[([\d,]+)\]", sharding)
    if not found:
        return 1
    sizes = [int(size) for size in found[1].split(",")]
    return math.prod(sizes[:-1] if "last_tile_dim_replicate" in sharding else sizes)


# -- tracing -----------------------------------------------------------------------------


def start_xla(devices: int, form: str) -> None:
    """Start XLA on the CPU, made to believe that it has this many devices, for this form of
    FSDP."""
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

    ``named``: write into the graphs from which module of the model each operation comes.
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
    in_loss: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    in_optimizer: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if named:
        names = Names()
        names.watch(sharded)
        backend.before_backward = functools.partial(names.name_backward, module=LOSS)
        in_loss, in_optimizer = names.inside(LOSS, "forward"), names.inside(OPTIMIZER, "update")

    data, optimizer = run.config.data, run.config.optimizer
    share = data.batch_size // backend.world_size
    shape = (share, *run.model.sizes.input_shape)
    dtype = getattr(torch, data.image_dtype(len(shape) - 2))
    images = torch.empty(shape, dtype=dtype, device="meta")
    batch = images, torch.empty(share, dtype=torch.int64, device="meta")
    objective = Objective(run, backend)

    backend.start_recording()
    micro_batches = put_micro_batches(backend, batch, data.grad_accum_steps)
    with backend.recorder.seeing_saved_tensors(), in_loss:
        loss = forward_backward(sharded, objective, backend, 0, micro_batches)
    with in_optimizer:
        outcome = backend.optimizer_step(optimizer.lr, optimizer.clip_grad_norm, loss)
    del loss, outcome  # until here they live, and so are results
    return Step(
        graphs=backend.recorder.graphs,
        replicas=backend.world_size,
        state_bytes=backend.local_state_bytes(),
        description=backend.describe(),
    )
