"""Seconds that a compiled module is expected to take, by the compiler's own figures.

libtpu writes its estimate of cycles into the configuration of each fusion. The instructions run one
after the other as they are scheduled, loops as often as they run. A fusion whose cycles are written
as unknown takes the bytes that it moves at the bandwidth of HBM. To the cycles are added

- Pallas kernels: the longest of their own cycles (``kernel_cycles``), and of FLOPs and bytes of
  their own cost estimate at the chip's peak;
- what the computation waits for. What is moved goes on beside other instructions from where it is
  begun, and delays only what needs it before it is complete. There are four queues, in each of
  which one move follows the other: collectives on the links, each taking the bytes that must reach
  a device at the bandwidth of the links that its devices use (``links``; a permute, which brings
  them from one device, at that of one link); copies between HBM and vector memory (DMA) at HBM's
  bandwidth; copies to and from the host's memory at PCIe's; transfers between slices at that of the
  data center network.

Not in it: that copies and fusions share the bandwidth of HBM, the time until the first byte of a
move arrives, and that the first and last chip of an open row have one link less than the others.
Scalars and the little else that has no cycles count as nothing.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from functools import cached_property

from tools.compile_only.hlo import (
    Computations,
    Instruction,
    channel_of,
    collectives_of,
    dma_bytes,
    group_of,
    instruction_bytes,
    parse_module,
    received_bytes,
    received_from_slices,
    scheduled_by,
)
from xla_fsdp.tpu import Chip, Topology

# ------------------------------------------------------------------------------------------------
# Which of a chip's links to its neighbours a collective uses: how fast it can be at best.
#
# The chips of a slice are a grid of two or three sides. Along a side a chip has two neighbours: the
# last is the first one's only where the grid is closed to a torus (v5e and v6e: sides of 16; v4 and
# v5p: slices whose sides all are multiples of 4; "How to Scale Your Model", the chapter on TPUs,
# jax-ml.github.io/scaling-book). Devices that exchange something among themselves use the links
# along the sides that they are spread over. Where others lie between them, these exchange theirs by
# the same links at the same time.


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


# ------------------------------------------------------------------------------------------------


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**60
"""From here on an estimate stands for "unknown"; libtpu writes 2**63 - 1."""
_KERNEL = 'custom_call_target="tpu_custom_call"'
_COLLECTIVE_DONE = re.compile(r"(?:all|collective|reduce)-[a-z\-]+-done$")
_COPY = re.compile(r"(?:copy|slice|dynamic-slice|dynamic-update-slice|async)-(start|done)$")
_ON_HOST = "S(5)"
"""In the layout of what lies in the host's memory."""
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="[^"]+"')
_COST = re.compile(r'"cost_estimate":\{[^}]*\}')


