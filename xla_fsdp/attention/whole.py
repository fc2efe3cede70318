"""Attention of short sequences by kernels that hold them whole in vector memory: no score in HBM.

Queries, keys and values go to the kernels as (batch, tokens, heads x width), which is how the
products beside attention make and take them: what a model transposes for PyTorch's product is
transposed back, and XLA drops both.
"""

from __future__ import annotations

import functools
import json
import math
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from timm.layers import Attention, apply_rot_embed_cat
from torch import nn

from models.blocks import attentions, use_product
from xla_fsdp.attention.kernels import Kernel, Shards, mosaic_config
from xla_fsdp.attention.sizes import LANES
from xla_fsdp.remat import KeptInput

# ------------------------------------------------------------------------------------------------
# Pallas kernels of attention that hold whole sequences in a core's vector memory.
#
# Queries, keys and values are (images, tokens, heads x width), as the products beside attention
# have them: nothing is transposed in HBM. A program of the grid takes a few images, a group of
# heads that fills whole vector registers, and a block of queries; scores never leave vector
# memory, and the backward pass computes them anew from queries and keys, so that nothing else has
# to be kept.
#
# A head that begins or ends within a register of 128 lanes is computed in the registers that it
# touches, the other heads' lanes in them set to zero on one side of each product. The matrix units
# would pad it to as much.


_UNDIVIDED = 512
"""Queries that are taken at once; more are taken in blocks."""
_QUERIES = 256
_FORWARD, _BACKWARD = 8, 4
"""Heads of 256 queries and keys that one program of the grid computes: while the units wait for one
of them they work on another. By libtpu's schedules more gains little."""
_GIVEN = 16 * 2**20
"""Vector memory that libtpu gives a kernel which does not ask for more, and all that v4 has."""
_HAVE = 64 * 2**20
"""Vector memory that a kernel may ask for on later chips."""
_FORWARD_HELD, _BACKWARD_HELD = "qqkk", "qqqkkkk"


