"""The Pallas kernels of attention, written in JAX: flash attention, and whole sequences.

Queries, keys and values are (images, tokens, heads x width), as the products beside attention have
them: nothing is transposed in HBM, and scores never leave vector memory. A head that starts or ends
within a register of 128 lanes is computed in the registers that it touches, with the other heads'
lanes set to zero on one side of each product. The matrix units would pad it to as much.

Imports JAX: import it where a kernel is lowered, and not before.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_attention.kernels import (
    DEFAULT_VECTOR_MEMORY,
    LANES,
    SUBLANES,
    WINDOW_STEP,
    FlashSizes,
    WholeSizes,
)

# ------------------------------------------------------------------------------------------------
# What all kernels use: heads in vector registers, products.


@dataclass(frozen=True)
class Head:
    """The lanes of the registers that a head touches, and which of them belong to it."""

    lanes: slice
    mask: Any
    """Booleans (1, lanes), or None if all belong to it."""

    def only(self, x: Any) -> Any:
        """Set the lanes of other heads to zero."""
        return x if self.mask is None else jnp.where(self.mask, x, jnp.zeros_like(x))


def _heads(lanes: int, width: int) -> Iterator[Head]:
    """Yield the heads of a group that has so many lanes, each ``width`` wide."""
    for first in range(0, lanes, width):
        start = first // LANES * LANES
        end = min(-(-(first + width) // LANES) * LANES, lanes)
        lane = _iota(1, end - start) + start
        mask = (lane >= first) & (lane < first + width)
        yield Head(slice(start, end), None if end - start == width else mask)


def _product(left: Any, right: Any, over_left: int, over_right: int) -> Any:
    """Multiply, summing over a dimension of each; in fp32."""
    dimensions = (((over_left,), (over_right,)), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, preferred_element_type="float32")


def _iota(rows: int, columns: int) -> Any:
    """Return 0, 1, ... along the rows, or along the columns if there is one row."""
    return jax.lax.broadcasted_iota("int32", (rows, columns), int(rows == 1))


def _jax_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compiler_params(parallel: int, ordered: int, **limits: Any) -> pltpu.CompilerParams:
    """Let programs run in any order along the first axes of the grid, in order along the last."""
    semantics = ("parallel",) * parallel + ("arbitrary",) * ordered
    return pltpu.CompilerParams(dimension_semantics=semantics, **limits)


# ------------------------------------------------------------------------------------------------
# Flash attention (``flash.py``).
#
# A program of the grid computes the heads of a register, for a block of queries and a block of
# keys. Statistics are one number of each query, (images, groups of heads, heads of a group,
# tokens). The last block of queries or keys may read past the end, where anything may be: such rows
# are set to zero, or what they would add to a sum is. Exponentials are powers of 2, which is what
# the hardware has.
#
# A mask has one number of each key, (images, 1, keys), above 0 where it is no padding. With
# segments it is given twice, for a block of keys and for one of queries: these attend to the keys
# of the same number.


_LOWEST = -1e30
"""The score of a key that a query does not attend to: finite, so that a row of nothing else is no
NaN."""
_ROWS = 256
"""Keys whose scores are computed at once, backward: those of a whole block would all be stored."""


def flash_forward(s: FlashSizes) -> Callable:
    """Return a function (q, k, v[, mask[, mask]]) -> output, statistics, log(sum(exp(scores))),
    that calls the kernel."""
    query, key, masks, statistic = _flash_blocks(s, lambda *grid: grid)
    return pl.pallas_call(
        functools.partial(_flash_forward, s),
        grid=(s.batch, s.groups, s.blocks, s.key_blocks),
        in_specs=[query, key, key, *masks],
        out_specs=[query, statistic],
        out_shape=[
            jax.ShapeDtypeStruct(s.shape, _jax_name(s.dtype)),
            jax.ShapeDtypeStruct(s.statistic_shape, "float32"),
        ],
        scratch_shapes=[
            *[pltpu.VMEM((s.heads_together, s.block, LANES), "float32")] * 2,
            pltpu.VMEM((s.block, s.lanes), "float32"),
        ],
        compiler_params=_compiler_params(3, 1),
        name="flash_forward",
    )


def flash_backward(s: FlashSizes) -> Callable:
    """Return a function (q, k, v[, mask[, mask]], statistics, inner, gradient) -> those of q, k
    and v.

    ``inner`` is the sum of the output times its gradient, shaped as statistics. Gradients of keys
    and values are sums over the queries of each span, (batch, spans, keys, heads x width).
    """

    def place(image: Any, group: Any, span: Any, key_block: Any, block: Any) -> tuple:
        return image, group, jnp.minimum(span * s.span_blocks + block, s.blocks - 1), key_block

    def written(image: Any, group: Any, span: Any, key_block: Any, block: Any) -> tuple:
        # Written once all keys have been added; until then it waits at the first one.
        block = jnp.where(key_block == s.key_blocks - 1, block, 0)
        _, _, block, _ = place(image, group, span, key_block, block)
        return image, block, group

    query, key, masks, statistic = _flash_blocks(s, place)
    key_gradient = pl.BlockSpec(
        (1, 1, s.key_block, s.lanes),
        lambda image, group, span, key_block, _: (image, span, key_block, group),
    )
    return pl.pallas_call(
        functools.partial(_flash_backward, s),
        grid=(s.batch, s.groups, s.spans, s.key_blocks, s.span_blocks),
        in_specs=[query, key, key, *masks, statistic, statistic, query],
        out_specs=[pl.BlockSpec((1, s.block, s.lanes), written), key_gradient, key_gradient],
        out_shape=[
            jax.ShapeDtypeStruct(s.shape, _jax_name(s.dtype)),
            *[jax.ShapeDtypeStruct(s.key_gradient_shape, _jax_name(s.dtype))] * 2,
        ],
        scratch_shapes=[
            pltpu.VMEM((s.span_blocks, s.block, s.lanes), "float32"),
            *[pltpu.VMEM((s.key_block, s.lanes), "float32")] * 2,
        ],
        compiler_params=_compiler_params(3, 2),
        name="flash_backward",
    )


def _flash_blocks(
    s: FlashSizes, place: Callable
) -> tuple[pl.BlockSpec, pl.BlockSpec, list[pl.BlockSpec], pl.BlockSpec]:
    """Return the blocks of queries, of keys or values, of the masks, of statistics. ``place``:
    image, group of heads, block of queries and block of keys of a program."""

    def spec(shape: tuple[int, ...], index: Callable) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *grid: index(*place(*grid)))

    statistic_shape = (1, 1, s.heads_together, s.block)
    masks = [
        spec((1, 1, s.key_block), lambda image, _, __, block: (image, 0, block)),
        spec((1, 1, s.block), lambda image, _, block, __: (image, 0, block)),
    ]
    return (
        spec((1, s.block, s.lanes), lambda image, group, block, _: (image, block, group)),
        spec((1, s.key_block, s.lanes), lambda image, group, _, block: (image, block, group)),
        masks[: s.masked + s.segmented],
        spec(statistic_shape, lambda image, group, block, _: (image, group, 0, block)),
    )


def _flash_forward(s: FlashSizes, q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any) -> None:
    """Add a block of keys to the sums of a block of queries so far: online softmax."""
    *masks, output_ref, statistics_ref, largest_ref, sums_ref, total_ref = refs
    block = pl.program_id(3)

    @pl.when(block == 0)
    def _() -> None:
        largest_ref[...] = jnp.full_like(largest_ref, _LOWEST)
        sums_ref[...] = jnp.zeros_like(sums_ref)
        total_ref[...] = jnp.zeros_like(total_ref)

    q, k, v = q_ref[0], k_ref[0], v_ref[0]
    if s.key_blocks * s.key_block > s.keys:
        k, v = (_first_rows(x, s.keys - block * s.key_block) for x in (k, v))
    if s.masked:
        hidden = _hidden(masks[0][0].astype("float32"), *(_column(ref[0]) for ref in masks[1:]))
    added, rescaled = None, None
    for number, head in enumerate(_heads(s.lanes, s.width)):
        scores = _product(head.only(q), k, 1, 1)  # (queries, keys)
        if s.masked:
            scores += hidden
        before = largest_ref[number][:, :1]
        largest = jnp.maximum(before, scores.max(1, keepdims=True))
        weights = jnp.exp2((scores - largest) * (s.scale * math.log2(math.e)))
        rescale = jnp.exp2((before - largest) * (s.scale * math.log2(math.e)))
        sums = sums_ref[number][:, :1] * rescale + weights.sum(1, keepdims=True)
        largest_ref[number] = jnp.broadcast_to(largest, largest_ref.shape[1:])
        sums_ref[number] = jnp.broadcast_to(sums, sums_ref.shape[1:])
        output = _product(weights.astype(v.dtype), head.only(v), 1, 0)
        added = output if added is None else added + output
        rescaled = rescale if rescaled is None else jnp.where(head.mask, rescale, rescaled)
    total_ref[...] = total_ref[...] * rescaled + added

    @pl.when(block == s.key_blocks - 1)
    def _() -> None:
        divisor = None
        for number, head in enumerate(_heads(s.lanes, s.width)):
            sums = sums_ref[number][:, :1]
            divisor = sums if divisor is None else jnp.where(head.mask, sums, divisor)
            statistics = largest_ref[number] * s.scale + jnp.log(sums_ref[number])
            statistics_ref[0, 0, number : number + 1, :] = statistics.T[:1]
        output_ref[0] = (total_ref[...] / divisor).astype(output_ref.dtype)


def _flash_backward(s: FlashSizes, q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any) -> None:
    """Add what a block of queries and a block of keys give each other's gradients.

    Scores are (keys, queries) here: three of the five products use them as they are, and numbers of
    a query are added to columns.
    """
    *masks, statistics_ref, inner_ref, grad_ref, dq_ref, dk_ref, dv_ref = refs[:-3]
    dq_sum, dk_sum, dv_sum = refs[-3:]
    span, key_block, block = (pl.program_id(axis) for axis in (2, 3, 4))

    @pl.when(key_block == 0)
    def _() -> None:
        dq_sum[block] = jnp.zeros(dq_sum.shape[1:], "float32")

    @pl.when(block == 0)
    def _() -> None:
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    q, grad, statistics, inner = q_ref[0], grad_ref[0], statistics_ref[0, 0], inner_ref[0, 0]
    number = span * s.span_blocks + block
    if s.spans * s.span_blocks * s.block > s.tokens:
        left = s.tokens - number * s.block
        q, grad = (_first_rows(x, left) for x in (q, grad))
        is_query = _iota(1, s.block) < left
        statistics = jnp.where(is_query, statistics, -_LOWEST)
        inner = jnp.where(is_query, inner, 0.0)
    statistics = statistics * math.log2(math.e)
    if s.masked:
        key_numbers = _column(masks[0][0])
    for start in range(0, s.key_block, _ROWS):
        rows = slice(start, min(start + _ROWS, s.key_block))
        k, v = k_ref[0, rows, :], v_ref[0, rows, :]
        if s.key_blocks * s.key_block > s.keys:
            k, v = (_first_rows(x, s.keys - key_block * s.key_block - start) for x in (k, v))
        if s.masked:
            queries = [ref[0].astype("float32") for ref in masks[1:]]
            hidden = _hidden(key_numbers[rows], *queries)
        for index, head in enumerate(_heads(s.lanes, s.width)):
            head_q, head_grad = head.only(q), head.only(grad)
            scores = _product(k, head_q, 1, 1)
            powers = scores * (s.scale * math.log2(math.e)) - statistics[index : index + 1]
            if s.masked:
                powers += hidden
            weights = jnp.exp2(powers)
            grad_weights = _product(v, head_grad, 1, 1)
            grad_scores = (weights * (grad_weights - inner[index : index + 1])).astype(q.dtype)
            dv_sum[rows, :] += _product(weights.astype(q.dtype), head_grad, 1, 0)
            dk_sum[rows, :] += _product(grad_scores, head_q, 1, 0)
            dq_sum[block] += _product(grad_scores, head.only(k), 0, 0)

    @pl.when((key_block == s.key_blocks - 1) & (number < s.blocks))
    def _() -> None:
        dq_ref[0] = (dq_sum[block] * s.scale).astype(dq_ref.dtype)

    @pl.when(block == s.span_blocks - 1)
    def _() -> None:
        dk_ref[0, 0] = (dk_sum[...] * s.scale).astype(dk_ref.dtype)
        dv_ref[0, 0] = dv_sum[...].astype(dv_ref.dtype)


def _hidden(keys: Any, queries: Any = None) -> Any:
    """Return what is added to scores to hide keys that queries do not attend to; of the masks of
    keys and, with segments, of queries, one is a row and one a column."""
    return jnp.where(keys > 0 if queries is None else keys == queries, 0.0, _LOWEST)


def _first_rows(x: Any, count: Any) -> Any:
    """Set the rows behind the first ``count`` to zero."""
    return jnp.where(_iota(x.shape[0], 1) < count, x, jnp.zeros_like(x))


def _column(row: Any) -> Any:
    """Return a row of numbers, (1, n), as a column."""
    return jnp.broadcast_to(row.astype("float32"), (SUBLANES, row.shape[1])).T[:, :1]


# ------------------------------------------------------------------------------------------------
# Whole sequences (``whole.py``).
#
# A program of the grid computes a few images, a group of heads that fills whole vector registers,
# and a block of queries. The backward pass computes scores again from queries and keys, so that
# nothing else is saved.
#
# Several blocks of queries with segments: a program computes a block with a window of keys, the
# smallest of a few that has all of its segments. Each has its own code, as a loop over keys would
# wait for the matrix units in each round.
#
# Rotary positions are applied here as well: between the products and a kernel, XLA would copy what
# it rotates. Columns are shifted so that each meets the other one of its pair; the sine is zero
# where the shift brings a column of another pair.


def whole_forward(s: WholeSizes) -> Callable:
    """Return a function (q, k, v[, angles][, segments, segments[, windows]]) -> output; it calls
    the kernel."""
    images = s.images(backward=False)
    return pl.pallas_call(
        functools.partial(_whole_forward, s),
        grid=(s.batch // images, s.groups, s.query_blocks),
        in_specs=_whole_blocks(s, images, "qkk"),
        out_specs=pl.BlockSpec((images, s.queries, s.lanes), lambda i, j, block: (i, block, j)),
        out_shape=jax.ShapeDtypeStruct(s.shape, _jax_name(s.dtype)),
        name="attention_forward",
        **_whole_options(s, images, []),
    )


def whole_backward(s: WholeSizes) -> Callable:
    """Return a function (q, k, v, gradient[, angles][, segments, segments[, windows]]) ->
    gradients; it calls the kernel.

    Over the grid's third axis a program writes gradients: of queries, which it computes first with
    those of keys and values, then of keys, then of values. So all of them go to one array.
    """
    images, groups = s.images(backward=True), s.groups
    rows = s.query_blocks * s.queries
    sums = pltpu.VMEM(
        (images, rows, s.lanes), "float32" if s.query_blocks > 1 else _jax_name(s.dtype)
    )
    block = (images, s.queries, s.lanes)
    if s.packed:
        written = pl.BlockSpec(block, lambda i, j, kind, block: (i, block, kind * groups + j))
    else:
        written = pl.BlockSpec((1, *block), lambda i, j, kind, block: (kind, i, block, j))
    return pl.pallas_call(
        functools.partial(_whole_backward, s),
        grid=(s.batch // images, groups, 3, s.query_blocks),
        in_specs=_whole_blocks(s, images, "qkkq"),
        out_specs=written,
        out_shape=jax.ShapeDtypeStruct(s.gradients, _jax_name(s.dtype)),
        name="attention_backward",
        **_whole_options(s, images, [sums, sums]),
    )


def _whole_blocks(s: WholeSizes, images: int, arguments: str) -> list[pl.BlockSpec]:
    """Return the block that a program reads of each argument: of queries, "q", or all tokens,
    "k"; and of the angles, if it rotates; of the segments of both; and all windows."""
    last = s.query_blocks - 1

    def query_block(*rest: Any) -> Any:
        if len(rest) == 1 or not last:
            return rest[-1]
        gradient, block = rest  # once gradients are only written, no new block is read
        return jnp.where(gradient == 0, block, last)

    def block_of(kind: str, place: int) -> pl.BlockSpec:
        first = place * s.groups if s.packed else 0

        def queries(i: Any, j: Any, *rest: Any) -> tuple:
            return i, query_block(*rest), first + j

        if kind == "q":
            return pl.BlockSpec((images, s.queries, s.lanes), queries)
        return pl.BlockSpec((images, s.tokens, s.lanes), lambda i, j, *_: (i, 0, first + j))

    # In a packed array queries, keys and values are side by side; the gradient is alone.
    blocks = [block_of(kind, place % 3) for place, kind in enumerate(arguments)]
    if s.apart:
        blocks.append(pl.BlockSpec(s.angles, lambda *_: (0, 0, 0)))
    if s.segmented:
        row = s.queries if last else s.segments[2]  # the compiler refuses a part of a register
        blocks += [
            pl.BlockSpec((images, 1, row), lambda i, _, *rest: (i, 0, query_block(*rest))),
            pl.BlockSpec((images, *s.segments[1:]), lambda i, *_: (i, 0, 0)),
        ]
    if s.windows:
        blocks.append(pl.BlockSpec(memory_space=pltpu.SMEM))
    return blocks


def _whole_options(s: WholeSizes, images: int, sums: list[Any]) -> dict[str, Any]:
    """Return a kernel's memory: ``sums`` of a backward pass, and rotated queries and keys, if any;
    and in which order programs run."""
    needed = s.vector_memory(backward=bool(sums))
    limit = needed if needed > DEFAULT_VECTOR_MEMORY else None
    rows = (s.queries, s.tokens) if s.apart else ()
    rotated = [pltpu.VMEM((images, count, s.lanes), _jax_name(s.dtype)) for count in rows]
    ordered = _compiler_params(2, 2 if sums else 1, vmem_limit_bytes=limit)
    return {"scratch_shapes": [*sums, *rotated], "compiler_params": ordered}


class _Sums:
    """Sums over heads, register by register: two heads may share one."""

    def __init__(self) -> None:
        self._by_register: dict[int, Any] = {}

    def add(self, head: Head, x: Any) -> None:
        for start in range(head.lanes.start, head.lanes.stop, LANES):
            part = x[:, start - head.lanes.start : start - head.lanes.start + LANES]
            before = self._by_register.get(start)
            self._by_register[start] = part if before is None else before + part

    def rotate_back(self, s: WholeSizes, angles: Any) -> None:
        """Rotate all registers of the group by the opposite angles."""
        x = jnp.concatenate([self._by_register[start] for start in range(0, s.lanes, LANES)], 1)
        rotated = x * angles[0]
        for shift, sines in zip(s.shifts, angles[1:], strict=True):
            rotated += pltpu.roll(x * sines, s.lanes - shift, 1)
        self._by_register = {
            start: rotated[:, start : start + LANES] for start in range(0, s.lanes, LANES)
        }

    def write(self, ref: Any, image: int, place: tuple[int, ...] = ()) -> None:
        """Write what was added for an image; ``place``: where in a stack of such arrays."""
        for start, x in self._by_register.items():
            here = (*place, image, slice(None), slice(start, start + x.shape[1]))
            ref[here] = x.astype(ref.dtype)

    def add_to(self, ref: Any, image: int, rows: Any, *, first: bool) -> None:
        """Add to what is there at ``rows``; ``first``: there is nothing yet."""
        for start, x in self._by_register.items():
            here = (image, rows, slice(start, start + x.shape[1]))
            if first:
                ref[here] = x.astype(ref.dtype)
            else:
                ref[here] += x


def _angles(s: WholeSizes, ref: Any, rows: Any) -> list[Any]:
    """Return the cosines of the tokens at ``rows``, and their sines for each shift."""
    return [ref[table, rows, :] for table in range(s.angles[0])]


def _rotate(s: WholeSizes, inputs: list[Any], rotated: list[Any], ref: Any, rows: Any) -> None:
    """Rotate a block of queries, at ``rows``, and all keys."""
    angles = [_angles(s, ref, tokens) for tokens in (rows, slice(0, s.tokens))]
    for x_ref, rotated_ref, (cosines, *sines) in zip(inputs, rotated, angles, strict=True):
        for image in range(x_ref.shape[0]):
            x = x_ref[image].astype("float32")
            result = x * cosines
            for shift, sine in zip(s.shifts, sines, strict=True):
                result += pltpu.roll(x, shift, 1) * sine
            rotated_ref[image] = result.astype(rotated_ref.dtype)


def _query_rows(s: WholeSizes, block: Any) -> Any:
    """Return which rows, of all tokens, a block of queries has."""
    if s.query_blocks == 1:
        return slice(None)
    return pl.ds(pl.multiple_of(block * s.queries, s.queries), s.queries)


def _for_each_image(
    s: WholeSizes, refs: Any, program: Any, block: Any, compute: Callable[[int, Any], None]
) -> None:
    """Call ``compute`` with each image of a program and with the rows of the keys that a block of
    queries needs: all, or the window that the last of ``refs``, see ``whole.windows``, has for
    it. ``program``: along the grid's first axis."""
    images, windows_ref = refs[0].shape[0], refs[-1]
    for image in range(images):
        if not s.windows:
            compute(image, slice(0, s.tokens))
            continue
        place = program * images + image
        keys, start = windows_ref[place, 2 * block], windows_ref[place, 2 * block + 1]
        for window in s.windows:
            rows = slice(0, s.tokens)
            if window < s.tokens:
                rows = pl.ds(pl.multiple_of(start, WINDOW_STEP), window)

            @pl.when(keys == window)
            def _(image: int = image, rows: Any = rows) -> None:
                compute(image, rows)


