"""The cost of an XLA module: HBM bytes, bytes and number of collectives, FLOPs of matrix products.

Modules are parsed from text: the compiled one, which one device runs in the order of its schedule,
and the traced one, for all devices together. XLA's own cost analysis counts the body of a loop
once; here each computation counts as often as it runs.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace

import numpy as np

# -- a module as text ---------------------------------------------------------

_ITEM_BYTES = (
    dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn"), 1)
    | dict.fromkeys(("bf16", "f16", "s16", "u16"), 2)
    | dict.fromkeys(("s32", "u32", "f32"), 4)
    | dict.fromkeys(("s64", "u64", "f64"), 8)
)
_ARRAY = re.compile(r"\b(" + "|".join(_ITEM_BYTES) + r")\[([\d,]*)\]((?:\{[^}]*\})?)")
"""Dtype, sizes and layout."""
_NOT_IN_HBM = re.compile(r"S\([1-9]")
"""In a layout: any other memory space, such as vector memory, scalar memory, the host's."""
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|[\s)}])([a-z][a-z\-]*)\(")
_CALLED = re.compile(r"(?:calls|to_apply|body|called_computations)=\{?%([\w.\-]+)")
_ON_SPARSE_CORES = 'async_execution_thread="sparsecore"'


@dataclass(eq=False)
class Instruction:
    """An instruction, with those that it takes values from and gives its own to."""

    name: str
    opcode: str
    shape: str
    text: str
    """All that follows the name."""
    is_root: bool = False
    """Whether it is the result of its computation."""
    operands: list[Instruction] = field(default_factory=list, repr=False)
    users: list[Instruction] = field(default_factory=list, repr=False)
    called: list[list[Instruction]] = field(default_factory=list, repr=False)
    """The computations that it names: a loop's body, a function, the inside of a fusion."""
    rounds: int = 1
    """Of a loop."""

    @property
    def scheduled(self) -> list[list[Instruction]]:
        """The computations that it runs one after the other; the inside of a fusion is not one."""
        return self.called if self.opcode in ("while", "call", "conditional") else []

    @property
    def start(self) -> Instruction:
        """The instruction that has started what this one carries on or ends; itself if it starts
        something."""
        carries_on = self.opcode.endswith(("-update", "-done")) and self.operands
        return self.operands[0].start if carries_on else self

    @property
    def is_on_sparse_cores(self) -> bool:
        """Whether it starts work of a chip's SparseCores, which runs beside all else.

        tpu7x has collectives there, and copies between layouts. What is read comes with an
        ``async-update`` where the start has no operands.
        """
        return self.opcode == "async-start" and _ON_SPARSE_CORES in self.text

    @property
    def inside(self) -> list[Instruction]:
        """The instructions that a fusion is made of; none of any other instruction."""
        return [*itertools.chain(*self.called)] if self.opcode == "fusion" else []


def parse_module(hlo: str) -> tuple[dict[str, list[Instruction]], str]:
    """Return the instructions of each computation in order, by its name, and the entry's name."""
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in hlo.splitlines():
        head = _HEAD.match(line)
        if head:
            current = head[2]
            computations[current] = []
            entry = current if head[1] else entry
            continue
        parts = _LINE.match(line)
        opcode = _OPCODE.search(parts[3]) if parts and current else None
        if parts and opcode:
            root, name, text = parts.groups()
            shape = text[: opcode.start(1)]
            computations[current].append(Instruction(name, opcode[1], shape, text, bool(root)))

    for instructions in computations.values():
        by_name = {instruction.name: instruction for instruction in instructions}
        for instruction in instructions:
            operands = instruction.text[len(instruction.shape) :].partition("), ")[0]
            for name, element in re.findall(r"%([\w.\-]+)(?:#(\d+))?", operands):
                if operand := by_name.get(name):
                    operand.users.append(instruction)
                    instruction.operands.append(
                        _element(operand, int(element)) if element else operand
                    )
            names = _CALLED.findall(instruction.text)
            instruction.called = [computations[name] for name in names if name in computations]
            condition = re.search(r"condition=%([\w.\-]+)", instruction.text)
            if condition and instruction.opcode == "while":
                # The counter is compared with a constant; loops here start at 0 and add 1.
                texts = (inner.text for inner in computations[condition[1]])
                bounds = re.findall(r"constant\((\d+)\)", "\n".join(texts))
                instruction.rounds = max(map(int, bounds), default=1)
    return computations, entry


def _element(whole: Instruction, number: int) -> Instruction:
    """Return what newer compilers write as ``%name#number``, an element of a tuple of arrays."""
    shape = [*_ARRAY.finditer(whole.shape)][number][0]
    return Instruction(
        f"{whole.name}#{number}", "get-tuple-element", shape, shape, operands=[whole]
    )


def types_of(text: str) -> list[tuple[str, list[int]]]:
    """Return dtype and sizes of each array that a text names."""
    arrays = ((dtype, sizes.split(",")) for dtype, sizes, _ in _ARRAY.findall(text))
    return [(dtype, [int(size) for size in sizes if size]) for dtype, sizes in arrays]


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
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"),
    *("conditional", "after-all", "partition-id", "replica-id", "async-update"),
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
    for instruction, runs in _schedule(computations[entry]):
        collectives = collectives_of(instruction)
        if instruction.opcode not in _FREE and not instruction.opcode.endswith("-done"):
            in_pieces = {buffer for *_, buffers in collectives for buffer in buffers}
            traffic.hbm_bytes += runs * instruction_bytes(instruction, in_pieces)
        if instruction.opcode == "send" and "_xla_megascale_transfer_type" in instruction.text:
            traffic.dcn_bytes += runs * received_from_slices(instruction, slices)
        for collective, is_async, buffers in collectives:
            key = chain_of(collective) or collective.name
            if key in seen:  # one collective in pieces, among several fusions
                continue
            seen.add(key)
            traffic.hbm_bytes += runs * sum(map(array_bytes, buffers))
            kind = collective.opcode.removesuffix("-start")
            received = received_bytes(collective, devices // slices)
            traffic.collectives[kind] += runs
            traffic.asynchronous[kind] += runs if is_async else 0
            traffic.collective_bytes[kind] += runs * received
    return traffic


def _schedule(computation: list[Instruction], times: int = 1) -> Iterator[tuple[Instruction, int]]:
    """Yield every instruction of the schedule, and how often it runs."""
    for instruction in computation:
        yield instruction, times
        for called in instruction.scheduled:
            yield from _schedule(called, times * instruction.rounds)


def instruction_bytes(instruction: Instruction, but: Set[str] = frozenset()) -> float:
    """Return the bytes that an instruction reads and writes in HBM, without the types ``but``."""
    name, operands = instruction.name, [operand.shape for operand in instruction.operands]
    if instruction.is_on_sparse_cores:  # its own shape has buffers for their work, too
        ends = (
            part for part in instruction.called[0] if part.opcode == "parameter" or part.is_root
        )
        return sum(array_bytes(part.shape, only_hbm=True) for part in ends)
    if "dynamic-update-slice" in name:  # in place: the slice, not the whole
        sizes = sorted(array_bytes(shape, only_hbm=True) for shape in operands)
        return 2 * sum(sizes[:-1])
    if "dynamic-slice" in name or instruction.opcode == "dynamic-slice":
        return 2 * array_bytes(instruction.shape, only_hbm=True)
    moved = [instruction.shape, *operands]
    in_hbm = sum(array_bytes(shape, only_hbm=True, but=but) for shape in moved)
    of_kernel = _BYTES_OF_KERNEL.search(instruction.text)
    if of_kernel and in_hbm:  # a Pallas kernel reads some of its operands more than once
        return int(of_kernel[1]) * in_hbm / sum(map(array_bytes, moved))
    return in_hbm


def collectives_of(instruction: Instruction) -> list[tuple[Instruction, bool, list[str]]]:
    """Return the collectives in an instruction, and whether each runs beside something else.

    For one that a fusion carries a piece of, the third value holds the types of what the whole of
    it reads and writes: all its pieces name these, none moves them whole.
    """
    if instruction.opcode.removesuffix("-start") in _COLLECTIVES:
        return [(instruction, instruction.opcode.endswith("-start"), [])]
    if instruction.is_on_sparse_cores:
        return [(inner, True, []) for inner in _within(instruction) if inner.opcode in _COLLECTIVES]
    collectives: list[tuple[Instruction, bool, list[str]]] = []
    for inner in instruction.inside:
        if inner.opcode.removesuffix("-start") not in _COLLECTIVES:
            continue
        if "calls=%all-reduce-scatter" in instruction.text:  # its input is the shape
            inner = replace(inner, opcode="reduce-scatter", shape=instruction.shape)
        in_pieces = chain_of(inner) is not None
        # Without the layout: where a buffer is may differ from piece to piece.
        buffers = [
            "".join(f"{dtype}[{sizes}]" for dtype, sizes, _ in _ARRAY.findall(shape))
            for shape in ([inner.operands[0].shape, inner.shape] if in_pieces else [])
        ]
        collectives.append((inner, in_pieces or "async" in instruction.name, buffers))
    return collectives


def _within(instruction: Instruction) -> Iterator[Instruction]:
    """Yield the instructions of all that one calls, at whatever depth."""
    for inner in itertools.chain(*instruction.called):
        yield inner
        yield from _within(inner)


def chain_of(collective: Instruction) -> str | None:
    """Return what all pieces of one collective, and no other one, have in common; None if it is not
    in pieces. (A channel may be that of all collectives: TorchTPU gives them one.)"""
    chain = re.search(r'chain_id="\d+"', collective.text)
    return chain[0] if chain else None


def group_of(collective: Instruction, devices: int) -> list[int]:
    """Return the numbers of a collective's first group of devices, of all if its text has none."""
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


def pairs_of(permute: Instruction) -> list[tuple[int, int]]:
    """Return the numbers of source and target device of each transfer of a permute."""
    listed = re.search(r"source_target_pairs=\{([\d,{}]*)\}", permute.text)
    pairs = re.findall(r"\{(\d+),(\d+)\}", listed[1]) if listed else []
    return [(int(source), int(target)) for source, target in pairs]


def received_bytes(collective: Instruction, devices: int) -> float:
    """Return the bytes that a collective must bring to a device from its group's other members."""
    kind, whole = collective.opcode.removesuffix("-start"), array_bytes(collective.shape)
    size = len(group_of(collective, devices))
    if kind == "collective-permute":  # its whole operand; a start is (source, destination)
        return whole / 2 if collective.opcode.endswith("-start") else whole
    if kind == "reduce-scatter":
        return whole * (size - 1)
    return whole * (size - 1) / size * (2 if kind == "all-reduce" else 1)


def dma_bytes(start: Instruction) -> float:
    """Return the bytes of a copy that starts here; its shape is (operands, result, context)."""
    found = _ARRAY.findall(start.shape)  # without operands that are indices
    sizes = [array_bytes(f"{dtype}[{sizes}]") for dtype, sizes, _ in found if sizes]
    return min(sizes[:2]) if len(sizes) > 1 else 0.0


def received_from_slices(send: Instruction, slices: int) -> float:
    """Return the bytes that must reach a device's host of what each slice sends to its own."""
    sent = array_bytes(send.shape.partition("]")[0] + "]")  # (the data, u32[], token[])
    if '_xla_megascale_transfer_type="ALL_REDUCE"' in send.text:
        return 2 * sent * (slices - 1) / slices
    return sent * (slices - 1)


# -- FLOPs of products ------------------------------------------------------------------
#
# The TPU compiler writes products as convolutions; the dimensions of a batch are spatial ones, with
# padding and dilation that leave one valid place of the window for each output.

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_FLOPS_OF_KERNEL = re.compile(r'"tpu_custom_call".*"cost_estimate": *\{[^}]*"flops": *"?(\d+)')


def products_of(instruction: Instruction, int8_speedup: int = 1) -> list[tuple[float, Instruction]]:
    """Return the products that an instruction is or, as a fusion, holds at whatever depth.

    With each its operations, two a multiply-add; of int8 numbers, ``int8_speedup`` count as one.
    """
    if instruction.opcode not in ("dot", "convolution"):
        return [product for i in instruction.inside for product in products_of(i, int8_speedup)]
    operands, text = instruction.operands[:2], instruction.text
    (dtype, left), (_, right) = (types_of(operand.shape)[0] for operand in operands)
    result = types_of(instruction.shape)[0][1]
    if instruction.opcode == "dot":
        contracted = _CONTRACTED.search(text)
        dimensions = contracted[1].split(",") if contracted and contracted[1] else []
        flops = 2.0 * math.prod(result) * math.prod(left[int(number)] for number in dimensions)
    else:
        labels = _LABELS.search(text)
        assert labels, text
        of_left, of_right, of_result = labels.groups()
        flops = 2.0 * result[of_result.index("b")] * result[of_result.index("f")]
        flops *= right[of_right.index("i")]
        written = re.search(r"window=\{([^}]*)\}", text)
        window = dict(word.split("=") for word in written[1].split()) if written else {}
        for dimension in sorted(filter(str.isdigit, of_result)):
            # The pairs of an output's place and a place of the window that meet an input.
            here = {name: values.split("x")[int(dimension)] for name, values in window.items()}
            size, stride = int(here.get("size", 1)), int(here.get("stride", 1))
            before = int(here.get("pad", "0_0").split("_")[0])
            apart, gaps = int(here.get("lhs_dilate", 1)), int(here.get("rhs_dilate", 1))
            outputs = np.arange(result[of_result.index(dimension)])[:, None]
            places = outputs * stride - before + np.arange(size)[None, :] * gaps
            last = (left[of_left.index(dimension)] - 1) * apart
            flops *= int(((places >= 0) & (places <= last) & (places % apart == 0)).sum())
    return [(flops / (int8_speedup if dtype == "s8" else 1), instruction)]


def count_flops(traced: str, int8_speedup: int = 1) -> float:
    """Count the operations of the whole program, before it is divided over devices, recomputation
    under gradient checkpointing included. They count as in ``products_of``."""

    def flops_of(computation: list[Instruction]) -> float:
        total, dead = 0.0, set[Instruction]()
        for instruction in reversed(computation):
            if not instruction.is_root and dead.issuperset(instruction.users):
                dead.add(instruction)  # the compiler drops it, too: e.g. the images' gradient
                continue
            total += sum(flops for flops, _ in products_of(instruction, int8_speedup))
            total += sum(instruction.rounds * flops_of(part) for part in instruction.scheduled)
            # A Pallas kernel declares those of a device (tpu_attention.kernels).
            if declared := _FLOPS_OF_KERNEL.search(instruction.text):
                part, devices = instruction, 1.0
                while part.operands and "SPMDFullToShardShape" not in part.text:
                    part = part.operands[0]
                if part.operands:  # a shard of a sharded tensor
                    devices = array_bytes(part.operands[0].shape) / array_bytes(part.shape)
                total += devices * int(declared[1])
        return total

    computations, entry = parse_module(traced)
    return flops_of(computations[entry])
