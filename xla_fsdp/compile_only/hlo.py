"""What a compiled module moves in one execution: bytes of HBM, and of each kind of collective.

XLA's own cost analysis counts the body of a loop once; here each computation counts as often as
it runs.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

_WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s32": 4,
           "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}  # fmt: skip
_SHAPE = re.compile(r"\b(" + "|".join(_WIDTHS) + r")\[([\d,]*)\]((?:\{[^}]*\})?)")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|[\s)}])([a-z][a-z\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%([\w.\-]+)")
_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call",
         "conditional", "after-all", "partition-id", "replica-id"}  # fmt: skip
_IN_HBM = re.compile(r"S\([1-9]")  # any other memory space: vmem, smem, sync flags


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shape: str
    text: str


@dataclass
class Traffic:
    """Of one device in one execution."""

    hbm_bytes: float = 0.0
    """Read and written by instructions of the schedule, those in vector memory left out."""
    collective_bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By kind: received by a device from its own slice, at the least any algorithm needs."""
    dcn_bytes: float = 0.0
    """The same from other slices, over the data center network."""
    collectives: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How often each kind runs."""
    asynchronous: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How many of those go on while something else is computed."""

    def add(self, other: Traffic, times: int) -> None:
        """That of another module which runs so often."""
        self.hbm_bytes += times * other.hbm_bytes
        self.dcn_bytes += times * other.dcn_bytes
        for kind, count in other.collectives.items():
            self.collectives[kind] += times * count
            self.asynchronous[kind] += times * other.asynchronous[kind]
            self.collective_bytes[kind] += times * other.collective_bytes[kind]


def measure(hlo: str, devices: int, slices: int = 1) -> Traffic:
    """Traffic of a scheduled TPU module given as text, its devices numbered slice by slice."""
    computations, entry = _parse(hlo)
    traffic, seen = Traffic(), set[str]()
    for name, runs in _runs(computations, entry):
        instructions = computations[name]
        shapes = {each.name: each.shape for each in instructions}
        for each in instructions:
            if each.opcode not in _FREE and not each.opcode.endswith("-done"):
                traffic.hbm_bytes += runs * _instruction_bytes(each, shapes)
            for found, is_async in _collectives_of(each, computations):
                same = re.search(r'channel_id=\d+|chain_id="\d+"', found.text)
                key = same[0] if same else f"{name}/{found.name}"
                if key in seen:  # one collective in pieces, among several fusions
                    continue
                seen.add(key)
                kind = found.opcode.removesuffix("-start")
                traffic.collectives[kind] += runs
                traffic.asynchronous[kind] += runs if is_async else 0
                inside, outside = _received(found, kind, devices, devices // slices)
                traffic.collective_bytes[kind] += runs * inside
                traffic.dcn_bytes += runs * outside
    return traffic


def _parse(hlo: str) -> tuple[dict[str, list[Instruction]], str]:
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in hlo.splitlines():
        head = _HEAD.match(line)
        if head:
            current = head[2]
            computations[current] = []
            entry = current if head[1] else entry
            continue
        found = _LINE.match(line)
        if not found or not current:
            continue
        text = found[2]
        opcode = _OPCODE.search(text)
        if opcode:
            shape = text[: opcode.start(1)]
            computations[current].append(Instruction(found[1], opcode[1], shape, text))
    return computations, entry


def _runs(computations: dict[str, list[Instruction]], name: str, times: int = 1
          ) -> Iterator[tuple[str, int]]:  # fmt: skip
    """Every computation of the schedule (not those inside fusions), and how often it runs."""
    yield name, times
    for each in computations[name]:
        if each.opcode == "while":
            match = re.search(r"condition=%([\w.\-]+), body=%([\w.\-]+)", each.text)
            assert match, each.text
            rounds = times * _rounds(computations[match[1]])
            yield from _runs(computations, match[2], rounds)
        elif each.opcode in ("call", "conditional"):
            for called in _CALLED.findall(each.text):
                yield from _runs(computations, called, times)


def _rounds(condition: list[Instruction]) -> int:
    """The bound that the counter is compared with; loops here begin at 0 and add 1."""
    constants = [re.search(r"constant\((\d+)\)", each.text) for each in condition]
    return max((int(match[1]) for match in constants if match), default=1)


def _collectives_of(
    each: Instruction, computations: dict[str, list[Instruction]]
) -> Iterator[tuple[Instruction, bool]]:
    if each.opcode.removesuffix("-start") in _KINDS:
        yield each, each.opcode.endswith("-start")
    elif each.opcode == "fusion":
        for called in _CALLED.findall(each.text):
            for inner in computations.get(called, []):
                if inner.opcode.removesuffix("-start") in _KINDS:
                    if called.startswith("all-reduce-scatter"):  # its input is the shape
                        inner = replace(inner, opcode="reduce-scatter", shape=each.shape)
                    yield inner, "async" in each.name or "chain_id" in inner.text


def _bytes(shape: str, *, only_hbm: bool = False) -> float:
    total = 0.0
    for kind, sizes, layout in _SHAPE.findall(shape):
        if only_hbm and _IN_HBM.search(layout):
            continue
        total += _WIDTHS[kind] * math.prod(int(size) for size in sizes.split(",") if size)
    return total


def _instruction_bytes(each: Instruction, shapes: dict[str, str]) -> float:
    operands = each.text[len(each.shape) :]
    operands = operands[: operands.find("), ")] if "), " in operands else operands
    names = re.findall(r"%([\w.\-]+)", operands)
    if "dynamic-update-slice" in each.name:  # in place: the slice, not the whole
        sizes = sorted(_bytes(shapes.get(name, ""), only_hbm=True) for name in names)
        return 2 * sum(sizes[:-1])
    if "dynamic-slice" in each.name or each.opcode == "dynamic-slice":
        return 2 * _bytes(each.shape, only_hbm=True)
    read = sum(_bytes(shapes.get(name, ""), only_hbm=True) for name in names)
    return read + _bytes(each.shape, only_hbm=True)


def _received(
    each: Instruction, kind: str, devices: int, slice_devices: int
) -> tuple[float, float]:
    """Bytes that must reach a device: from its slice, and from others over the DCN.

    Where a group has members in several slices, those of one share what comes from outside.
    """
    whole = _bytes(each.shape)
    if kind == "collective-permute":
        received = whole / 2 if each.opcode.endswith("-start") else whole  # (source, destination)
        pairs = re.search(r"source_target_pairs=\{(\{[^=]*\})\}", each.text)
        ends = re.findall(r"\{(\d+),(\d+)\}", pairs[1]) if pairs else []
        crosses = any(int(a) // slice_devices != int(b) // slice_devices for a, b in ends)
        return (0.0, received) if crosses else (received, 0.0)
    group = _first_group(each.text, devices)
    slices = len({member // slice_devices for member in group})
    size, here = len(group), len(group) / slices
    if kind == "reduce-scatter":
        whole *= size
    if kind == "all-to-all":
        return whole * (here - 1) / size, whole * (size - here) / size
    times = 2 if kind == "all-reduce" else 1
    return times * whole * (here - 1) / here, times * whole * (slices - 1) / slices / here


def _first_group(text: str, devices: int) -> list[int]:
    """Of the groups that a collective runs in; all are alike."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
    if listed:
        return _numbers(listed[1])
    iota = re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not iota:
        return list(range(devices))
    places = np.arange(devices).reshape(_numbers(iota[2]))
    if iota[3]:
        places = places.transpose(_numbers(iota[3]))
    return places.flatten()[: int(iota[1])].tolist()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