def _key_segments(ref: Any, image: int, rows: Any) -> Any:
    """Return the segments of the keys at ``rows``, (1, keys), fp32."""
    numbers = ref[image].astype("float32")
    if isinstance(rows, slice):
        return numbers[:, rows]
    tokens = numbers.shape[1]
    shift = jax.lax.rem(tokens - rows.start, tokens)
    numbers = pltpu.roll(jnp.broadcast_to(numbers, (SUBLANES, tokens)), shift, 1)
    return numbers[:1, : rows.size]


def _whole_forward(s: WholeSizes, *refs: Any) -> None:
    q_ref, k_ref, v_ref, *rest = refs
    angles_ref = rest.pop(0) if s.apart else None
    segments = [rest.pop(0), rest.pop(0)] if s.segmented else []
    windows_ref = rest.pop(0) if s.windows else None
    output_ref, *rotated = rest
    if s.apart:
        _rotate(s, [q_ref, k_ref], rotated, angles_ref, _query_rows(s, pl.program_id(2)))
        q_ref, k_ref = rotated

    def compute(image: int, key_rows: Any) -> None:
        output = _Sums()
        if segments:
            keys = _key_segments(segments[1], image, key_rows)
            hidden = _hidden(keys, _column(segments[0][image])[: s.queries])
        for head in _heads(s.lanes, s.width):
            q = q_ref[image, :, head.lanes]
            k, v = (ref[image, key_rows, head.lanes] for ref in (k_ref, v_ref))
            scores = _product(head.only(q), k, 1, 1)  # (queries, keys)
            if segments:
                scores += hidden
            weights = jnp.exp((scores - scores.max(1, keepdims=True)) * s.width**-0.5)
            sums = weights.sum(1, keepdims=True)
            output.add(head, _product(weights.astype(v.dtype), head.only(v), 1, 0) / sums)
        output.write(output_ref, image)

    _for_each_image(s, [q_ref, windows_ref], pl.program_id(0), pl.program_id(2), compute)


