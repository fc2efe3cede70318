"""Parts of the Pallas kernels of attention, written in JAX: heads in vector registers, products.

Imports JAX: import it where a kernel is lowered, and not before.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from xla_fsdp.attention.sizes import LANES


@dataclass(frozen=True)
class Head:
    """The lanes of the registers that a head touches, and which of them are its own."""

    lanes: slice
    own: Any
    """Booleans (1, lanes), or None if all are."""

    def only(self, x: Any) -> Any:
        """Set the lanes of other heads to zero."""
        return x if self.own is None else jnp.where(self.own, x, jnp.zeros_like(x))


def heads_of(lanes: int, width: int) -> Iterator[Head]:
    """Yield the heads of a group that has so many lanes, each ``width`` wide."""
    for first in range(0, lanes, width):
        start = first // LANES * LANES
        end = min(-(-(first + width) // LANES) * LANES, lanes)
        lane = numbers(1, end - start) + start
        own = (lane >= first) & (lane < first + width)
        yield Head(slice(start, end), None if end - start == width else own)


def product(left: Any, right: Any, over_left: int, over_right: int) -> Any:
    """Multiply, summing over a dimension of each; in fp32."""
    dimensions = (((over_left,), (over_right,)), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, preferred_element_type="float32")


def numbers(rows: int, columns: int) -> Any:
    """Return 0, 1, ... along the rows, or along the columns if there is one row."""
    return jax.lax.broadcasted_iota("int32", (rows, columns), int(rows == 1))


def name_of(dtype: torch.dtype) -> str:
    """Return JAX's name of a dtype."""
    return str(dtype).removeprefix("torch.")
