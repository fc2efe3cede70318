"""What the trace of a training step hands to the compiler."""

from __future__ import annotations

from dataclasses import dataclass

REPLICATED = "{replicated}"
"""How XLA writes that every device has the whole."""


@dataclass(frozen=True)
class Graph:
    """A graph as HLO, and how its arguments and results lie on the devices (XLA's notation)."""

    hlo: bytes
    arguments: dict[int, str]
    """By the number of the argument; those not here are small and replicated."""
    results: tuple[str, ...]
    donated: dict[int, int]
    """Argument to the result that takes its place."""
    argument_bytes: int
    """Of one device, by the shardings."""
    resident_bytes: int
    """Of what lives on one device meanwhile without being an argument."""


@dataclass(frozen=True)
class Step:
    """A training step as the graphs that it runs, one after the other."""

    graphs: list[Graph]
    replicas: int
    """Programs that run together: nested FSDP has one a device, SPMD one for all."""
    state_bytes: int
    """Parameters and optimizer state on one device."""
    description: str

    def distinct(self) -> list[tuple[Graph, int]]:
        """Each graph once, and how often it runs in a step."""
        found: dict[bytes, list[Graph]] = {}
        for graph in self.graphs:
            found.setdefault(graph.hlo, []).append(graph)
        # What is beside a graph may differ from run to run: losses of earlier micro-batches.
        return [
            (max(same, key=lambda graph: graph.resident_bytes), len(same))
            for same in found.values()
        ]
