"""Sizes that the kernels of attention are given: padded, and divided into blocks."""

import math
from dataclasses import dataclass

import torch

LANES = 128
"""Columns of a vector register."""
SUBLANES = 8
"""Rows of a vector register."""

# ------------------------------------------------------------------------------------------------
# Flash attention.


_MOST_ROWS, _MOST_WIDE_ROWS = 1024, 512
"""Rows of queries, and of keys, that a kernel holds at once; where rows are wider than 256 bytes,
or numbers than 2, the second.

The fewer, the longer it takes: with 384 half as long again as with 1024 (docs/tpu_speed.md). 16 MiB
of vector memory, which is what v4 has, hold no more."""
_QUERY_GRADIENT_BYTES = 4 * 2**20
"""Of vector memory, for the gradient of queries, which is summed there in fp32."""


@dataclass(frozen=True)
class FlashSizes:
    """Sizes of what one device computes: attention of ``tokens`` queries to ``keys`` keys.

    ``width``: of a head, as ``padded_width``; ``masked``: some keys are padding.
    """

    batch: int
    heads: int
    tokens: int
    keys: int
    width: int
    dtype: torch.dtype
    masked: bool = False

    @property
    def lanes(self) -> int:
        """Return how many columns a program computes: whole registers."""
        return max(self.width, LANES)

    @property
    def heads_together(self) -> int:
        return self.lanes // self.width

    @property
    def groups(self) -> int:
        return self.heads // self.heads_together

    @property
    def _most_rows(self) -> int:
        small = self.dtype.itemsize == 2 and self.lanes == LANES
        return _MOST_ROWS if small else _MOST_WIDE_ROWS

    @property
    def key_blocks(self) -> int:
        return -(-self.keys // self._most_rows)

    @property
    def key_block(self) -> int:
        """Return how many keys a kernel holds at once."""
        return _round_up(-(-self.keys // self.key_blocks), LANES)

    @property
    def spans(self) -> int:
        """Return into how many spans queries are divided.

        The gradient of a span's queries is in vector memory until all keys have added to it.
        """
        rows = _QUERY_GRADIENT_BYTES // (4 * self.lanes)
        return -(-self.tokens // rows)

    @property
    def span_blocks(self) -> int:
        """Return how many blocks of queries a span has."""
        return -(-self.tokens // (self.spans * self._most_rows))

    @property
    def block(self) -> int:
        """Return how many queries a kernel holds at once."""
        return _round_up(-(-self.tokens // (self.spans * self.span_blocks)), LANES)

    @property
    def blocks(self) -> int:
        """Return how many blocks of queries there are; the last span may have fewer."""
        return -(-self.tokens // self.block)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the output, and of the gradient of queries."""
        return (self.batch, self.tokens, self.heads * self.width)

    @property
    def key_shape(self) -> tuple[int, int, int]:
        return (self.batch, self.keys, self.heads * self.width)

    @property
    def key_gradient_shape(self) -> tuple[int, int, int, int]:
        """Shape of what each span of queries adds to the gradient of keys, or of values."""
        return (self.batch, self.spans, *self.key_shape[1:])

    @property
    def statistic_shape(self) -> tuple[int, ...]:
        """Shape of one number of each query."""
        return (self.batch, self.groups, self.heads_together, self.tokens)

    @property
    def valid_shape(self) -> tuple[int, int, int]:
        """Shape of which keys are valid: of whole blocks."""
        return (self.batch, 1, self.key_blocks * self.key_block)


def padded_width(heads: int, width: int) -> int:
    """Return a head's width for the kernels: such that heads fill whole registers.

    A head has some registers to itself, or shares one with others.
    """
    shared = LANES % width == 0 and heads % (LANES // width) == 0
    return width if shared else _round_up(width, LANES)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


# ------------------------------------------------------------------------------------------------
# Attention by whole sequences.


_MOST_UNDIVIDED = 512
"""Queries that are computed at once; more are computed in blocks."""
_QUERY_BLOCK = 256
_FORWARD_HEADS, _BACKWARD_HEADS = 8, 4
"""Heads of 256 queries and keys that one program of the grid computes: while the units wait for one
of them they work on another. By libtpu's schedules more gains little."""
DEFAULT_VECTOR_MEMORY = 16 * 2**20
"""Bytes that libtpu gives a kernel which does not ask for more, and all that v4 has."""
_LARGEST_VECTOR_MEMORY = 64 * 2**20
"""Bytes that a kernel may ask for on later chips."""
_FORWARD_BLOCKS, _BACKWARD_BLOCKS = "qqkk", "qqqkkkk"
"""The blocks that a program holds: of its queries, "q", or of all tokens, "k"."""


@dataclass(frozen=True)
class WholeSizes:
    """Sizes of what one device computes.

    ``packed``: queries, keys and values are one array, (batch, tokens, 3 x heads x width).
    ``apart``: how far apart two columns are that are rotated together; 0: nothing is rotated.
    """

    batch: int
    tokens: int
    heads: int
    width: int
    dtype: torch.dtype
    packed: bool = False
    apart: int = 0

    @property
    def lanes(self) -> int:
        """Return how many columns a group of heads has: whole registers, or all that there are."""
        together = math.lcm(self.width, LANES)
        columns = self.heads * self.width
        return together if columns % together == 0 else columns

    @property
    def groups(self) -> int:
        return self.heads * self.width // self.lanes

    @property
    def queries(self) -> int:
        """Return how many queries a program computes."""
        return self.tokens if self.tokens <= _MOST_UNDIVIDED else _QUERY_BLOCK

    @property
    def query_blocks(self) -> int:
        return -(-self.tokens // self.queries)

    @property
    def can_be_packed(self) -> bool:
        """Return True if a group of heads can be found in a packed array: by whole registers."""
        return self.lanes % LANES == 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of queries, keys, values or the output."""
        return (self.batch, self.tokens, self.heads * self.width)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Shape of the array that queries are in."""
        return (*self.shape[:2], self.shape[2] * (3 if self.packed else 1))

    @property
    def gradients(self) -> tuple[int, ...]:
        """Shape of all three gradients."""
        return self.input_shape if self.packed else (3, *self.shape)

    @property
    def shifts(self) -> tuple[int, ...]:
        """Return by how much a group's columns are shifted so that each meets the other of a pair.

        The other is behind or before it: one shift does for both if a head fills its group.
        """
        before, behind = self.apart, self.lanes - self.apart
        return (behind,) if before == behind else (behind, before)

    @property
    def angles(self) -> tuple[int, int, int]:
        """Shape of what queries and keys are rotated by: cosines, and sines for each shift."""
        return (1 + len(self.shifts), self.query_blocks * self.queries, self.lanes)

    @property
    def can_be_rotated(self) -> bool:
        """Return True if kernels can rotate: they shift whole registers, in any TPU's memory."""
        needed = self.vector_memory(backward=True)
        return self.lanes % LANES == 0 and needed <= DEFAULT_VECTOR_MEMORY

    def images(self, *, backward: bool) -> int:
        """Return how many images a program computes, a divisor of the batch."""
        heads = _BACKWARD_HEADS if backward else _FORWARD_HEADS
        most = heads * min(1.0, 256**2 / (self.queries * self.tokens)) * self.width / self.lanes
        return max(n for n in range(1, max(1, int(most)) + 1) if self.batch % n == 0)

    def vector_memory(self, *, backward: bool) -> int:
        """Return bytes that are enough for a program.

        Each block is there twice, as the next one arrives meanwhile; scores are in a few forms, and
        rotated queries and keys once.
        """
        blocks = _BACKWARD_BLOCKS if backward else _FORWARD_BLOCKS
        images, rows = self.images(backward=backward), {"q": self.queries, "k": self.tokens}
        held = sum(2 * rows[kind] * self.lanes * self.dtype.itemsize for kind in blocks)
        scores = 4 * self.queries * -(-self.tokens // LANES) * LANES
        angles = 0
        if self.apart:
            held += sum(rows[kind] * self.lanes * self.dtype.itemsize for kind in "qk")
            angles = 2 * 4 * math.prod(self.angles)
        return angles + images * (held + self.lanes // self.width * scores * 2)

    def fits(self, generation: int) -> bool:
        """Return True if a TPU of this generation has the vector memory for all kernels."""
        needed = self.vector_memory(backward=True)
        return needed <= (_LARGEST_VECTOR_MEMORY if generation > 4 else DEFAULT_VECTOR_MEMORY)
