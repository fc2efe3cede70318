"""Sizes that the kernels of flash attention are given: padded, and divided into blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LANES = 128
"""Numbers side by side in a vector register: statistics of a row are kept that wide."""
SUBLANES = 8
_BLOCKS = (512, 384)
"""Rows of queries, and of keys, that a kernel holds at once, where there are more."""


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
        return block_of(self.tokens)

    @property
    def key_block(self) -> int:
        return block_of(self.keys)

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


def padded_tokens(tokens: int) -> int:
    """Return the sequence length that the kernels are given: a multiple of their block."""
    if tokens <= max(_BLOCKS):
        return _round_up(tokens, LANES)
    return _round_up(tokens, _best_block(tokens))


def block_of(tokens: int) -> int:
    """Return the block that divides so many tokens, which ``padded_tokens`` has padded."""
    return tokens if tokens <= max(_BLOCKS) else _best_block(tokens)


def padded_width(width: int) -> int:
    """Return a head's width for the kernels: any up to 128, above it multiples of 128."""
    return width if width <= LANES else _round_up(width, LANES)


def _best_block(tokens: int) -> int:
    return min(_BLOCKS, key=lambda block: _round_up(tokens, block))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
