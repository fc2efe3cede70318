"""Pallas kernels of attention: how one is lowered, what calls it, and the sizes that each is given:
padded, and divided into blocks.

JAX lowers them on any machine, with the cost of each in its call, where ``--compile_only`` reads
it. How a call gets into a program is the backend's part (``Calls``).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from tpu_attention import jax_private


@dataclass(frozen=True)
class Counted:
    """How ``--compile_only`` counts the cycles of a kernel."""

    branches: int = 1
    """How many branches a program of it has, each taken equally often."""
    stand_ins: Callable[[], list[str]] | None = None
    """Makes the code of kernels that have but one of its ways each, which programs take equally
    often in what the expectation assumes; None: all programs run all of its own code."""


COUNTED: dict[str, Counted] = {}
"""Of each kernel that was lowered here, by its code: a compiled program, whose cycles are counted,
has its kernels as code alone."""


def counted_here() -> dict[str, Counted]:
    """Return ``COUNTED`` for another process: stand-ins are lowered here."""
    return {
        body: Counted(each.branches, functools.partial(list, each.stand_ins()))
        if each.stand_ins
        else each
        for body, each in COUNTED.items()
    }


Array = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Kernel:
    """A lowered kernel."""

    config: str
    """The configuration of its Mosaic call, JSON."""
    module: str
    """The StableHLO module whose main function calls it, as text."""
    results: tuple[Array, ...]


def lower(
    function: Callable,
    arguments: list[Array],
    results: list[Array],
    *,
    flops: int,
    transcendentals: int,
    bytes_accessed: int,
    branches: int = 1,
    stand_ins: Sequence[Callable] = (),
) -> Kernel:
    """Lower a JAX function of one Pallas kernel for arrays of these shapes and dtypes; ``branches``
    and ``stand_ins``, functions of the same arrays: as of ``Counted``."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # it only lowers: a TPU, if any, is PyTorch's
    arrays = [
        jax.ShapeDtypeStruct(shape, str(dtype).removeprefix("torch.")) for shape, dtype in arguments
    ]
    cost = {
        "flops": flops,
        "transcendentals": transcendentals,
        "bytes_accessed": bytes_accessed,
    }
    config, module = jax_private.lower_for_tpu(function, arrays, cost)

    def stand_in_bodies() -> list[str]:
        lowered = (jax_private.lower_for_tpu(each, arrays, cost) for each in stand_ins)
        return [_body(config) for config, _ in lowered]

    COUNTED[_body(config)] = Counted(branches, stand_in_bodies if stand_ins else None)
    return Kernel(config, module, tuple(results))


def _body(config: str) -> str:
    return json.loads(config)["custom_call_config"]["body"]


