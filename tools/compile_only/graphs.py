"""The graphs of a training step, as its trace hands them to the compiler.

Shardings are in XLA's notation.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

REPLICATED = "{replicated}"
"""Every device has the whole."""


@dataclass(frozen=True)
class Result:
    """One of a graph's results."""

    graph: int
    number: int


@dataclass(frozen=True)
class Value:
    """Data on the devices: bytes in all, and its sharding."""

    size: int
    sharding: str | Result
    """A ``Result`` where the program has not marked one: the compiler's choice, known later."""


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


def local_bytes(values: Iterable[Value], chosen: Mapping[Result, str]) -> int:
    """Return the bytes on one device, leaving out values whose sharding is not known.

    ``chosen``: what the compiler chose for results.
    """
    total = 0
    for value in values:
        given = value.sharding
        sharding = given if isinstance(given, str) else chosen.get(given)
        total += value.size // tiles(sharding) if sharding else 0
    return total


def tiles(sharding: str) -> int:
    """Return over how many different parts a value is spread: 4 for {devices=[4,1]0,1,2,3}."""
    found = re.match(r"\{devices=\[([\d,]+)\]", sharding)
    if not found:
        return 1
    sizes = [int(size) for size in found[1].split(",")]
    return math.prod(sizes[:-1] if "last_tile_dim_replicate" in sharding else sizes)
