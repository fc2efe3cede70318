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


_BLOCKS = (1024, 896, 768, 640)
"""Rows of queries, and of keys, that a kernel may hold at once, where there are more.

The fewer, the longer it takes: with 384 half as long again as with 1024 (docs/tpu_speed.md)."""
_WIDE_BLOCKS = (512, 384)
"""The same where rows are wider than 256 bytes, or numbers than 2.

16 MiB of vector memory, which is what v4 has, hold no more of them."""


@dataclass(frozen=True)
class FlashSizes:
    """Sizes of what one device computes: attention of ``tokens`` queries to ``keys`` keys.

    These and a head's ``width`` include padding; ``masked``: some keys are padding.
    """

    batch: int
    heads: int
    tokens: int
    keys: int
    width: int
    dtype: torch.dtype
    masked: bool = False

    @property
    def block(self) -> int:
        """Return how many queries a kernel holds at once."""
        return _block(self.tokens, self.width, self.dtype)

    @property
    def key_block(self) -> int:
        """Return how many keys a kernel holds at once."""
        return _block(self.keys, self.width, self.dtype)

    @property
    def query_shape(self) -> tuple[int, ...]:
        """Shape of queries, output, and their gradients."""
        return (self.batch, self.heads, self.tokens, self.width)

    @property
    def statistic_shape(self) -> tuple[int, ...]:
        """Shape of one statistic of each query, repeated over 128 lanes."""
        return (self.batch, self.heads, self.tokens, LANES)


def padded_tokens(tokens: int, width: int, dtype: torch.dtype) -> int:
    """Return the sequence length that the kernels are given: a multiple of their block.

    ``width`` is the padded one of a head.
    """
    blocks = _blocks(width, dtype)
    if tokens <= max(blocks):
        return _round_up(tokens, LANES)
    return min(_round_up(tokens, block) for block in blocks)


def padded_width(width: int) -> int:
    """Return a head's width for the kernels: any up to 128, above it multiples of 128."""
    return width if width <= LANES else _round_up(width, LANES)


def _blocks(width: int, dtype: torch.dtype) -> tuple[int, ...]:
    return _BLOCKS if dtype.itemsize == 2 and width <= LANES else _WIDE_BLOCKS


def _block(tokens: int, width: int, dtype: torch.dtype) -> int:
    """Return the largest block that divides so many tokens, a multiple of ``LANES``.

    Keys that several devices have padded may be a multiple of none of ``_blocks``.
    """
    largest = max(_blocks(width, dtype))
    if tokens <= largest:
        return tokens
    return next(size for size in range(largest, 0, -LANES) if tokens % size == 0)


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
    def given(self) -> tuple[int, int, int]:
        """Shape of the array that queries are in."""
        return (*self.shape[:2], self.shape[2] * (3 if self.packed else 1))

    @property
    def gradients(self) -> tuple[int, ...]:
        """Shape of all three gradients."""
        return self.given if self.packed else (3, *self.shape)

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
        return max(each for each in range(1, max(1, int(most)) + 1) if self.batch % each == 0)

    def vector_memory(self, *, backward: bool) -> int:
        """Return bytes that are enough for a program.

        Each block is there twice, as the next one arrives meanwhile; scores are in a few forms, and
        rotated queries and keys once.
        """
        blocks = _BACKWARD_BLOCKS if backward else _FORWARD_BLOCKS
        images, rows = self.images(backward=backward), {"q": self.queries, "k": self.tokens}
        held = sum(2 * rows[each] * self.lanes * self.dtype.itemsize for each in blocks)
        scores = 4 * self.queries * -(-self.tokens // LANES) * LANES
        angles = 0
        if self.apart:
            held += sum(rows[each] * self.lanes * self.dtype.itemsize for each in "qk")
            angles = 2 * 4 * math.prod(self.angles)
        return angles + images * (held + self.lanes // self.width * scores * 2)

    def fits(self, generation: int) -> bool:
        """Return True if a TPU of this generation has the vector memory for all kernels."""
        needed = self.vector_memory(backward=True)
        return needed <= (_LARGEST_VECTOR_MEMORY if generation > 4 else DEFAULT_VECTOR_MEMORY)
