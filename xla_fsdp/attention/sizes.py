"""Sizes that the kernels of flash attention are given: padded, and divided into blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LANES = 128
"""Numbers side by side in a vector register: statistics of a row are kept that wide."""
SUBLANES = 8
_BLOCKS = (1024, 896, 768, 640)
"""Rows of queries, and of keys, that a kernel may hold at once, where there are more.

The fewer, the longer it takes: with 384 half as long again as with 1024 (docs/tpu_speed.md)."""
_WIDE_BLOCKS = (512, 384)
"""The same where rows are wider than 256 bytes, or numbers than 2.

16 MiB of vector memory, which is what v4 has, hold no more of them."""


@dataclass(frozen=True)
class Shape:
    """Sizes of what one device computes: attention of ``tokens`` queries to ``keys`` keys.

    These and a head's ``width`` are padded ones; ``valid`` is the number of keys without padding.
    """

    batch: int
    heads: int
    tokens: int
    keys: int
    width: int
    valid: int
    dtype: torch.dtype

    @property
    def block(self) -> int:
        """Return how many queries a kernel holds at once."""
        return _block(self.tokens, self._blocks)

    @property
    def key_block(self) -> int:
        return _block(self.keys, self._blocks)

    @property
    def _blocks(self) -> tuple[int, ...]:
        return _blocks_for(self.width, self.dtype)

    @property
    def masked(self) -> bool:
        return self.valid < self.keys

    @property
    def scores(self) -> tuple[int, ...]:
        """Shape of one per-query statistic."""
        return (self.batch, self.heads, self.tokens)

    @property
    def heads_of(self) -> tuple[int, ...]:
        """Shape of queries, output, and their gradients."""
        return (*self.scores, self.width)

    @property
    def heads_of_keys(self) -> tuple[int, ...]:
        """Shape of keys, values, and their gradients."""
        return (self.batch, self.heads, self.keys, self.width)

    @property
    def rows(self) -> tuple[int, ...]:
        """Shape of one per-query statistic, repeated over 128 lanes."""
        return (*self.scores, LANES)


def padded_tokens(tokens: int, width: int, dtype: torch.dtype) -> int:
    """Return the sequence length that the kernels are given: a multiple of their block.

    ``width`` is the padded one of a head.
    """
    blocks = _blocks_for(width, dtype)
    if tokens <= max(blocks):
        return _round_up(tokens, LANES)
    return min(_round_up(tokens, block) for block in blocks)


def padded_width(width: int) -> int:
    """Return a head's width for the kernels: any up to 128, above it multiples of 128."""
    return width if width <= LANES else _round_up(width, LANES)


def _blocks_for(width: int, dtype: torch.dtype) -> tuple[int, ...]:
    return _BLOCKS if dtype.itemsize == 2 and width <= LANES else _WIDE_BLOCKS


def _block(tokens: int, blocks: tuple[int, ...]) -> int:
    """Return the largest block that divides so many tokens, a multiple of ``LANES``.

    Keys that several devices have padded are one of ``blocks`` only by chance.
    """
    most = max(blocks)
    if tokens <= most:
        return tokens
    return next(size for size in range(most, 0, -LANES) if tokens % size == 0)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
