"""The Pallas kernels of attention by whole sequences, written in JAX: see ``whole.py``.

Queries, keys and values are (images, tokens, heads x width), as the products beside attention
have them: nothing is transposed in HBM. A program of the grid computes a few images, a group of
heads that fills whole vector registers, and a block of queries. Scores never leave vector memory;
the backward pass computes them again from queries and keys, so that nothing else is saved.

A head that starts or ends within a register of 128 lanes is computed in the registers that it
touches, the other heads' lanes in them set to zero on one side of each product. The matrix units
would pad it to as much.

Rotary positions are applied here as well: between the products and a kernel, XLA would copy what
it rotates. Columns are shifted so that each meets the other one of its pair; the sine is zero where
the shift brings a column of another pair.

Imports JAX: import it where a kernel is lowered, and not before.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xla_fsdp.attention.registers import Head, heads_of, name_of, numbers, product
from xla_fsdp.attention.sizes import DEFAULT_VECTOR_MEMORY, LANES, WholeSizes

# ------------------------------------------------------------------------------------------------
# The calls: grid, blocks and results.


def forward_function(s: WholeSizes) -> Callable:
    """Return a function of JAX arrays that calls the kernel of the forward pass."""
    images = s.images(backward=False)
    return pl.pallas_call(
        functools.partial(_forward, s),
        grid=(s.batch // images, s.groups, s.query_blocks),
        in_specs=[
            *(_argument(s, images, kind, place) for place, kind in enumerate("qkk")),
            *_angles(s),
        ],
        out_specs=pl.BlockSpec((images, s.queries, s.lanes), lambda i, j, block: (i, block, j)),
        out_shape=jax.ShapeDtypeStruct(s.shape, name_of(s.dtype)),
        scratch_shapes=_turned(s, images),
        compiler_params=_compiler_params(3, s.vector_memory(backward=False)),
        name="attention_forward",
    )


def backward_function(s: WholeSizes) -> Callable:
    """Return a function of JAX arrays that calls the kernel of the backward pass.

    Over the grid's third axis a program writes gradients: of queries, which it computes first with
    those of keys and values, then of keys, then of values. So all of them go to one array.
    """
    images, groups = s.images(backward=True), s.groups
    rows = s.query_blocks * s.queries
    sums = pltpu.VMEM(
        (images, rows, s.lanes), "float32" if s.query_blocks > 1 else name_of(s.dtype)
    )
    block = (images, s.queries, s.lanes)
    if s.packed:
        written = pl.BlockSpec(block, lambda i, j, of, block: (i, block, of * groups + j))
    else:
        written = pl.BlockSpec((1, *block), lambda i, j, of, block: (of, i, block, j))
    return pl.pallas_call(
        functools.partial(_backward, s),
        grid=(s.batch // images, groups, 3, s.query_blocks),
        in_specs=[
            *(_argument(s, images, kind, place % 3) for place, kind in enumerate("qkkq")),
            *_angles(s),
        ],
        out_specs=written,
        out_shape=jax.ShapeDtypeStruct(s.gradients, name_of(s.dtype)),
        scratch_shapes=[sums, sums, *_turned(s, images)],
        compiler_params=_compiler_params(4, s.vector_memory(backward=True)),
        name="attention_backward",
    )


def _argument(s: WholeSizes, images: int, kind: str, place: int) -> pl.BlockSpec:
    """Return which block of an argument a program reads: of its queries, "q", or of all, "k".

    ``place``: where in a packed array the argument is.
    """
    first, last = place * s.groups if s.packed else 0, s.query_blocks - 1

    def queries(i: Any, j: Any, *rest: Any) -> tuple:
        if len(rest) == 1 or not last:
            return i, rest[-1], first + j
        of, block = rest  # once gradients are only written, no new block is read
        return i, jnp.where(of == 0, block, last), first + j

    if kind == "q":
        return pl.BlockSpec((images, s.queries, s.lanes), queries)
    return pl.BlockSpec((images, s.tokens, s.lanes), lambda i, j, *_: (i, 0, first + j))


def _angles(s: WholeSizes) -> list[pl.BlockSpec]:
    """Return the block of what all programs rotate by, if they do."""
    return [pl.BlockSpec(s.angles, lambda *_: (0, 0, 0))] if s.apart else []


def _turned(s: WholeSizes, images: int) -> list[Any]:
    """Return where a program keeps its rotated queries and keys, if it rotates."""
    rows = (s.queries, s.tokens) if s.apart else ()
    return [pltpu.VMEM((images, each, s.lanes), name_of(s.dtype)) for each in rows]


def _compiler_params(axes: int, vector_memory: int) -> pltpu.CompilerParams:
    """Let programs run in any order, but for those of a group."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", *["arbitrary"] * (axes - 2)),
        vmem_limit_bytes=vector_memory if vector_memory > DEFAULT_VECTOR_MEMORY else None,
    )


# ------------------------------------------------------------------------------------------------
# What a program computes.


