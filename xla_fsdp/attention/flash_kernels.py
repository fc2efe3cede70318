"""The Pallas kernels of flash attention, written in JAX: see ``flash.py``.

Queries, keys and values are (images, tokens, heads x width), as the products beside attention have
them: nothing is transposed in HBM. A program of the grid computes the heads of a register, for a
block of queries and a block of keys; scores never leave vector memory.

Statistics are one number of each query, (images, groups of heads, heads of a group, tokens). The
last block of queries or keys may read past the end, where anything may be: such rows are set to
zero, or what they would add to a sum is. What padded keys get as gradients is finite, and dropped.

Imports JAX: import it where a kernel is lowered, and not before.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xla_fsdp.attention.registers import heads_of, name_of, numbers, product
from xla_fsdp.attention.sizes import LANES, SUBLANES, FlashSizes

_LOWEST = -1e30
"""The score of a key that is padding: finite, so that a row of nothing else is no NaN."""
_ROWS = 256
"""Keys whose scores are computed at once, backward: those of a whole block would all be stored."""

# ------------------------------------------------------------------------------------------------
# The calls: grid, blocks and results.


def forward_function(s: FlashSizes, scale: float) -> Callable:
    """Return a function (q, k, v[, valid]) -> output, statistics; it calls the kernel.

    Statistics are log(sum(exp(scores))). ``valid``: 1 for keys that are no padding, 0 for others.
    """
    return pl.pallas_call(
        functools.partial(_forward, s, scale),
        grid=(s.batch, s.groups, s.blocks, s.key_blocks),
        in_specs=_arguments(s, lambda i, j, block, of_keys: (i, j, block, of_keys)),
        out_specs=[
            pl.BlockSpec((1, s.block, s.lanes), lambda i, j, block, _: (i, block, j)),
            pl.BlockSpec(
                (1, 1, s.heads_together, s.block), lambda i, j, block, _: (i, j, 0, block)
            ),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(s.shape, name_of(s.dtype)),
            jax.ShapeDtypeStruct(s.statistic_shape, "float32"),
        ],
        scratch_shapes=[
            *[pltpu.VMEM((s.heads_together, s.block, LANES), "float32")] * 2,
            pltpu.VMEM((s.block, s.lanes), "float32"),
        ],
        compiler_params=_compiler_params(3),
        name="flash_forward",
    )


def backward_function(s: FlashSizes, scale: float) -> Callable:
    """Return a function (q, k, v[, valid], statistics, inner, gradient) -> those of q, k and v.

    It calls the kernel. ``inner`` is the sum of the output times its gradient, shaped as
    statistics. Gradients of keys and values are sums over the queries of each span, (batch, spans,
    keys, heads x width).
    """

    def place(i: Any, j: Any, span: Any, of_keys: Any, block: Any) -> tuple:
        return i, j, jnp.minimum(span * s.span_blocks + block, s.blocks - 1), of_keys

    def queries(*grid: Any) -> tuple:
        i, j, block, _ = place(*grid)
        return i, block, j

    def statistic(*grid: Any) -> tuple:
        i, j, block, _ = place(*grid)
        return i, j, 0, block

    def written(i: Any, j: Any, span: Any, of_keys: Any, block: Any) -> tuple:
        # Written once all keys have been added; until then it waits at the first one.
        block = jnp.where(of_keys == s.key_blocks - 1, block, 0)
        return queries(i, j, span, of_keys, block)

    rows, columns = (1, s.block, s.lanes), pltpu.VMEM((s.key_block, s.lanes), "float32")
    key_gradient = pl.BlockSpec(
        (1, 1, s.key_block, s.lanes), lambda i, j, span, of_keys, _: (i, span, of_keys, j)
    )
    statistics = pl.BlockSpec((1, 1, s.heads_together, s.block), statistic)
    dtype = name_of(s.dtype)
    return pl.pallas_call(
        functools.partial(_backward, s, scale),
        grid=(s.batch, s.groups, s.spans, s.key_blocks, s.span_blocks),
        in_specs=[*_arguments(s, place), statistics, statistics, pl.BlockSpec(rows, queries)],
        out_specs=[pl.BlockSpec(rows, written), key_gradient, key_gradient],
        out_shape=[
            jax.ShapeDtypeStruct(s.shape, dtype),
            *[jax.ShapeDtypeStruct(s.key_gradient_shape, dtype)] * 2,
        ],
        scratch_shapes=[
            pltpu.VMEM((s.span_blocks, s.block, s.lanes), "float32"),
            columns,
            columns,
        ],
        compiler_params=_compiler_params(3, 2),
        name="flash_backward",
    )


def _arguments(s: FlashSizes, place: Callable) -> list[pl.BlockSpec]:
    """Return the blocks of queries, keys, values, and of which keys are valid, if some are not.

    ``place`` returns image, group of heads, block of queries and block of keys of a program.
    """

    def queries(*grid: Any) -> tuple:
        i, j, block, _ = place(*grid)
        return i, block, j

    def keys(*grid: Any) -> tuple:
        i, j, _, of_keys = place(*grid)
        return i, of_keys, j

    def valid(*grid: Any) -> tuple:
        i, _, _, of_keys = place(*grid)
        return i, 0, of_keys

    of_keys = pl.BlockSpec((1, s.key_block, s.lanes), keys)
    found = [pl.BlockSpec((1, s.block, s.lanes), queries), of_keys, of_keys]
    return [*found, pl.BlockSpec((1, 1, s.key_block), valid)] if s.masked else found


def _compiler_params(parallel: int, ordered: int = 1) -> pltpu.CompilerParams:
    """Let programs run in any order, but along the last axes of the grid."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel",) * parallel + ("arbitrary",) * ordered
    )