class Calls:
    """What calls kernels: a backend's subclass. This process has one device of whole images and
    heads; of several, each calls a kernel on its part.

    Images are dimension 0 of a tensor; a call names the dimension of heads, if there is one.
    """

    image_shards = head_shards = 1

    def part(self, x: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Return a device's part of the whole tensor."""
        return x

    def replicated(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of which each device has all, for its call."""
        return x

    def whole(self, part: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Return the whole tensor of which each device has a part."""
        return part

    def dtype(self, v: torch.Tensor) -> torch.dtype:
        """Return the dtype that attention to the values ``v`` computes in."""
        return v.dtype

    def call(
        self,
        kernel: Callable[..., Kernel],
        sizes: Any,
        parts: list[torch.Tensor],
        *,
        backward: bool,
    ) -> list[torch.Tensor]:
        """Return the results of ``kernel(sizes, backward=backward)``, which lowers it, for these
        arguments."""
        raise NotImplementedError


class Saves(Protocol):
    """Which results of a block are saved for the backward pass."""

    def result(self, function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """Return the result of ``function``, which may be saved: its last argument, or None if
        it has to compute it."""


LANES = 128
"""Columns of a vector register."""
SUBLANES = 8
"""Rows of a vector register."""
Number = TypeVar("Number", int, float)

# ------------------------------------------------------------------------------------------------
# Sizes of flash attention.


_MOST_ROWS, _MOST_WIDE_ROWS = 1024, 512
"""Rows of queries, and of keys, that a kernel holds at once; where rows are wider than 256 bytes,
or numbers than 2, the second.

The fewer, the longer it takes: with 384 half as long again as with 1024
(docs/evidence/tpu_speed.md). 16 MiB of vector memory, which is what v4 has, hold no more."""
_QUERY_GRADIENT_BYTES = 4 * 2**20
"""Of vector memory, for the gradient of queries, which is summed there in fp32."""


@dataclass(unsafe_hash=True)
class FlashSizes:
    """Sizes of what one device computes: attention of ``tokens`` queries to ``keys`` keys.

    ``width``: of a head, as ``padded_width``; ``scale``: of scores; ``masked``: some keys are
    padding, or, ``segmented``, of another segment than a query.
    """

    batch: int
    heads: int
    tokens: int
    keys: int
    width: int
    dtype: torch.dtype
    scale: float = 1.0
    masked: bool = False
    segmented: bool = False

    def __post_init__(self) -> None:
        # Columns that a program computes: whole registers.
        self.lanes = max(self.width, LANES)
        self.heads_together = self.lanes // self.width
        self.groups = self.heads // self.heads_together
        # Rows of keys, and of queries, that a kernel holds at once.
        small = self.dtype.itemsize == 2 and self.lanes == LANES
        most_rows = _MOST_ROWS if small else _MOST_WIDE_ROWS
        self.key_blocks = -(-self.keys // most_rows)
        self.key_block = round_up(-(-self.keys // self.key_blocks), LANES)
        # The gradient of a span's queries is in vector memory until all keys have added to it. The
        # last span may have fewer blocks.
        self.spans = -(-self.tokens // (_QUERY_GRADIENT_BYTES // (4 * self.lanes)))
        self.span_blocks = -(-self.tokens // (self.spans * most_rows))
        self.block = round_up(-(-self.tokens // (self.spans * self.span_blocks)), LANES)
        self.blocks = -(-self.tokens // self.block)
        # Shapes: of the output and the gradient of queries; of keys and values; of what each span
        # of queries adds to their gradients; of one number of each query; of the mask, in whole
        # blocks of keys and of queries.
        columns = self.heads * self.width
        self.shape = (self.batch, self.tokens, columns)
        self.key_shape = (self.batch, self.keys, columns)
        self.key_gradient_shape = (self.batch, self.spans, self.keys, columns)
        self.statistic_shape = (self.batch, self.groups, self.heads_together, self.tokens)
        rows = max(self.key_blocks * self.key_block, self.blocks * self.block)
        self.mask_shape = (self.batch, 1, rows)


def padded_width(heads: int, width: int) -> int:
    """Return a head's width for the kernels: it fills whole registers, alone or with other
    heads."""
    shared = LANES % width == 0 and heads % (LANES // width) == 0
    return width if shared else round_up(width, LANES)


def round_up(size: Number, multiple: int) -> Number:
    return -(-size // multiple) * multiple


# ------------------------------------------------------------------------------------------------
# Sizes of attention by whole sequences.


_MOST_UNDIVIDED = 512
"""Queries that are computed at once; more are computed in blocks."""
_QUERY_BLOCK = 256
_WINDOWS = (256, 512)
"""Keys that a block of queries is computed with, if its segments have no others. Each more is as
much more code to compile."""
WINDOW_STEP = 16
"""A window starts at a multiple of this: rows of a register of bf16 numbers."""
_FORWARD_HEADS, _BACKWARD_HEADS = 8, 4
"""Heads of 256 queries and keys that one program of the grid computes: while the units wait for one
of them they work on another. By libtpu's schedules more gains little."""
DEFAULT_VECTOR_MEMORY = 16 * 2**20
"""Bytes that libtpu gives a kernel which does not ask for more, and all that v4 has."""
LARGEST_VECTOR_MEMORY = 64 * 2**20
"""Bytes that a kernel may ask for on later chips."""
_FORWARD_BLOCKS, _BACKWARD_BLOCKS = "qqkk", "qqqkkkk"
"""The blocks that a program holds: of its queries, "q", or of all tokens, "k"."""


@dataclass(unsafe_hash=True)
class WholeSizes:
    """Sizes of what one device computes.

    ``packed``: queries, keys and values are one array, (batch, tokens, 3 x heads x width).
    ``apart``: how far apart two columns are that are rotated together; 0: nothing is rotated.
    ``segmented``: queries attend to the keys of their own segment.
    ``window``: the only one of ``windows`` that programs can compute; 0: they have all.
    """

    batch: int
    tokens: int
    heads: int
    width: int
    dtype: torch.dtype
    packed: bool = False
    apart: int = 0
    segmented: bool = False
    window: int = 0

    def __post_init__(self) -> None:
        columns = self.heads * self.width
        # Columns of a group of heads: whole registers, or all that there are. Whole registers can
        # be found in a packed array, and shifted.
        together = math.lcm(self.width, LANES)
        self.lanes = together if columns % together == 0 else columns
        self.groups = columns // self.lanes
        self.fills_registers = self.lanes % LANES == 0
        # Queries that a program computes.
        self.queries = self.tokens if self.tokens <= _MOST_UNDIVIDED else _QUERY_BLOCK
        self.query_blocks = -(-self.tokens // self.queries)
        # How many keys a block of queries may be computed with: those of its segments are in one of
        # these windows.
        self.windows: tuple[int, ...] = ()
        if self.window:
            self.windows = (self.window,)
        elif self.segmented and self.query_blocks > 1:
            self.windows = (*(size for size in _WINDOWS if size < self.tokens), self.tokens)
        # Shapes: of queries, keys, values or the output; of the array that queries are in; of all
        # three gradients.
        self.shape = (self.batch, self.tokens, columns)
        self.input_shape = (self.batch, self.tokens, columns * (3 if self.packed else 1))
        self.gradients = self.input_shape if self.packed else (3, *self.shape)
        # By how much a group's columns are shifted so that each meets the other of a pair, behind
        # or before it: one shift does for both if a head fills its group.
        before, behind = self.apart, self.lanes - self.apart
        self.shifts = (behind,) if before == behind else (behind, before)
        # Shape of what queries and keys are rotated by: cosines, and sines for each shift.
        self.angles = (1 + len(self.shifts), self.query_blocks * self.queries, self.lanes)
        self.segments = (self.batch, 1, round_up(self.tokens, LANES))
        self.window_shape = (self.batch, 2 * self.query_blocks)

    def images(self, *, backward: bool) -> int:
        """Return how many images a program computes, a divisor of the batch."""
        heads = _BACKWARD_HEADS if backward else _FORWARD_HEADS
        most = heads * min(1.0, 256**2 / (self.queries * self.tokens)) * self.width / self.lanes
        return max(n for n in range(1, max(1, int(most)) + 1) if self.batch % n == 0)

    def vector_memory(self, *, backward: bool = True) -> int:
        """Return bytes that are enough for a program: each block twice, as the next one arrives
        meanwhile, scores in a few forms, rotated queries and keys once, what hides scores."""
        blocks = _BACKWARD_BLOCKS if backward else _FORWARD_BLOCKS
        images, rows = self.images(backward=backward), {"q": self.queries, "k": self.tokens}
        row_bytes = self.lanes * self.dtype.itemsize
        held, angles = 2 * row_bytes * sum(rows[kind] for kind in blocks), 0
        scores = 4 * self.queries * -(-self.tokens // LANES) * LANES
        if self.apart:
            held += row_bytes * (self.queries + self.tokens)
            angles = 2 * 4 * math.prod(self.angles)
        forms = 2 * (self.lanes // self.width) + self.segmented
        return angles + images * (held + forms * scores)