def _whole_backward(s: WholeSizes, *refs: Any) -> None:
    """Compute all three gradients of a block of queries, those of keys as a sum over blocks."""
    inputs, rest = list(refs[:4]), list(refs[4:])
    angles_ref = rest.pop(0) if s.apart else None
    segments = [rest.pop(0), rest.pop(0)] if s.segmented else []
    windows_ref = rest.pop(0) if s.windows else None
    written, key_sums, value_sums, *rotated = rest
    program, kind, block = (pl.program_id(axis) for axis in (0, 2, 3))
    rows = _query_rows(s, block)

    @pl.when(kind == 0)
    def _() -> None:
        if s.apart:
            _rotate(s, inputs[:2], rotated, angles_ref, rows)
            inputs[:2] = rotated
        if s.query_blocks > 1:

            @pl.when(block == 0)
            def _() -> None:
                for sums in (key_sums, value_sums):
                    sums[...] = jnp.zeros_like(sums)

        def compute(image: int, key_rows: Any) -> None:
            totals = _Sums(), _Sums(), _Sums()
            if segments:
                keys = _key_segments(segments[1], image, key_rows)
                queries = segments[0][image].astype("float32")[:, : s.queries]
                hidden = _hidden(_column(keys), queries)
            for head in _heads(s.lanes, s.width):
                q, grad = (inputs[n][image, :, head.lanes] for n in (0, 3))
                k, v = (inputs[n][image, key_rows, head.lanes] for n in (1, 2))
                if s.tokens % s.queries:  # the last block reads past the end: anything may be there
                    q, grad = (_first_rows(x, s.tokens - block * s.queries) for x in (q, grad))
                q, k, grad = (head.only(x) for x in (q, k, grad))
                # Scores are (keys, queries) here: three of the five products use them as they are,
                # and a query's sum is over rows, which are added without exchanging lanes.
                scores = _product(k, q, 1, 1)
                if segments:
                    scores += hidden
                weights = jnp.exp((scores - scores.max(0, keepdims=True)) * s.width**-0.5)
                weights = weights / weights.sum(0, keepdims=True)
                grad_weights = _product(v, grad, 1, 1)
                inner = (weights * grad_weights).sum(0, keepdims=True)
                grad_scores = weights * (grad_weights - inner) * s.width**-0.5
                grad_scores = grad_scores.astype(q.dtype)
                grads = (
                    _product(grad_scores, k, 0, 0),
                    _product(grad_scores, q, 1, 0),
                    _product(weights.astype(q.dtype), grad, 1, 0),
                )
                for total, x in zip(totals, grads, strict=True):
                    total.add(head, x)
            if s.apart:
                for total, its_rows in zip(totals[:2], (rows, key_rows), strict=True):
                    total.rotate_back(s, _angles(s, angles_ref, its_rows))
            totals[0].write(written, image, () if s.packed else (0,))
            for total, sums in zip(totals[1:], (key_sums, value_sums), strict=True):
                total.add_to(sums, image, key_rows, first=s.query_blocks == 1)

        _for_each_image(s, [*inputs, windows_ref], program, block, compute)

    for place, sums in enumerate((key_sums, value_sums), 1):

        @pl.when(kind == place)
        def _(sums: Any = sums) -> None:
            values = sums[:, rows, :].astype(written.dtype)
            written[...] = values.reshape(written.shape)