# ------------------------------------------------------------------------------------------------
# What a program computes. Exponentials are powers of 2, which is what the hardware has.


def _forward(s: FlashSizes, scale: float, q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any) -> None:
    """Add a block of keys to what a block of queries has found so far: online softmax."""
    *valid, output_ref, statistics_ref, largest_ref, sums_ref, total_ref = refs
    block = pl.program_id(3)

    @pl.when(block == 0)
    def _() -> None:
        largest_ref[...] = jnp.full_like(largest_ref, _LOWEST)
        sums_ref[...] = jnp.zeros_like(sums_ref)
        total_ref[...] = jnp.zeros_like(total_ref)

    q, k, v = q_ref[0], k_ref[0], v_ref[0]
    if s.masked:
        here = _column(valid[0][0]) > 0
        k, v = (jnp.where(here, x, jnp.zeros_like(x)) for x in (k, v))
        of_padding = (1 - valid[0][0].astype("float32")) * _LOWEST
    found, rescaled = None, None
    for number, head in enumerate(heads_of(s.lanes, s.width)):
        scores = product(head.only(q), k, 1, 1)  # (queries, keys)
        if s.masked:
            scores += of_padding
        before = largest_ref[number][:, :1]
        largest = jnp.maximum(before, scores.max(1, keepdims=True))
        weights = jnp.exp2((scores - largest) * (scale * math.log2(math.e)))
        rescale = jnp.exp2((before - largest) * (scale * math.log2(math.e)))
        sums = sums_ref[number][:, :1] * rescale + weights.sum(1, keepdims=True)
        largest_ref[number] = jnp.broadcast_to(largest, largest_ref.shape[1:])
        sums_ref[number] = jnp.broadcast_to(sums, sums_ref.shape[1:])
        own = product(weights.astype(v.dtype), head.only(v), 1, 0)
        found = own if found is None else found + own
        rescaled = rescale if rescaled is None else jnp.where(head.own, rescale, rescaled)
    total_ref[...] = total_ref[...] * rescaled + found

    @pl.when(block == s.key_blocks - 1)
    def _() -> None:
        divisor = None
        for number, head in enumerate(heads_of(s.lanes, s.width)):
            sums = sums_ref[number][:, :1]
            divisor = sums if divisor is None else jnp.where(head.own, sums, divisor)
            found = largest_ref[number] * scale + jnp.log(sums_ref[number])
            statistics_ref[0, 0, number : number + 1, :] = found.T[:1]
        output_ref[0] = (total_ref[...] / divisor).astype(output_ref.dtype)


def _backward(s: FlashSizes, scale: float, q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any) -> None:
    """Add what a block of queries and a block of keys give each other's gradients.

    Scores are (keys, queries) here: three of the five products use them as they are, and numbers of
    a query are added to columns.
    """
    *valid, statistics_ref, inner_ref, grad_ref, dq_ref, dk_ref, dv_ref = refs[:-3]
    dq_sum, dk_sum, dv_sum = refs[-3:]
    span, of_keys, block = (pl.program_id(axis) for axis in (2, 3, 4))

    @pl.when(of_keys == 0)
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
        q, grad = (jnp.where(numbers(s.block, 1) < left, x, jnp.zeros_like(x)) for x in (q, grad))
        here = numbers(1, s.block) < left
        statistics, inner = jnp.where(here, statistics, -_LOWEST), jnp.where(here, inner, 0.0)
    statistics = statistics * math.log2(math.e)
    if s.masked:
        all_valid = _column(valid[0][0]) > 0
    for start in range(0, s.key_block, _ROWS):
        rows = slice(start, min(start + _ROWS, s.key_block))
        k, v = k_ref[0, rows, :], v_ref[0, rows, :]
        if s.masked:
            k, v = (jnp.where(all_valid[rows], x, jnp.zeros_like(x)) for x in (k, v))
        for each, head in enumerate(heads_of(s.lanes, s.width)):
            own_q, own_grad = head.only(q), head.only(grad)
            scores = product(k, own_q, 1, 1)
            powers = scores * (scale * math.log2(math.e)) - statistics[each : each + 1]
            if s.masked:  # finite for padding as well, whose keys are zeros
                powers = jnp.minimum(powers, 0.0)
            weights = jnp.exp2(powers)
            of_weights = product(v, own_grad, 1, 1)
            of_scores = (weights * (of_weights - inner[each : each + 1])).astype(q.dtype)
            dv_sum[rows, :] += product(weights.astype(q.dtype), own_grad, 1, 0)
            dk_sum[rows, :] += product(of_scores, own_q, 1, 0)
            dq_sum[block] += product(of_scores, head.only(k), 0, 0)

    @pl.when((of_keys == s.key_blocks - 1) & (number < s.blocks))
    def _() -> None:
        dq_ref[0] = (dq_sum[block] * scale).astype(dq_ref.dtype)

    @pl.when(block == s.span_blocks - 1)
    def _() -> None:
        dk_ref[0, 0] = (dk_sum[...] * scale).astype(dk_ref.dtype)
        dv_ref[0, 0] = dv_sum[...].astype(dv_ref.dtype)


def _column(row: Any) -> Any:
    """Return a row of numbers, (1, n), as a column."""
    return jnp.broadcast_to(row.astype("float32"), (SUBLANES, row.shape[1])).T[:, :1]