@dataclass(frozen=True)
class Expected:
    """Seconds of one device, by what it is doing."""

    cycles_s: float = 0.0
    """In what the compiler estimates the cycles of, or ought to."""
    kernels_s: float = 0.0
    """In Pallas kernels."""
    waiting_s: float = 0.0
    """Waiting for collectives."""
    dma_s: float = 0.0
    """Waiting for copies between HBM and vector memory."""
    host_s: float = 0.0
    """Waiting for copies to and from the host's memory."""
    dcn_s: float = 0.0
    """Waiting for other slices."""
    unknown: int = 0
    """How many instructions run whose cycles the compiler does not know."""

    @property
    def seconds(self) -> float:
        """Return the whole time."""
        waited = self.waiting_s + self.dma_s + self.host_s + self.dcn_s
        return self.cycles_s + self.kernels_s + waited

    def plus(self, other: Expected, times: int = 1) -> Expected:
        """Return the time of this and of ``times`` runs of another."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Expected(*(mine + times * its for mine, its in pairs))


@dataclass(frozen=True)
class Part:
    """What one instruction of the schedule takes."""

    instruction: Instruction
    computation: str
    runs: int
    """How often it runs in one execution of the module."""
    each: Expected
    """The time of one run, what it waits for included."""


@dataclass(frozen=True)
class _Move:
    """Data on its way, as one of the instructions that name it tells."""

    queue: str
    """The field of ``Expected`` that waiting for it counts in."""
    seconds: float | None
    """On its queue; None where it was begun by another instruction."""
    goes_on: bool = True


def expect(hlo: str, links: Links) -> Expected:
    """Return the time of a scheduled TPU module, given as text, on a slice with these links."""
    total = Expected()
    for part in walk(*parse_module(hlo), links):
        total = total.plus(part.each, part.runs)
    return total


def walk(computations: Computations, entry: str, links: Links) -> list[Part]:
    """Return the instructions that a module runs with the time of each, in the order of the text
    but for loops, whose body comes before them. A loop of n rounds has one part for each of its
    instructions."""
    return _Walk(computations, links).parts(entry)


@dataclass(frozen=True)
class _Walk:
    computations: Computations
    links: Links

    @property
    def chip(self) -> Chip:
        return self.links.topology.chip

    def parts(self, name: str) -> list[Part]:
        """Return those of a computation; nothing is moved beyond its end."""
        instructions = self.computations[name]
        shapes = {each.name: each.shape for each in instructions}
        moves = self._moves(instructions)
        last = {key: place for place, found in enumerate(moves) for key in found}
        parts: list[Part] = []
        now, free_at, arrives_at = 0.0, defaultdict[str, float](float), dict[str, float]()
        for place, each in enumerate(instructions):
            begun = set()
            for key, move in moves[place].items():
                if key not in arrives_at and move.seconds is not None:
                    free_at[move.queue] = max(now, free_at[move.queue]) + move.seconds
                    arrives_at[key] = free_at[move.queue]
                    begun |= {key} if move.goes_on else set()
            spent = _of_instruction(each, shapes, self.chip)
            for called, rounds in scheduled_by(each, self.computations):
                inner = self.parts(called)
                now += rounds * sum(part.runs * part.each.seconds for part in inner)
                parts += [replace(part, runs=rounds * part.runs) for part in inner]
            for key in moves[place].keys() - begun:
                if last[key] == place:
                    spent = _until(arrives_at.get(key, 0.0), now, spent, moves[place][key].queue)
            if place == len(instructions) - 1:
                for queue, moment in free_at.items():
                    spent = _until(moment, now, spent, queue)
            now += spent.seconds
            parts.append(Part(each, name, 1, spent))
        return parts

    def _moves(self, instructions: list[Instruction]) -> list[dict[str, _Move]]:
        """Return what each instruction begins, carries on, or waits for, by a key.

        All instructions of one move give it the same key.
        """
        named = {each.name: each for each in instructions}
        return [self._moves_of(each, named) for each in instructions]

    def _moves_of(self, each: Instruction, named: dict[str, Instruction]) -> dict[str, _Move]:
        rendezvous = _rendezvous(each, named)
        if rendezvous:
            sends = each.opcode == "send"
            slices = self.links.topology.slices
            size = received_from_slices(each, slices) if sends else None
            seconds = None if size is None else size / self.chip.dcn_bandwidth
            return {rendezvous: _Move("dcn_s", seconds)}
        copies = _COPY.match(each.opcode)
        if copies and copies[1] == "start":
            return {each.name: self._copied(each)}
        if copies:
            begun = named[_begun_by(each)]
            return {begun.name: replace(self._copied(begun), seconds=None)}
        if _COLLECTIVE_DONE.match(each.opcode):
            return {_begun_by(each): _Move("waiting_s", None)}
        found = {}
        for collective, goes_on, _ in collectives_of(each, self.computations):
            begins = each.opcode.endswith("-start")
            key = each.name if begins else channel_of(collective) or each.name
            is_done = collective.opcode.endswith("-done")
            seconds = None if is_done else self._on_the_links(collective)
            found[key] = _Move("waiting_s", seconds, goes_on)
        return found

    def _copied(self, start: Instruction) -> _Move:
        if _ON_HOST in start.shape:
            return _Move("host_s", dma_bytes(start) / self.chip.host_bandwidth)
        return _Move("dma_s", dma_bytes(start) / self.chip.hbm_bandwidth)

    def _on_the_links(self, collective: Instruction) -> float:
        devices = self.links.topology.slice_chips
        received = received_bytes(collective, devices)
        if collective.opcode.startswith("collective-permute"):
            return received / self.chip.link_bandwidth
        bandwidth = self.links.bandwidth(group_of(collective, devices))
        return received / bandwidth if received else 0.0


def _rendezvous(each: Instruction, named: dict[str, Instruction]) -> str | None:
    """Return what the instructions of one transfer between slices have in common."""
    if each.opcode.removesuffix("-done") not in ("send", "recv"):
        return None
    begun = named.get(_begun_by(each), each) if each.opcode.endswith("-done") else each
    found = _RENDEZVOUS.search(begun.text)
    return found[0] if found else None


def _begun_by(done: Instruction) -> str:
    begun = re.search(r"-done\(%([\w.\-]+)", done.text)
    assert begun, done.text
    return begun[1]


def _until(moment: float, now: float, spent: Expected, queue: str) -> Expected:
    """Add the wait for a moment that comes after ``spent``, which begins now."""
    waited = getattr(spent, queue) + max(moment - now - spent.seconds, 0.0)
    return replace(spent, **{queue: waited})


def _of_instruction(each: Instruction, shapes: dict[str, str], chip: Chip) -> Expected:
    if each.opcode == "custom-call" and _KERNEL in each.text:
        return Expected(kernels_s=_of_kernel(each, shapes, chip))
    cycles = _CYCLES.search(each.text)
    if cycles and int(cycles[1]) < _UNKNOWN:
        return Expected(cycles_s=int(cycles[1]) / chip.clock_hz)
    if cycles:
        return Expected(instruction_bytes(each, shapes) / chip.hbm_bandwidth, unknown=1)
    return Expected()


def _of_kernel(each: Instruction, shapes: dict[str, str], chip: Chip) -> float:
    """Return the seconds of a Pallas kernel; without an estimate, those of what it reads once."""
    cost = _COST.search(each.text)
    flops, size = (
        re.search(rf'"{name}":"?(\d+)', cost[0]) if cost else None
        for name in ("flops", "bytes_accessed")
    )
    moved = int(size[1]) if size else instruction_bytes(each, shapes)
    scheduled = _CYCLES.search(each.text)
    return max(
        int(scheduled[1]) / chip.clock_hz if scheduled else 0.0,
        int(flops[1]) / chip.peak_flops if flops else 0.0,
        moved / chip.hbm_bandwidth,
    )