class _Sums:
    """Sums over heads, register by register: two heads may share one."""

    def __init__(self) -> None:
        self._of_register: dict[int, Any] = {}

    def add(self, head: Head, x: Any) -> None:
        for start in range(head.lanes.start, head.lanes.stop, LANES):
            part = x[:, start - head.lanes.start : start - head.lanes.start + LANES]
            before = self._of_register.get(start)
            self._of_register[start] = part if before is None else before + part

    def rotate_back(self, s: WholeSizes, angles: Any) -> None:
        """Rotate all registers of the group by the opposite angles."""
        x = jnp.concatenate([self._of_register[start] for start in range(0, s.lanes, LANES)], 1)
        turned = x * angles[0]
        for shift, sines in zip(s.shifts, angles[1:], strict=True):
            turned += pltpu.roll(x * sines, s.lanes - shift, 1)
        self._of_register = {
            start: turned[:, start : start + LANES] for start in range(0, s.lanes, LANES)
        }

    def write(self, ref: Any, image: int, place: tuple[int, ...] = ()) -> None:
        """Write what was added for an image; ``place``: where in a stack of such arrays."""
        for start, x in self._of_register.items():
            here = (*place, image, slice(None), slice(start, start + x.shape[1]))
            ref[here] = x.astype(ref.dtype)

    def add_to(self, ref: Any, image: int, block: Any) -> None:
        """Add to what earlier blocks of queries have left there; None: there is only one."""
        for start, x in self._of_register.items():
            here = (image, slice(0, x.shape[0]), slice(start, start + x.shape[1]))
            if block is None:
                ref[here] = x.astype(ref.dtype)
                continue

            @pl.when(block == 0)
            def _(x: Any = x, here: tuple = here) -> None:
                ref[here] = x

            @pl.when(block > 0)
            def _(x: Any = x, here: tuple = here) -> None:
                ref[here] += x


def _rotate(s: WholeSizes, given: list[Any], turned: list[Any], angles: list[Any]) -> None:
    """Rotate queries and keys, by the angles of each."""
    for x_ref, turned_ref, (cosines, *sines) in zip(given, turned, angles, strict=True):
        for image in range(x_ref.shape[0]):
            x = x_ref[image].astype("float32")
            result = x * cosines
            for shift, each in zip(s.shifts, sines, strict=True):
                result += pltpu.roll(x, shift, 1) * each
            turned_ref[image] = result.astype(turned_ref.dtype)


def _read_angles(s: WholeSizes, ref: Any, here: Any) -> list[Any]:
    """Return those of a block of queries, whose rows are ``here``, and of keys."""
    return [
        [ref[each, rows, :] for each in range(s.angles[0])] for rows in (here, slice(0, s.tokens))
    ]


def _rows(s: WholeSizes, block: Any) -> Any:
    """Return which rows, of all tokens, a block of queries has."""
    if s.query_blocks == 1:
        return slice(None)
    return pl.ds(pl.multiple_of(block * s.queries, s.queries), s.queries)


def _forward(s: WholeSizes, *refs: Any) -> None:
    q_ref, k_ref, v_ref, *rest = refs
    if s.apart:
        angles_ref, output_ref, *turned = rest
        angles = _read_angles(s, angles_ref, _rows(s, pl.program_id(2)))
        _rotate(s, [q_ref, k_ref], turned, angles)
        q_ref, k_ref = turned
    else:
        (output_ref,) = rest
    for image in range(q_ref.shape[0]):
        output = _Sums()
        for head in heads_of(s.lanes, s.width):
            q, k, v = (ref[image, :, head.lanes] for ref in (q_ref, k_ref, v_ref))
            scores = product(head.only(q), k, 1, 1)  # (queries, keys)
            weights = jnp.exp((scores - scores.max(1, keepdims=True)) * s.width**-0.5)
            sums = weights.sum(1, keepdims=True)
            output.add(head, product(weights.astype(v.dtype), head.only(v), 1, 0) / sums)
        output.write(output_ref, image)


def _backward(s: WholeSizes, *refs: Any) -> None:
    """Compute all three gradients of a block of queries, those of keys as a sum over blocks."""
    given, rest = list(refs[:4]), refs[4:]
    if s.apart:
        angles_ref, written, key_sums, value_sums, *turned = rest
    else:
        written, key_sums, value_sums = rest
    of, block = pl.program_id(2), pl.program_id(3)
    here = _rows(s, block)

    @pl.when(of == 0)
    def _() -> None:
        if s.apart:
            angles = _read_angles(s, angles_ref, here)
            _rotate(s, given[:2], turned, angles)
            given[:2] = turned
        for image in range(given[0].shape[0]):
            found = _Sums(), _Sums(), _Sums()
            for head in heads_of(s.lanes, s.width):
                q, k, v, grad = (ref[image, :, head.lanes] for ref in given)
                if s.tokens % s.queries:  # the last block reads past the end: anything may be there
                    first = block * s.queries
                    q, grad = (
                        jnp.where(numbers(s.queries, 1) + first < s.tokens, x, jnp.zeros_like(x))
                        for x in (q, grad)
                    )
                q, k, grad = (head.only(x) for x in (q, k, grad))
                # Scores are (keys, queries) here: three of the five products use them as they are,
                # and a query's sum is over rows, which are added without exchanging lanes.
                scores = product(k, q, 1, 1)
                weights = jnp.exp((scores - scores.max(0, keepdims=True)) * s.width**-0.5)
                weights = weights / weights.sum(0, keepdims=True)
                of_weights = product(v, grad, 1, 1)
                inner = (weights * of_weights).sum(0, keepdims=True)
                of_scores = (weights * (of_weights - inner) * s.width**-0.5).astype(q.dtype)
                grads = (
                    product(of_scores, k, 0, 0),
                    product(of_scores, q, 1, 0),
                    product(weights.astype(q.dtype), grad, 1, 0),
                )
                for total, x in zip(found, grads, strict=True):
                    total.add(head, x)
            if s.apart:
                for total, each in zip(found[:2], angles, strict=True):
                    total.rotate_back(s, each)
            found[0].write(written, image, () if s.packed else (0,))
            for x, total in zip(found[1:], (key_sums, value_sums), strict=True):
                x.add_to(total, image, block if s.query_blocks > 1 else None)

    for place, sums in enumerate((key_sums, value_sums), 1):

        @pl.when(of == place)
        def _(sums: Any = sums) -> None:
            values = sums[:, here, :].astype(written.dtype)
            written[...] = values.reshape(written.shape)