@dataclass(frozen=True)
class Whole:
    """Sizes of what one device computes.

    ``packed``: queries, keys and values are one array, (batch, tokens, 3 x heads x width).
    """

    batch: int
    tokens: int
    heads: int
    width: int
    dtype: torch.dtype
    packed: bool = False

    @property
    def lanes(self) -> int:
        """Return how many columns a group of heads has: whole registers, or all that there are."""
        together = math.lcm(self.width, LANES)
        columns = self.heads * self.width
        return together if columns % together == 0 else columns

    @property
    def queries(self) -> int:
        """Return how many queries a program takes."""
        return self.tokens if self.tokens <= _UNDIVIDED else _QUERIES

    @property
    def query_blocks(self) -> int:
        return -(-self.tokens // self.queries)

    def images(self, heads: int) -> int:
        """Return how many images a program takes, a divisor of the batch, for so many ``heads``."""
        most = heads * min(1.0, 256**2 / (self.queries * self.tokens)) * self.width / self.lanes
        return max(each for each in range(1, max(1, int(most)) + 1) if self.batch % each == 0)

    def vector_memory(self, heads: int, held: str) -> int:
        """Return bytes that are enough for programs of so many ``heads``.

        They are for what is ``held``, blocks of queries, "q", or all tokens, "k", twice, as the
        next ones arrive meanwhile; and for scores, each in a few forms.
        """
        images, rows = self.images(heads), {"q": self.queries, "k": self.tokens}
        blocks = sum(2 * rows[each] * self.lanes * self.dtype.itemsize for each in held)
        scores = 4 * self.queries * -(-self.tokens // LANES) * LANES
        return images * (blocks + self.lanes // self.width * scores * 2)

    def fits(self, generation: int) -> bool:
        """Tell whether a TPU of this generation has the vector memory for all kernels."""
        needed = self.vector_memory(_BACKWARD, _BACKWARD_HELD)
        return needed <= (_HAVE if generation > 4 else _GIVEN)

    @property
    def can_be_packed(self) -> bool:
        """Tell whether a group of heads can be found in a packed array: by whole registers."""
        return self.lanes % LANES == 0

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.batch, self.tokens, self.heads * self.width)

    @property
    def groups(self) -> int:
        return self.heads * self.width // self.lanes

    @property
    def gradients(self) -> tuple[int, ...]:
        """Return the shape of all three gradients."""
        return self.given if self.packed else (3, *self.shape)

    @property
    def given(self) -> tuple[int, int, int]:
        """Return the shape of the array that queries are in."""
        return (*self.shape[:2], self.shape[2] * (3 if self.packed else 1))


@functools.cache
def forward_kernel(s: Whole) -> Kernel:
    """Return the kernel (q, k, v) -> output; packed, all three are the same array."""
    return _lower(s, forward_function(s), [s.given] * 3, s.shape, products=2)


@functools.cache
def backward_kernel(s: Whole) -> Kernel:
    """Return the kernel (q, k, v, output's gradient) -> gradients of q, k, v.

    They are packed as these are, or stacked.
    """
    return _lower(s, backward_function(s), [s.given] * 3 + [s.shape], s.gradients, products=5)


def _lower(
    s: Whole,
    function: Callable,
    arguments: Sequence[tuple[int, ...]],
    result: tuple[int, ...],
    *,
    products: int,
) -> Kernel:
    config = json.loads(mosaic_config(function, [(shape, s.dtype) for shape in arguments]))
    branches = 1 if result == s.shape else 3
    moved = len(arguments) + branches
    config["custom_call_config"]["cost_estimate"] = {
        "flops": products * 2 * s.batch * s.heads * s.tokens**2 * s.width,
        "transcendentals": s.batch * s.heads * s.tokens**2,
        "bytes_accessed": moved * math.prod(s.shape) * s.dtype.itemsize,
    }
    return Kernel(json.dumps(config), [result], [s.dtype], branches)


def forward_function(s: Whole) -> Callable:
    """Return a function of JAX arrays that calls the kernel of the forward pass."""
    from jax.experimental import pallas as pl

    images = s.images(_FORWARD)
    q, k, v = (_taken(pl, s, images, kind, place) for place, kind in enumerate("qkk"))
    return pl.pallas_call(
        functools.partial(_forward, s),
        grid=(s.batch // images, s.groups, s.query_blocks),
        in_specs=[q, k, v],
        out_specs=pl.BlockSpec((images, s.queries, s.lanes), lambda i, j, block: (i, block, j)),
        out_shape=_shape(s, s.shape),
        compiler_params=_parameters(3, s.vector_memory(_FORWARD, _FORWARD_HELD)),
        name="attention_forward",
    )


def backward_function(s: Whole) -> Callable:
    """Return a function of JAX arrays that calls the kernel of the backward pass.

    Over the grid's third axis a program writes gradients: of queries, which it computes first with
    those of keys and values, then of keys, then of values. So all of them go to one array.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    images, groups, last = s.images(_BACKWARD), s.groups, s.query_blocks - 1
    rows = s.query_blocks * s.queries
    sums = pltpu.VMEM((images, rows, s.lanes), "float32" if last else _name(s.dtype))
    block = (images, s.queries, s.lanes)
    if s.packed:
        written = pl.BlockSpec(block, lambda i, j, of, block: (i, block, of * groups + j))
    else:
        written = pl.BlockSpec((1, *block), lambda i, j, of, block: (of, i, block, j))
    return pl.pallas_call(
        functools.partial(_backward, s),
        grid=(s.batch // images, groups, 3, s.query_blocks),
        in_specs=[_taken(pl, s, images, kind, place % 3) for place, kind in enumerate("qkkq")],
        out_specs=written,
        out_shape=_shape(s, s.gradients),
        scratch_shapes=[sums, sums],
        compiler_params=_parameters(4, s.vector_memory(_BACKWARD, _BACKWARD_HELD)),
        name="attention_backward",
    )


def _taken(pl: Any, s: Whole, images: int, kind: str, place: int) -> Any:
    """Return what a program takes of an argument: a block of its queries, "q", or all, "k".

    ``place``: where in a packed array the argument is.
    """
    first, last = place * s.groups if s.packed else 0, s.query_blocks - 1

    def queries(i: Any, j: Any, *rest: Any) -> tuple:
        if len(rest) == 1 or not last:
            return i, rest[-1], first + j
        of, block = rest  # once gradients are only written, nothing new is taken
        return i, _where(of == 0, block, last), first + j

    if kind == "q":
        return pl.BlockSpec((images, s.queries, s.lanes), queries)
    return pl.BlockSpec((images, s.tokens, s.lanes), lambda i, j, *_: (i, 0, first + j))


def _where(condition: Any, value: Any, other: Any) -> Any:
    import jax.numpy as jnp

    return jnp.where(condition, value, other)


def _shape(s: Whole, shape: tuple[int, ...]) -> Any:
    import jax

    return jax.ShapeDtypeStruct(shape, _name(s.dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parameters(axes: int, vector_memory: int) -> Any:
    """Return what the compiler is told: that programs may run in any order but for a group's."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", *["arbitrary"] * (axes - 2)),
        vmem_limit_bytes=vector_memory if vector_memory > _GIVEN else None,
    )


# -- what a program computes ----------------------------------------------------------


@dataclass(frozen=True)
class _Head:
    """The lanes of the registers that a head touches, and which of them are its own."""

    lanes: slice
    own: Any
    """Booleans (1, lanes), or None if all are."""

    def only(self, x: Any) -> Any:
        """Set the lanes of other heads to zero."""
        import jax.numpy as jnp

        return x if self.own is None else jnp.where(self.own, x, jnp.zeros_like(x))


def _heads(s: Whole) -> Iterator[_Head]:
    """Yield the heads of a group."""
    for first in range(0, s.lanes, s.width):
        start = first // LANES * LANES
        end = min(-(-(first + s.width) // LANES) * LANES, s.lanes)
        lane = _numbers(1, end - start) + start
        own = (lane >= first) & (lane < first + s.width)
        yield _Head(slice(start, end), None if end - start == s.width else own)


class _Sums:
    """Sums over heads, register by register: two heads may lie in one."""

    def __init__(self) -> None:
        self._of_register: dict[int, Any] = {}

    def add(self, head: _Head, x: Any) -> None:
        for start in range(head.lanes.start, head.lanes.stop, LANES):
            part = x[:, start - head.lanes.start : start - head.lanes.start + LANES]
            before = self._of_register.get(start)
            self._of_register[start] = part if before is None else before + part

    def write(self, ref: Any, image: int, place: tuple[int, ...] = ()) -> None:
        """Write what was added for an image; ``place``: where in a stack of such arrays."""
        for start, x in self._of_register.items():
            here = (*place, image, slice(None), slice(start, start + x.shape[1]))
            ref[here] = x.astype(ref.dtype)

    def add_to(self, ref: Any, image: int, block: Any) -> None:
        """Add to what earlier blocks of queries have left there; None: there is but one."""
        from jax.experimental import pallas as pl

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


def _forward(s: Whole, q_ref: Any, k_ref: Any, v_ref: Any, output_ref: Any) -> None:
    import jax.numpy as jnp

    for image in range(q_ref.shape[0]):
        output = _Sums()
        for head in _heads(s):
            q, k, v = (ref[image, :, head.lanes] for ref in (q_ref, k_ref, v_ref))
            scores = _product(head.only(q), k, 1, 1)  # (queries, keys)
            weights = jnp.exp((scores - scores.max(1, keepdims=True)) * s.width**-0.5)
            sums = weights.sum(1, keepdims=True)
            output.add(head, _product(weights.astype(v.dtype), head.only(v), 1, 0) / sums)
        output.write(output_ref, image)


def _backward(s: Whole, *refs: Any) -> None:
    """Compute all three gradients of a block of queries, those of keys as a sum over blocks.

    Scores are (keys, queries) here: three of the five products then take them as they are, and a
    query's sum is over rows, which the vector units add without exchanging lanes.
    """
    from jax.experimental import pallas as pl

    *given, written, key_sums, value_sums = refs
    of, block = pl.program_id(2), pl.program_id(3)
    here = slice(None)
    if s.query_blocks > 1:
        here = pl.ds(pl.multiple_of(block * s.queries, s.queries), s.queries)

    @pl.when(of == 0)
    def _() -> None:
        for image in range(given[0].shape[0]):
            found = _Sums(), _Sums(), _Sums()
            for head in _heads(s):
                for total, x in zip(found, _of_head(s, head, image, block, *given), strict=True):
                    total.add(head, x)
            found[0].write(written, image, () if s.packed else (0,))
            for x, total in zip(found[1:], (key_sums, value_sums), strict=True):
                x.add_to(total, image, block if s.query_blocks > 1 else None)

    for place, sums in enumerate((key_sums, value_sums), 1):

        @pl.when(of == place)
        def _(sums: Any = sums) -> None:
            taken = sums[:, here, :].astype(written.dtype)
            written[...] = taken.reshape(written.shape)


def _of_head(s: Whole, head: _Head, image: int, block: Any, *refs: Any) -> tuple[Any, Any, Any]:
    """Return the gradients of a head's queries, keys and values, in fp32."""
    import jax.numpy as jnp

    q, k, v, grad = (ref[image, :, head.lanes] for ref in refs)
    if s.tokens % s.queries:  # of the last block, what lies behind the end is anything
        first = block * s.queries
        q, grad = (
            jnp.where(_numbers(s.queries, 1) + first < s.tokens, x, jnp.zeros_like(x))
            for x in (q, grad)
        )
    q, k, grad = (head.only(x) for x in (q, k, grad))
    scores = _product(k, q, 1, 1)  # (keys, queries)
    weights = jnp.exp((scores - scores.max(0, keepdims=True)) * s.width**-0.5)
    weights = weights / weights.sum(0, keepdims=True)
    of_weights = _product(v, grad, 1, 1)
    inner = (weights * of_weights).sum(0, keepdims=True)
    of_scores = (weights * (of_weights - inner) * s.width**-0.5).astype(q.dtype)
    return (
        _product(of_scores, k, 0, 0),
        _product(of_scores, q, 1, 0),
        _product(weights.astype(q.dtype), grad, 1, 0),
    )


def _product(left: Any, right: Any, over_left: int, over_right: int) -> Any:
    """Multiply, summing over a dimension of each; in fp32."""
    import jax

    dimensions = (((over_left,), (over_right,)), ((), ()))
    return jax.lax.dot_general(left, right, dimensions, preferred_element_type="float32")


def _numbers(rows: int, columns: int) -> Any:
    """Number the rows, or the columns, of which there are several."""
    import jax

    return jax.lax.broadcasted_iota("int32", (rows, columns), int(rows == 1))


# ------------------------------------------------------------------------------------------------


Qkv = torch.Tensor | Sequence[torch.Tensor]
"""Queries, keys and values: in one tensor, or each in its own."""


@dataclass(frozen=True)
class How:
    """How the kernels are called: on which part of a batch, and whether outputs are kept."""

    shards: Shards | None = None
    """None where the program is one device's."""
    kept: KeptInput | None = None


def use_whole(module: nn.Module, how: How) -> None:
    """Let all attention of timm's in ``module``, a block, compute its product by the kernels.

    See ``use_product``.
    """
    for part in attentions(module):
        if type(part) is Attention:
            forward = functools.partial(_forward_unfolded, how=how)
            part.forward = types.MethodType(forward, part)
        else:
            use_product(part, functools.partial(attention, how=how))


def _forward_unfolded(
    attn: Attention,
    x: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    *,
    how: How,
) -> torch.Tensor:
    """Compute what timm's attention does, but never with heads in front of tokens."""
    if attn_mask is not None or is_causal:
        raise NotImplementedError("attention has no mask here")
    gate = attn.gate(x).sigmoid() if attn.gate is not None else None
    y = attn.norm(of_layers(attn, attn.qkv(x), how=how))
    return attn.proj_drop(attn.proj(y if gate is None else y * gate))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: How | None = None
) -> torch.Tensor:
    """Compute softmax(q k' / sqrt(width)) v in autocast's dtype: (batch, heads, tokens, width)."""
    heads = q.shape[1]
    output = _merged(heads, how or How(), *(x.transpose(1, 2).flatten(2) for x in (q, k, v)))
    return output.unflatten(2, (heads, -1)).transpose(1, 2)


def of_layers(attn: Any, qkv: Qkv, rope: torch.Tensor | None = None, *, how: How) -> torch.Tensor:
    """Compute the product of timm's attention of what its layers make, with rotary embedding or
    without; see ``queries_keys_values``."""
    as_they_are = rope is None and isinstance(attn.q_norm, nn.Identity)
    if as_they_are and isinstance(qkv, torch.Tensor):
        return _merged(attn.num_heads, how, qkv)
    parts = (x.flatten(2) for x in queries_keys_values(attn, qkv, rope))
    return _merged(attn.num_heads, how, *parts)


def queries_keys_values(
    attn: Any, qkv: Qkv, rope: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values, (batch, tokens, heads, width), normalised and rotated.

    ``qkv`` are the three, (batch, tokens, heads x width), or all in one, side by side or as
    (batch, tokens, 3, heads x width).
    """
    if isinstance(qkv, torch.Tensor):
        qkv = qkv.chunk(3, -1) if qkv.dim() == 3 else qkv.unbind(2)
    q, k, v = (part.unflatten(2, (attn.num_heads, -1)) for part in qkv)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rope is not None:
        q, k = (_rotated(attn, x, rope).type_as(v) for x in (q, k))
    return q, k, v


def _rotated(attn: Any, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate (batch, tokens, heads, width) as timm does, but for class and register tokens.

    ``rope`` is (patches, 2 x width), and before these may have heads, and images before heads.
    """
    rope = rope.unsqueeze(1) if rope.dim() == 2 else rope.transpose(-2, -3)
    prefix, patches = x.tensor_split([attn.num_prefix_tokens], 1)
    rotated = apply_rot_embed_cat(patches, rope, half=attn.rotate_half)
    return torch.cat([prefix, rotated], 1)


def _merged(heads: int, how: How, *given: torch.Tensor) -> torch.Tensor:
    """Compute attention of queries, keys and values, (batch, tokens, heads x width) as the result.

    Or of all in one tensor, side by side or as (batch, tokens, 3, heads x width).
    """
    dtype = given[-1].dtype
    if torch.is_autocast_enabled("xla"):
        dtype = torch.get_autocast_dtype("xla")
    arguments = (heads, how.shards, *(x.to(dtype) for x in given))
    if how.kept:
        return how.kept.result(_Attention.apply, *arguments)
    return _Attention.apply(*arguments, None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, heads: int, shards: Shards | None, *given):
        *tensors, known = given
        ctx.save_for_backward(*tensors)
        ctx.heads, ctx.shards = heads, shards
        return _call(forward_kernel, heads, shards, tensors)[0] if known is None else known

    @staticmethod
    def backward(ctx, grad):
        given = ctx.saved_tensors
        grad = grad.to(given[0].dtype)
        gradients = _call(backward_kernel, ctx.heads, ctx.shards, given, grad)
        return None, None, *gradients, None


def _call(
    kernel: Callable[[Whole], Kernel],
    heads: int,
    shards: Shards | None,
    given: Sequence[torch.Tensor],
    *grad: torch.Tensor,
) -> list[torch.Tensor]:
    """Call a kernel on each device's part of images and heads.

    ``given`` are queries, keys and values, or all in one. With ``grad``, the gradient of the
    result, theirs are returned.
    """
    packed = len(given) == 1
    parts = [shards.part(x, -1) if shards else x for x in (*given, *grad)]
    shapes = [part.shape for part in parts]
    parts[0] = parts[0].flatten(2)
    batch, tokens, columns = parts[0].shape
    columns //= 3 if packed else 1
    heads //= shards.heads_parts if shards else 1
    sizes = Whole(batch, tokens, heads, columns // heads, parts[0].dtype, packed)
    if packed and not sizes.can_be_packed:
        sizes, parts = replace(sizes, packed=False), [*parts[0].chunk(3, -1), *parts[1:]]
    elif packed:
        parts = [parts[0]] * 3 + parts[1:]
    (result,) = kernel(sizes)(parts)
    results = [result] if result.dim() == 3 else [*result.unbind(0)]
    if packed and len(results) > 1:
        results = [torch.cat(results, -1)]
    if grad:
        results = [x.reshape(shape) for x, shape in zip(results, shapes, strict=False)]
    return [shards.whole(x, -1) if shards else x for x in results]
