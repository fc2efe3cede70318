"""What a module of XLA needs: bytes in HBM, bytes and numbers of collectives, FLOPs of products.

The compiled module is read as text: what one device runs, in the order of its schedule. The traced
module, of all devices together, is read in StableHLO. XLA's own cost analysis counts the body of a
loop once; here each computation counts as often as it runs.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xla_fsdp.jax_private import (
    contracted_dimensions,
    first_integer,
    is_int8,
    kernel_output_dimension,
    shape_of,
)

# -- a compiled module as text ---------------------------------------------------------

_ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
_ARRAY = re.compile(r"\b(" + "|".join(_ITEM_BYTES) + r")\[([\d,]*)\]((?:\{[^}]*\})?)")
"""Dtype, sizes and layout."""
_NOT_IN_HBM = re.compile(r"S\([1-9]")
"""In a layout: any other memory space, such as vector memory, scalar memory, the host's."""
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|[\s)}])([a-z][a-z\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%([\w.\-]+)")


@dataclass(frozen=True)
class Instruction:
    name: str
    opcode: str
    shape: str
    text: str


Computations = dict[str, list[Instruction]]
"""Instructions in the order in which they run, by the name of their computation."""


def parse_module(hlo: str) -> tuple[Computations, str]:
    """Return the instructions of each computation by its name, and the name of the entry."""
    computations: Computations = {}
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


def called_by(each: Instruction) -> list[str]:
    """Return the computations that an instruction calls, among them that inside a fusion."""
    return _CALLED.findall(each.text)


def scheduled_by(each: Instruction, computations: Computations) -> list[tuple[str, int]]:
    """Return the computations that an instruction runs one after the other, and how often each.

    They are the body of a loop, or what is called; the computation inside a fusion is not one.
    """
    if each.opcode == "while":
        match = re.search(r"condition=%([\w.\-]+), body=%([\w.\-]+)", each.text)
        assert match, each.text
        # The counter is compared with a constant; loops here start at 0 and add 1.
        condition = "\n".join(inner.text for inner in computations[match[1]])
        bounds = [int(bound) for bound in re.findall(r"constant\((\d+)\)", condition)]
        return [(match[2], max(bounds, default=1))]
    if each.opcode in ("call", "conditional"):
        return [(called, 1) for called in called_by(each)]
    return []


def operands_of(each: Instruction) -> list[str]:
    """Return the names of an instruction's operands."""
    operands = each.text[len(each.shape) :]
    operands = operands[: operands.find("), ")] if "), " in operands else operands
    return re.findall(r"%([\w.\-]+)", operands)


def types_of(text: str) -> list[tuple[str, list[int]]]:
    """Return dtype and sizes of each array that a text names."""
    found = ((dtype, sizes.split(",")) for dtype, sizes, _ in _ARRAY.findall(text))
    return [(dtype, [int(size) for size in sizes if size]) for dtype, sizes in found]


def array_bytes(shape: str, *, only_hbm: bool = False, but: Set[str] = frozenset()) -> float:
    """Return the bytes of the arrays in a shape, without those of the types ``but``."""
    total = 0.0
    for dtype, sizes, layout in _ARRAY.findall(shape):
        if (only_hbm and _NOT_IN_HBM.search(layout)) or f"{dtype}[{sizes}]" in but:
            continue
        total += _ITEM_BYTES[dtype] * math.prod(int(size) for size in sizes.split(",") if size)
    return total


# -- bytes in HBM, and collectives ------------------------------------------------------

_COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "call",
    "conditional",
    "after-all",
    "partition-id",
    "replica-id",
}
"""Opcodes that move no bytes themselves."""
_BYTES_OF_KERNEL = re.compile(r'"custom_call_config":.*"bytes_accessed":"?(\d+)')


@dataclass
class Traffic:
    """Bytes and collectives of one device in one execution."""

    hbm_bytes: float = 0.0
    """Bytes that instructions of the schedule read and write, vector memory left out."""
    collective_bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Bytes by kind that a device receives from its own slice: the least any algorithm needs."""
    dcn_bytes: float = 0.0
    """Bytes that it receives from other slices, over the data center network."""
    collectives: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How often each kind of collective runs."""
    asynchronous: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """How many collectives of each kind run while something else is computed."""

    def add(self, other: Traffic, times: int) -> None:
        """Add the traffic of another module, which runs ``times`` times."""
        self.hbm_bytes += times * other.hbm_bytes
        self.dcn_bytes += times * other.dcn_bytes
        for kind, count in other.collectives.items():
            self.collectives[kind] += times * count
            self.asynchronous[kind] += times * other.asynchronous[kind]
            self.collective_bytes[kind] += times * other.collective_bytes[kind]


def measure(hlo: str, devices: int, slices: int = 1) -> Traffic:
    """Return the traffic of a scheduled TPU module given as text.

    Its collectives stay inside a slice; the compiler makes the rest transfers by the hosts.
    """
    computations, entry = parse_module(hlo)
    traffic, seen = Traffic(), set[str]()
    for name, runs in _schedule(computations, entry):
        instructions = computations[name]
        shapes = {each.name: each.shape for each in instructions}
        for each in instructions:
            collectives = collectives_of(each, computations)
            if each.opcode not in _FREE and not each.opcode.endswith("-done"):
                in_pieces = {buffer for *_, buffers in collectives for buffer in buffers}
                traffic.hbm_bytes += runs * instruction_bytes(each, shapes, in_pieces)
            if "_xla_megascale_transfer_type" in each.text and each.opcode == "send":
                traffic.dcn_bytes += runs * received_from_slices(each, slices)
            for found, is_async, buffers in collectives:
                key = channel_of(found) or f"{name}/{found.name}"
                if key in seen:  # one collective in pieces, among several fusions
                    continue
                seen.add(key)
                traffic.hbm_bytes += runs * sum(map(array_bytes, buffers))
                kind = found.opcode.removesuffix("-start")
                traffic.collectives[kind] += runs
                traffic.asynchronous[kind] += runs if is_async else 0
                traffic.collective_bytes[kind] += runs * received_bytes(found, devices // slices)
    return traffic


def _schedule(computations: Computations, name: str, times: int = 1) -> Iterator[tuple[str, int]]:
    """Yield every computation of the schedule, not those inside fusions, and how often it runs."""
    yield name, times
    for each in computations[name]:
        for called, rounds in scheduled_by(each, computations):
            yield from _schedule(computations, called, times * rounds)


def instruction_bytes(
    each: Instruction, shapes: dict[str, str], but: Set[str] = frozenset()
) -> float:
    """Return the bytes that an instruction reads and writes in HBM; ``shapes`` are by name.

    Buffers of the types ``but`` are left out.
    """
    names = operands_of(each)
    if "dynamic-update-slice" in each.name:  # in place: the slice, not the whole
        sizes = sorted(array_bytes(shapes.get(name, ""), only_hbm=True) for name in names)
        return 2 * sum(sizes[:-1])
    if "dynamic-slice" in each.name or each.opcode == "dynamic-slice":
        return 2 * array_bytes(each.shape, only_hbm=True)
    moved = [each.shape, *(shapes.get(name, "") for name in names)]
    in_hbm = sum(array_bytes(shape, only_hbm=True, but=but) for shape in moved)
    of_kernel = _BYTES_OF_KERNEL.search(each.text)
    if of_kernel and in_hbm:  # a Pallas kernel reads some of its operands more than once
        return int(of_kernel[1]) * in_hbm / sum(map(array_bytes, moved))
    return in_hbm


def collectives_of(
    each: Instruction, computations: Computations
) -> list[tuple[Instruction, bool, list[str]]]:
    """Return the collectives in an instruction, and whether each runs beside something else.

    For one that a fusion carries a piece of, the third value holds the types of what the whole of
    it reads and writes: all its pieces name these, none moves them whole.
    """
    if each.opcode.removesuffix("-start") in _COLLECTIVES:
        return [(each, each.opcode.endswith("-start"), [])]
    if each.opcode != "fusion":
        return []
    found: list[tuple[Instruction, bool, list[str]]] = []
    for called in called_by(each):
        inside = computations.get(called, [])
        for inner in inside:
            if inner.opcode.removesuffix("-start") not in _COLLECTIVES:
                continue
            if called.startswith("all-reduce-scatter"):  # its input is the shape
                inner = replace(inner, opcode="reduce-scatter", shape=each.shape)
            in_pieces = "chain_id" in inner.text
            buffers: list[str] = []
            if in_pieces:
                operand = re.search(r"\(%([\w.\-]+)", inner.text)
                assert operand, inner.text
                (read,) = (other.shape for other in inside if other.name == operand[1])
                # Without the layout: where a buffer is may differ from piece to piece.
                buffers = [
                    "".join(f"{dtype}[{sizes}]" for dtype, sizes, _ in _ARRAY.findall(shape))
                    for shape in (read, inner.shape)
                ]
            found.append((inner, in_pieces or "async" in each.name, buffers))
    return found


def channel_of(collective: Instruction) -> str | None:
    """Return what all pieces of one collective, and no other one, have in common."""
    same = re.search(r'channel_id=\d+|chain_id="\d+"', collective.text)
    return same[0] if same else None


def group_of(collective: Instruction, devices: int) -> list[int]:
    """Return the numbers of the devices of the first group that a collective is among.

    Of all ``devices`` where its text names none.
    """
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", collective.text)
    if listed:
        return [int(number) for number in listed[1].split(",")]
    counted = re.search(
        r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", collective.text
    )
    if not counted:
        return [*range(devices)]
    sizes = [int(size) for size in counted[3].split(",")]
    numbers = np.arange(np.prod(sizes)).reshape(sizes)
    if counted[4]:
        numbers = numbers.transpose([int(axis) for axis in counted[4].split(",")])
    return [int(number) for number in numbers.reshape(-1)[: int(counted[2])]]


def received_bytes(each: Instruction, devices: int) -> float:
    """Return the bytes that a collective must bring to a device from its group's other members.

    A permute brings its whole operand.
    """
    kind = each.opcode.removesuffix("-start")
    size = len(group_of(each, devices))
    whole = array_bytes(each.shape)
    if kind == "collective-permute":
        return whole / 2 if each.opcode.endswith("-start") else whole  # (source, destination)
    if kind == "all-reduce":
        return 2 * whole * (size - 1) / size
    if kind == "reduce-scatter":
        return whole * (size - 1)
    return whole * (size - 1) / size


def dma_bytes(start: Instruction) -> float:
    """Return the bytes of a copy that starts here; its shape is (operands, result, context).

    Operands that are indices do not count.
    """
    found = _ARRAY.findall(start.shape)
    sizes = [array_bytes(f"{dtype}[{sizes}]") for dtype, sizes, _ in found if sizes]
    return min(sizes[:2]) if len(sizes) > 1 else 0.0


def received_from_slices(send: Instruction, slices: int) -> float:
    """Return the bytes that must reach a device's host of what each slice sends to its own."""
    sent = array_bytes(send.shape.partition("]")[0] + "]")  # (the data, u32[], token[])
    if '_xla_megascale_transfer_type="ALL_REDUCE"' in send.text:
        return 2 * sent * (slices - 1) / slices
    return sent * (slices - 1)


# -- FLOPs of the products in a compiled module -----------------------------------------
#
# The TPU compiler writes products as convolutions; the dimensions of a batch are spatial ones, with
# padding and dilation that leave one valid place of the window for each output.

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


def product_flops(each: Instruction, shapes: dict[str, str], int8_speedup: int = 1) -> float:
    """Return the operations of one product, two a multiply-add; 0 if it is none.

    ``shapes`` are those of its computation's instructions, by name. Of int8 numbers,
    ``int8_speedup`` operations count as one.
    """
    if each.opcode not in ("dot", "convolution"):
        return 0.0
    (dtype, left), (_, right) = (types_of(shapes[name])[0] for name in operands_of(each)[:2])
    result = types_of(each.shape)[0][1]
    speedup = int8_speedup if dtype == "s8" else 1
    if each.opcode == "dot":
        contracted = _CONTRACTED.search(each.text)
        places = contracted[1].split(",") if contracted and contracted[1] else []
        return 2.0 * math.prod(result) * math.prod(left[int(place)] for place in places) / speedup
    labels = _LABELS.search(each.text)
    assert labels, each.text
    of_left, of_right, of_result = labels.groups()
    total = 2.0 * result[of_result.index("b")] * result[of_result.index("f")]
    total *= right[of_right.index("i")]
    for dimension in sorted(filter(str.isdigit, of_result)):
        sizes = left[of_left.index(dimension)], result[of_result.index(dimension)]
        total *= _valid_places(each.text, int(dimension), *sizes)
    return total / speedup


def _valid_places(text: str, dimension: int, inputs: int, results: int) -> int:
    """Count the pairs of an output's place and a place of the window that meet an input."""

    def setting(name: str, default: str) -> str:
        found = re.search(rf"window=\{{[^}}]*\b{name}=([\dx_\-]+)", text)
        return found[1].split("x")[dimension] if found else default

    size, stride = int(setting("size", "1")), int(setting("stride", "1"))
    before = int(setting("pad", "0_0").split("_")[0])
    apart, gaps = int(setting("lhs_dilate", "1")), int(setting("rhs_dilate", "1"))
    places = np.arange(results)[:, None] * stride - before + np.arange(size)[None, :] * gaps
    inside = (places >= 0) & (places <= (inputs - 1) * apart) & (places % apart == 0)
    return int(inside.sum())


def flops_inside(
    each: Instruction, computations: Computations, int8_speedup: int = 1
) -> list[tuple[float, Instruction]]:
    """Return the products in a fusion, of whatever depth, and the operations of each."""
    if each.opcode != "fusion":
        return []
    found = []
    for called in called_by(each):
        inside = computations.get(called, [])
        shapes = {inner.name: inner.shape for inner in inside}
        for inner in inside:
            flops = product_flops(inner, shapes, int8_speedup)
            found += [(flops, inner)] if flops else flops_inside(inner, computations, int8_speedup)
    return found


# -- FLOPs of the products in a StableHLO module ----------------------------------------


def count_flops(module: Any, int8_speedup: int = 1) -> float:
    """Count the whole program, before it is divided over devices: two for each multiply-add.

    Recomputation under gradient checkpointing is in the program and so in the count. Of int8
    numbers, ``int8_speedup`` operations count as one.
    """
    functions = {f.name.value: f for f in module.body.operations}
    return _flops_of(_body(functions["main"]), functions, int8_speedup)


def _body(function: Any) -> Any:
    return function.regions[0].blocks[0]


def _flops_of(block: Any, functions: dict[str, Any], int8_speedup: int) -> float:
    total = 0.0
    for op in _live(block):
        if op.name == "stablehlo.dot":
            total += 2.0 * math.prod(shape_of(op.results[0])) * shape_of(op.operands[0])[-1]
        elif op.name == "stablehlo.dot_general":
            left = shape_of(op.operands[0])
            contracted = math.prod(left[d] for d in contracted_dimensions(op))
            flops = 2.0 * math.prod(shape_of(op.results[0])) * contracted
            total += flops / (int8_speedup if is_int8(op.operands[0]) else 1)
        elif op.name == "stablehlo.convolution":
            kernel = shape_of(op.operands[1])
            per_output = math.prod(kernel) // kernel[kernel_output_dimension(op)]
            total += 2.0 * math.prod(shape_of(op.results[0])) * per_output
        elif op.name == "stablehlo.custom_call":
            total += _pallas_flops(op)
        elif op.name == "func.call":
            called = functions[op.attributes["callee"].value]
            total += _flops_of(_body(called), functions, int8_speedup)
        elif op.name == "stablehlo.while":
            condition, body = (region.blocks[0] for region in op.regions)
            rounds = _loop_rounds(condition, functions)
            total += rounds * _flops_of(body, functions, int8_speedup)
        else:
            blocks = (inner for region in op.regions for inner in region.blocks)
            total += sum(_flops_of(inner, functions, int8_speedup) for inner in blocks)
    return total


def _live(block: Any) -> list[Any]:
    """Return the operations whose results are used, the last one first.

    The compiler drops the others, such as the gradient of the images.
    """
    live: list[Any] = []
    dead = set()
    for operation in reversed(list(block.operations)):
        op = operation.operation
        users = [use.owner.operation for result in op.results for use in result.uses]
        if len(op.results) and all(user in dead for user in users):
            dead.add(op)
        else:
            live.append(op)
    return live


def _pallas_flops(op: Any) -> float:
    """Return the FLOPs that a Pallas kernel's call declares, on all devices together.

    xla_fsdp.attention.kernels writes them there.
    """
    if op.attributes["call_target_name"].value != "tpu_custom_call":
        return 0.0
    cost = json.loads(op.attributes["backend_config"].value)["custom_call_config"]["cost_estimate"]
    devices = 1.0
    part = op.operands[0]
    if getattr(part.owner, "name", "") == "stablehlo.custom_call":  # a shard of a sharded tensor
        devices = math.prod(shape_of(part.owner.operands[0])) / math.prod(shape_of(part))
    return devices * float(cost["flops"])


def _loop_rounds(condition: Any, functions: dict[str, Any]) -> int:
    """Return the bound of a loop's counter, which starts at 0 and grows by 1 (xla_fsdp.scan)."""
    bounds = [1]
    for operation in condition.operations:
        op = operation.operation
        if op.name == "stablehlo.constant":
            bounds.append(first_integer(op))
        elif op.name == "func.call":
            called = functions[op.attributes["callee"].value]
            bounds.append(_loop_rounds(_body(called), functions))
    return max(bounds)
