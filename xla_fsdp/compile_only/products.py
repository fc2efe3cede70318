"""Floating-point operations of the matrix products in a compiled module, one by one.

The TPU compiler writes products as convolutions; the dimensions of a batch are spatial ones, with
padding and dilation that leave one valid place of the window for each output.
"""

from __future__ import annotations

import math
import re

import numpy as np

from xla_fsdp.compile_only.hlo import Computations, Instruction, called_by, dimensions, operands_of

_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


def product_flops(each: Instruction, shapes: dict[str, str], int8_pace: int = 1) -> float:
    """Return the operations of one product, two a multiply-add; 0 if it is none.

    ``shapes`` are those of its computation's instructions, by name. Of int8 numbers, ``int8_pace``
    operations count as one.
    """
    if each.opcode not in ("dot", "convolution"):
        return 0.0
    pace = int8_pace if shapes[operands_of(each)[0]].startswith("s8") else 1
    return _operations(each, shapes) / pace


def _operations(each: Instruction, shapes: dict[str, str]) -> float:
    left, right = (dimensions(shapes[name]) for name in operands_of(each)[:2])
    result = dimensions(each.shape)
    if each.opcode == "dot":
        contracted = _CONTRACTED.search(each.text)
        places = contracted[1].split(",") if contracted and contracted[1] else []
        return 2.0 * math.prod(result) * math.prod(left[int(place)] for place in places)
    labels = _LABELS.search(each.text)
    assert labels, each.text
    of_left, of_right, of_result = labels.groups()
    total = 2.0 * result[of_result.index("b")] * result[of_result.index("f")]
    total *= right[of_right.index("i")]
    for dimension in sorted(filter(str.isdigit, of_result)):
        sizes = left[of_left.index(dimension)], result[of_result.index(dimension)]
        total *= _valid_places(each.text, int(dimension), *sizes)
    return total


def flops_inside(
    each: Instruction, computations: Computations, int8_pace: int = 1
) -> list[tuple[float, Instruction]]:
    """Return the products in a fusion, of whatever depth, and the operations of each."""
    if each.opcode != "fusion":
        return []
    found = []
    for called in called_by(each):
        inside = computations.get(called, [])
        shapes = {inner.name: inner.shape for inner in inside}
        for inner in inside:
            flops = product_flops(inner, shapes, int8_pace)
            found += [(flops, inner)] if flops else flops_inside(inner, computations, int8_pace)
    return found


def _valid_places(text: str, dimension: int, given: int, results: int) -> int:
    """Count the pairs of an output's place and a place of the window that meet an input."""

    def setting(name: str, default: str) -> str:
        found = re.search(rf"window=\{{[^}}]*\b{name}=([\dx_\-]+)", text)
        return found[1].split("x")[dimension] if found else default

    size, stride = int(setting("size", "1")), int(setting("stride", "1"))
    before = int(setting("pad", "0_0").split("_")[0])
    apart, gaps = int(setting("lhs_dilate", "1")), int(setting("rhs_dilate", "1"))
    places = np.arange(results)[:, None] * stride - before + np.arange(size)[None, :] * gaps
    inside = (places >= 0) & (places <= (given - 1) * apart) & (places % apart == 0)
    return int(inside.sum())
