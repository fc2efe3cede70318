"""Sizes that the kernels of flash attention are given: padded, and in blocks."""

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
    """What one device computes. ``tokens`` and ``width`` (of a head) are padded, ``valid`` not."""

    batch: int
    heads: int
    tokens: int
    width: int
    valid: int
    dtype: torch.dtype

    @property
    def block(self) -> int:
        return self.tokens if self.tokens <= max(_BLOCKS) else _best_block(self.tokens)

    @property
    def masked(self) -> bool:
        return self.valid < self.tokens

    @property
    def scores(self) -> tuple[int, ...]:
        return (self.batch, self.heads, self.tokens)

    @property
    def heads_of(self) -> tuple[int, ...]:
        """Of queries, keys, values, output, and their gradients."""
        return (*self.scores, self.width)

    @property
    def rows(self) -> tuple[int, ...]:
        """Of a figure a query, repeated over the lanes."""
        return (*self.scores, LANES)


def padded_tokens(tokens: int) -> int:
    """The sequence length that the kernels are given: a multiple of their block."""
    if tokens <= max(_BLOCKS):
        return _round_up(tokens, LANES)
    return _round_up(tokens, _best_block(tokens))


def padded_width(width: int) -> int:
    """A head's width for the kernels: up to 128 any, above it multiples of 128."""
    return width if width <= LANES else _round_up(width, LANES)


def _best_block(tokens: int) -> int:
    return min(_BLOCKS, key=lambda block: _round_up(tokens, block))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
