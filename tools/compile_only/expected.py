"""Seconds that a compiled module is expected to take, by the compiler's own figures.

libtpu writes its estimate of cycles into the configuration of each fusion. The instructions run one
after the other as they are scheduled, loops as often as they run. A fusion whose cycles are written
as unknown takes the bytes that it moves at the bandwidth of HBM, and so does a reshape, for which
none are written: those that are no bitcasts lay an array out anew. To the cycles are added

- Pallas kernels: the longest of their own cycles (``compiler.write_kernel_cycles``), and of FLOPs
  and bytes of their own cost estimate at the chip's peak;
- what the computation waits for. A move runs beside other instructions from where it starts, and
  delays only what needs it before it is complete. There are four queues, in each of which one move
  follows the other: collectives on the links, each taking the bytes that must reach a device at the
  bandwidth of the links that its devices use (``Links``; a permute, which brings them from one
  device, at that of one link); copies between HBM and vector memory (DMA), and those that
  SparseCores make, at HBM's bandwidth; copies to and from the host's memory at PCIe's; transfers
  between slices at that of the data center network.

Not in it: that copies and fusions share the bandwidth of HBM, the time until the first byte of a
move arrives, and that the first and last chip of an open row have one link less than the others.
Scalars and the little else that has no cycles count as nothing.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, fields, replace
from functools import cached_property

from tools.compile_only import hlo
from tools.compile_only.hlo import Instruction
from xla_fsdp.tpu import Chip, Topology

# -- which of a chip's links to its neighbours a collective uses: how fast it can be at best ------
#
# The chips of a slice are a grid of two or three sides. Along a side a chip has two neighbours: the
# last is the first one's only where the grid is closed to a torus (v5e and v6e: sides of 16; v4 and
# v5p: slices whose sides all are multiples of 4; "How to Scale Your Model", the chapter on TPUs,
# jax-ml.github.io/scaling-book). Devices that exchange something among themselves use the links
# along the sides that they are spread over. Where others are between them, these exchange theirs
# over the same links at the same time.
#
# Two devices of one chip (tpu7x) share its links, and have one between them. If both are in a
# group, each fetches half of what both need and passes it on. If one is, the other's group uses the
# same links for its own.

_CLOSED_IN_A_PLANE, _CLOSED_IN_A_CUBE = 16, 4
"""A side that is closed is a multiple of this; in a cube all sides have to be."""


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
        sides = self.topology.sides
        places = [self.places[number % len(self.places)] for number in group]
        total = 0.0
        for side, along in zip(sides, zip(*places, strict=True), strict=True):
            taken = sorted(set(along))
            count = len(taken)
            if count > 1:
                between = taken[1] - taken[0]
                if len(sides) == 2:
                    is_torus = side % _CLOSED_IN_A_PLANE == 0
                else:
                    is_torus = all(length % _CLOSED_IN_A_CUBE == 0 for length in sides)
                closed = is_torus and count * between == side
                total += (2 if closed else 2 * (count - 1) / count) / between
        of_each_chip = len(places) / len(set(places))
        return total * of_each_chip / self.topology.chip.devices

    def bandwidth(self, group: list[int]) -> float:
        """Return the bytes/s that may reach a device of the group from the others."""
        chip = self.topology.chip
        return self.used(group) * chip.link_bandwidth or chip.between_devices

    def permute_bandwidth(self, pairs: list[tuple[int, int]]) -> float:
        """Return the bytes/s that may reach a device where each sends to one other."""
        chip = self.topology.chip
        count = len(self.places)
        moved = [(self.places[source % count], self.places[to % count]) for source, to in pairs]
        sharing = Counter((source, target) for source, target in moved if source != target)
        if pairs and not sharing:
            return chip.between_devices
        return chip.link_bandwidth / max(sharing.values(), default=1)

    @cached_property
    def places(self) -> list[tuple[int, ...]]:
        """The coordinates of each device's chip, in the mesh's order.

        Numbers count the devices of a chip first, then along the first side.
        """
        turned = itertools.product(*(range(side) for side in reversed(self.topology.sides)))
        devices = range(self.topology.chip.devices)
        places = [tuple(reversed(place)) for place in turned for _ in devices]
        if not self.by_host:
            return places

        # By the third side if there is one, then by hosts of 2 x 2 chips; within those by number.
        return sorted(places, key=lambda at: (*at[2:], at[1] // 2, at[0] // 2))


# -- the seconds of a schedule ------------------------------------------------------------------

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**60
"""From here on an estimate stands for "unknown"; libtpu writes 2**63 - 1."""
KERNEL = 'custom_call_target="tpu_custom_call"'
_COLLECTIVE_DONE = re.compile(r"(?:all|collective|reduce)-[a-z\-]+-done$")
_COPY = re.compile(r"(?:copy|slice|dynamic-slice|dynamic-update-slice|async)-(?:start|done)$")
ON_HOST = "S(5)"
"""In the layout of an array in the host's memory."""
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
class TimedInstruction:
    """An instruction of the schedule, and the time that it takes."""

    instruction: Instruction
    runs: int
    """How often it runs in one execution of the module."""
    each: Expected
    """The time of one run, what it waits for included."""


@dataclass(frozen=True)
class _Move:
    """Data on its way, as one of the instructions that name it describes it."""

    queue: str
    """The field of ``Expected`` that waiting for it counts in."""
    seconds: float | None
    """On its queue; None where another instruction has started it."""
    is_async: bool = True


