"""Which of a chip's links to its neighbours a collective uses: how fast it can be at best.

The chips of a slice are a grid of two or three sides. Along a side a chip has two neighbours: the
last is the first one's only where the grid is closed to a torus (v5e and v6e: sides of 16; v4 and
v5p: slices whose sides all are multiples of 4; "How to Scale Your Model", the chapter on TPUs,
jax-ml.github.io/scaling-book). Devices that exchange something among themselves use the links
along the sides that they are spread over. Where others lie between them, these exchange theirs by
the same links at the same time.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from xla_fsdp.compile_only.topologies import Topology

_SIDE_OF_A_HOST = 2
"""Chips of a host along each of the first two sides."""
_CLOSED_IN_A_PLANE, _CLOSED_IN_A_CUBE = 16, 4
"""Of what a side is a multiple where it is closed; in a cube all sides have to be."""


@dataclass(frozen=True)
class Links:
    """The links of a slice, and where the devices of a program's mesh are."""

    topology: Topology
    by_host: bool = False
    """Whether the mesh counts devices host by host, not by their numbers, as
    ``training.mesh.Mesh.counts_by_host`` says."""

    def used(self, group: list[int]) -> float:
        """Return how many links to neighbours a device of the group has for the group's exchanges.

        On average over the group; a link that is shared by n groups counts as 1/n. Devices are
        given by their numbers in the mesh, and all in one slice.
        """
        places = [self._places[number % len(self._places)] for number in group]
        total = 0.0
        for side, along in zip(self.topology.sides, zip(*places, strict=True), strict=True):
            found = sorted(set(along))
            if len(found) > 1:
                between = found[1] - found[0]
                closed = self._is_closed(side) and len(found) * between == side
                neighbours = 2 if closed else 2 * (len(found) - 1) / len(found)
                total += neighbours / between
        return total

    def bandwidth(self, group: list[int]) -> float:
        """Return the bytes/s that may reach a device of the group from the others."""
        return self.used(group) * self.topology.chip.link_bandwidth

    def _is_closed(self, side: int) -> bool:
        if len(self.topology.sides) == 2:
            return side % _CLOSED_IN_A_PLANE == 0
        return all(each % _CLOSED_IN_A_CUBE == 0 for each in self.topology.sides)

    @cached_property
    def _places(self) -> list[tuple[int, ...]]:
        """Return where each device is, in the mesh's order; numbers count along the first side
        first."""
        turned = itertools.product(*(range(side) for side in reversed(self.topology.sides)))
        places = [tuple(reversed(place)) for place in turned]
        if not self.by_host:
            return places

        def host(place: tuple[int, ...]) -> tuple[int, ...]:
            x, y, *rest = place
            return (*reversed(rest), y // _SIDE_OF_A_HOST, x // _SIDE_OF_A_HOST)

        return sorted(places, key=host)  # stable: within a host by number
