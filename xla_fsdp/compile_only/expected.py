"""Seconds that a compiled module is expected to take, by the compiler's own figures.

libtpu writes its estimate of cycles into the configuration of each fusion. The instructions run one
after the other as they are scheduled, loops as often as they run. A fusion whose cycles are written
as unknown takes the bytes that it moves at the bandwidth of HBM. To the cycles are added

- Pallas kernels, which have none: the longer of FLOPs and bytes of their own cost estimate at the
  chip's peak;
- what the computation waits for collectives. They go over the links one after the other, each
  taking the bytes that must reach a device at the chip's whole interconnect bandwidth; a permute,
  which brings them from one device, at that of one link. One that goes on beside other instructions
  delays only what needs it before it is complete.

Not in it: copies between HBM and vector memory that the next instruction waits for, transfers
between slices, the time until the first byte of a collective arrives, and links that a collective
leaves idle (an all-gather along one side of the slice uses a part of the bandwidth). A kernel
hardly reaches the peak. Scalars and the little else that has no cycles count as nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from xla_fsdp.compile_only.hlo import (
    Computations,
    Instruction,
    channel_of,
    collectives_of,
    instruction_bytes,
    parse_module,
    received_bytes,
    scheduled_by,
)
from xla_fsdp.compile_only.topologies import Chip

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN = 2**60
"""From here on an estimate stands for "unknown"; libtpu writes 2**63 - 1."""
_KERNEL = 'custom_call_target="tpu_custom_call"'
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
    unknown: int = 0
    """How many instructions run whose cycles the compiler does not know."""

    @property
    def seconds(self) -> float:
        return self.cycles_s + self.kernels_s + self.waiting_s

    def plus(self, other: Expected, times: int = 1) -> Expected:
        """Return the time of this and of ``times`` runs of another."""
        return Expected(
            self.cycles_s + times * other.cycles_s,
            self.kernels_s + times * other.kernels_s,
            self.waiting_s + times * other.waiting_s,
            self.unknown + times * other.unknown,
        )


def expect(hlo: str, chip: Chip, devices: int) -> Expected:
    """Return the time of a scheduled TPU module given as text; ``devices`` are those of a slice."""
    computations, entry = parse_module(hlo)
    return _of_computation(entry, computations, chip, devices)


def _of_computation(name: str, computations: Computations, chip: Chip, devices: int) -> Expected:
    """Return the time of a computation; no collective goes on beyond its end."""
    instructions = computations[name]
    collectives = [_collectives_at(each, computations) for each in instructions]
    last = {key: place for place, found in enumerate(collectives) for key in found}
    shapes = {each.name: each.shape for each in instructions}
    spent, links_free_at = Expected(), 0.0
    arrives_at = dict[str, float]()
    for place, each in enumerate(instructions):
        begun = set()
        for key, (collective, goes_on) in collectives[place].items():
            if key not in arrives_at and not collective.opcode.endswith("-done"):
                seconds = _on_the_links(collective, devices, chip)
                links_free_at = max(spent.seconds, links_free_at) + seconds
                arrives_at[key] = links_free_at
                begun |= {key} if goes_on else set()
        spent = spent.plus(_of_instruction(each, shapes, chip))
        for called, rounds in scheduled_by(each, computations):
            spent = spent.plus(_of_computation(called, computations, chip, devices), rounds)
        for key in collectives[place].keys() - begun:
            if last[key] == place:
                spent = spent.plus(_wait_until(arrives_at.get(key, 0.0), spent))
    return spent.plus(_wait_until(links_free_at, spent))


def _on_the_links(collective: Instruction, devices: int, chip: Chip) -> float:
    to_one = collective.opcode.startswith("collective-permute")
    bandwidth = chip.link_bandwidth if to_one else chip.ici_bandwidth
    return received_bytes(collective, devices) / bandwidth


def _collectives_at(
    each: Instruction, computations: Computations
) -> dict[str, tuple[Instruction, bool]]:
    """Return the collectives that an instruction begins, carries on, or waits for, by a key.

    All instructions of one collective give it the same key. The second value tells whether it can
    go on beside others.
    """
    waits = re.match(r"(?:all|collective|reduce)-[a-z\-]+-done$", each.opcode)
    if waits:
        begun = re.search(r"-done\(%([\w.\-]+)", each.text)
        assert begun, each.text
        return {begun[1]: (each, True)}
    found = {}
    for collective, goes_on, _ in collectives_of(each, computations):
        begins = each.opcode.endswith("-start")
        key = each.name if begins else channel_of(collective) or each.name
        found[key] = collective, goes_on
    return found


def _of_instruction(each: Instruction, shapes: dict[str, str], chip: Chip) -> Expected:
    cycles = _CYCLES.search(each.text)
    if cycles and int(cycles[1]) < _UNKNOWN:
        return Expected(cycles_s=int(cycles[1]) / chip.clock_hz)
    if cycles:
        return Expected(instruction_bytes(each, shapes) / chip.hbm_bandwidth, unknown=1)
    if each.opcode == "custom-call" and _KERNEL in each.text:
        return Expected(kernels_s=_of_kernel(each, shapes, chip))
    return Expected()


def _of_kernel(each: Instruction, shapes: dict[str, str], chip: Chip) -> float:
    """Return the seconds of a Pallas kernel; without an estimate, those of what it reads once."""
    cost = _COST.search(each.text)
    flops, size = (
        re.search(rf'"{name}":"?(\d+)', cost[0]) if cost else None
        for name in ("flops", "bytes_accessed")
    )
    moved = int(size[1]) if size else instruction_bytes(each, shapes)
    return max(int(flops[1]) / chip.peak_flops if flops else 0.0, moved / chip.hbm_bandwidth)


def _wait_until(moment: float, spent: Expected) -> Expected:
    return Expected(waiting_s=max(moment - spent.seconds, 0.0))