def expect(text: str, links: Links) -> Expected:
    """Return the time of a scheduled TPU module, given as text, on a slice with these links."""
    computations, entry = hlo.parse_module(text)
    total = Expected()
    for timed in walk(computations[entry], links):
        total = total.plus(timed.each, timed.runs)
    return total


def walk(instructions: list[Instruction], links: Links) -> list[TimedInstruction]:
    """Return the instructions that a computation runs, and the time of each.

    They are in the order of the text but for loops, whose body comes before them; a loop of n
    rounds has one entry for each of its instructions. No move outlives the computation.
    """
    moves = [_moves_of(instruction, links) for instruction in instructions]
    last_use = {key: place for place, moves_here in enumerate(moves) for key in moves_here}
    timed: list[TimedInstruction] = []
    now, free_at, arrives_at = 0.0, defaultdict[str, float](float), dict[str, float]()
    for place, instruction in enumerate(instructions):
        started = set()
        for key, move in moves[place].items():
            if key not in arrives_at and move.seconds is not None:
                free_at[move.queue] = max(now, free_at[move.queue]) + move.seconds
                arrives_at[key] = free_at[move.queue]
                started |= {key} if move.is_async else set()
        time = _own_time(instruction, links.topology.chip)
        for called in instruction.scheduled:
            inner, rounds = walk(called, links), instruction.rounds
            now += rounds * sum(part.runs * part.each.seconds for part in inner)
            timed += [replace(part, runs=rounds * part.runs) for part in inner]
        needed = [
            (move.queue, arrives_at.get(key, 0.0))
            for key, move in moves[place].items()
            if key not in started and last_use[key] == place
        ]
        if place == len(instructions) - 1:
            needed += free_at.items()
        for queue, moment in needed:
            waited = max(moment - now - time.seconds, 0.0)
            time = replace(time, **{queue: getattr(time, queue) + waited})
        now += time.seconds
        timed.append(TimedInstruction(instruction, 1, time))
    return timed


def _moves_of(instruction: Instruction, links: Links) -> dict[str, _Move]:
    """Return what an instruction starts, carries on, or waits for, by a key.

    All instructions of one move give it the same key.
    """
    topology, chip = links.topology, links.topology.chip
    seconds: float | None = None
    opcode, start = instruction.opcode, instruction.start
    if start.is_on_sparse_cores:  # it starts once they have what they read
        collectives = hlo.collectives_of(start)
        of_start = 1 if opcode == "async-update" else 0
        if opcode != "async-done" and len(instruction.operands) > of_start:
            if collectives:
                seconds = sum(_on_links(collective, links) for collective, *_ in collectives)
            else:
                seconds = hlo.instruction_bytes(start) / chip.hbm_bandwidth
        return {start.name: _Move("waiting_s" if collectives else "dma_s", seconds)}
    rendezvous = _RENDEZVOUS.search(start.text)
    if rendezvous and opcode.removesuffix("-done") in ("send", "recv"):  # between slices
        if opcode == "send":
            received = hlo.received_from_slices(instruction, topology.slices)
            seconds = received / chip.dcn_bandwidth
        return {rendezvous[0]: _Move("dcn_s", seconds)}
    if _COPY.match(opcode):
        on_host = ON_HOST in start.shape
        if start is instruction:
            bandwidth = chip.host_bandwidth if on_host else chip.hbm_bandwidth
            seconds = hlo.dma_bytes(start) / bandwidth
        return {start.name: _Move("host_s" if on_host else "dma_s", seconds)}
    if _COLLECTIVE_DONE.match(opcode):
        return {start.name: _Move("waiting_s", None)}
    moves = {}
    for collective, is_async, _ in hlo.collectives_of(instruction):
        key = hlo.chain_of(collective) or instruction.name
        moves[key] = _Move("waiting_s", _on_links(collective, links), is_async)
    return moves


def _on_links(collective: Instruction, links: Links) -> float:
    """Return the seconds that a collective takes on the links."""
    devices = links.topology.slice_devices
    received = hlo.received_bytes(collective, devices)
    if not received:
        return 0.0
    if collective.opcode.startswith("collective-permute"):
        return received / links.permute_bandwidth(hlo.pairs_of(collective))
    return received / links.bandwidth(hlo.group_of(collective, devices))


def _own_time(instruction: Instruction, chip: Chip) -> Expected:
    """Return the time of an instruction itself, without what it waits for."""
    text = instruction.text
    is_kernel = instruction.opcode == "custom-call" and KERNEL in text
    written = _CYCLES.search(text)
    cycles = int(written[1]) if written else _UNKNOWN if instruction.opcode == "reshape" else 0
    if not is_kernel and cycles < _UNKNOWN:
        return Expected(cycles_s=cycles / chip.clock_hz)
    moved = hlo.instruction_bytes(instruction)
    if not is_kernel:
        return Expected(moved / chip.hbm_bandwidth, unknown=int(written is not None))
    # A kernel takes the longest of its cycles, its FLOPs and its bytes; without an estimate of
    # bytes, those of operands and results once.
    estimate = _COST.search(text)
    flops, size = (
        re.search(rf'"{name}":"?(\d+)', estimate[0]) if estimate else None
        for name in ("flops", "bytes_accessed")
    )
    return Expected(
        kernels_s=max(
            cycles / chip.clock_hz,
            int(flops[1]) / chip.peak_flops if flops else 0.0,
            (int(size[1]) if size else moved) / chip.hbm_bandwidth,
        )
    )
