"""Attention for short sequences on TPUs (``--attention whole``): no attention scores in HBM.

Like ``flash.py``, but its Pallas kernels hold whole sequences in vector memory.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models.blocks import (
    Qkv,
    attentions,
    is_segments,
    queries_keys_values,
    use_attend,
    use_product,
)
from tpu_attention.kernels import (
    DEFAULT_VECTOR_MEMORY,
    WINDOW_STEP,
    Array,
    Calls,
    Kernel,
    Saves,
    WholeSizes,
    lower,
)


@functools.cache
def kernel(s: WholeSizes, *, backward: bool) -> Kernel:
    """Lower the kernel (q, k, v) -> output, or (q, k, v, gradient of it) -> their gradients.

    Packed, all three are the same array; gradients are packed as these are, or stacked. The angles
    that queries and keys are rotated by come after these, if they are, then the segments of tokens,
    twice, and their ``windows``.

    Where the cost depends on the windows, it is noted for ``_usual_segments``.
    """
    from tpu_attention import pallas  # imports JAX

    arguments: list[Array] = [(s.input_shape, s.dtype)] * 3
    result: Array
    if backward:
        function, products, branches = pallas.whole_backward, 5, 3
        arguments.append((s.shape, s.dtype))
        result = (s.gradients, s.dtype)
    else:
        function, products, branches = pallas.whole_forward, 2, 1
        result = (s.shape, s.dtype)
    arrays = len(arguments) + branches
    if s.apart:
        arguments.append((s.angles, torch.float32))
    if s.segmented:
        arguments += [(s.segments, torch.int32)] * 2
    keys, stand_ins = [s.tokens], list[Callable]()
    if s.windows:
        arguments.append((s.window_shape, torch.int32))
        keys = windows(s, _usual_segments(s.tokens))[0, ::2].tolist()
        stand_ins = [function(replace(s, window=window)) for window in keys]
    scores = s.batch * s.heads * s.tokens * sum(keys) // len(keys)
    return lower(
        function(s),
        arguments,
        [result],
        flops=products * 2 * scores * s.width,
        transcendentals=scores,
        bytes_accessed=arrays * math.prod(s.shape) * s.dtype.itemsize,
        branches=branches,
        stand_ins=stand_ins,
    )


def _usual_segments(tokens: int) -> torch.Tensor:
    """Return the segments that ``--compile_only`` assumes, (1, tokens): of four images of the same
    size, and a padding of about 1/32."""
    numbers = torch.arange(tokens) // (31 * tokens // 128) + 1
    return torch.where(numbers > 4, 0, numbers).int()[None]


def windows(s: WholeSizes, segments: torch.Tensor) -> torch.Tensor:
    """Return how many keys, and the first key, of the window of each block of queries: the smallest
    of ``s.windows`` that has all keys of its segments, int32 (batch, 2 x blocks).

    ``segments``: (batch, tokens). Windows have all that is needed whatever their order is. They are
    the smallest if segments are numbered along the sequence and padding, 0, is behind them.
    """
    numbers = segments.where(segments > 0, torch.iinfo(torch.int32).max)
    behind = numbers[:, -1:].expand(-1, s.query_blocks * s.queries - s.tokens)
    blocks = torch.cat([numbers, behind], 1).unflatten(1, (-1, s.queries))
    least, most = (x[..., None] for x in (blocks.amin(2), blocks.amax(2)))
    needed = (numbers[:, None] >= least) & (numbers[:, None] <= most)
    places = torch.arange(s.tokens, dtype=torch.int32, device=segments.device)
    first = places.where(needed, s.tokens).amin(2)
    end = (places + 1).where(needed, 0).amax(2)
    keys, start = torch.full_like(first, s.tokens), torch.zeros_like(first)
    for window in reversed(s.windows[:-1]):
        at = first.clamp(max=s.tokens - window) // WINDOW_STEP * WINDOW_STEP
        too_small = end > at + window
        keys, start = keys.where(too_small, window), start.where(too_small, at)
    return torch.stack([keys, start], 2).flatten(1)


# ------------------------------------------------------------------------------------------------
# In a model. ``save`` says which results are saved for the backward pass.


def use_whole(module: nn.Module, calls: Calls, save: Saves | None = None) -> None:
    """Let timm's attention in a block compute its product by the kernels (``use_product``)."""

    attend_here = functools.partial(attend, calls=calls, save=save)
    for part in attentions(module):
        if not use_attend(part, attend_here):
            use_product(part, functools.partial(attention, calls=calls, save=save))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    calls: Calls,
    save: Saves | None = None,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute softmax(q k' / sqrt(width)) v in autocast's dtype: (batch, heads, tokens, width).
    ``segments``, int32 (batch, tokens): tokens attend to those of their own segment."""
    heads = q.shape[1]
    tensors = [x.transpose(1, 2).flatten(2) for x in (q, k, v)]
    sizes = replace(_sizes(heads, calls, tensors), segmented=segments is not None)
    cast = (x.to(sizes.dtype) for x in tensors)
    output = _computed(save, sizes, calls, None, segments, *cast)
    return output.unflatten(2, (heads, -1)).transpose(1, 2)


def attend(
    attn: Any,
    qkv: Qkv,
    rope: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
    *,
    calls: Calls,
    save: Saves | None = None,
) -> torch.Tensor:
    """Compute timm's attention, (batch, tokens, heads x width), from the results of its layers.

    See ``queries_keys_values``, and ``attention`` for ``segments``.
    """
    if not (segments is None or is_segments(segments)):
        raise NotImplementedError("whole attention supports no mask other than segments")
    tensors, angles = [qkv] if isinstance(qkv, torch.Tensor) else [*qkv], None
    sizes = replace(_sizes(attn.num_heads, calls, tensors), segmented=segments is not None)
    if rope is not None and rope.dim() == 2:  # the same for all images and heads, and not learned
        rotating = replace(sizes, apart=sizes.width // 2 if attn.rotate_half else 1)
        # Kernels can rotate whole registers, in any TPU's memory.
        if rotating.fills_registers and rotating.vector_memory() <= DEFAULT_VECTOR_MEMORY:
            angles = _angles(rotating, rope, attn.num_prefix_tokens)
            sizes, rope = rotating, None
    if rope is not None or not isinstance(attn.q_norm, nn.Identity):
        tensors = [x.flatten(2) for x in queries_keys_values(attn, qkv, rope)]
        sizes = replace(sizes, packed=False)
    cast = (x.to(sizes.dtype) for x in tensors)
    return _computed(save, sizes, calls, angles, segments, *cast)


def _computed(save: Saves | None, *arguments: Any) -> torch.Tensor:
    return save.result(_Attention.apply, *arguments) if save else _Attention.apply(*arguments, None)


def _angles(s: WholeSizes, rope: torch.Tensor, prefix: int) -> torch.Tensor:
    """Return what kernels rotate by, of the shape ``WholeSizes.angles``. ``rope`` is (patches, 2
    x width); the ``prefix`` tokens before patches are not rotated."""
    sines, cosines = rope.float().chunk(2, -1)
    # A pair (x, y) becomes (x cosine - y sine, y cosine + x sine).
    first, second = sines.unflatten(1, (-1, 2, s.apart)).unbind(2)
    none = torch.zeros_like(first)
    pairs = [(-first, none), (none, second)] if len(s.shifts) > 1 else [(-first, second)]
    around = (0, 0, prefix, s.angles[1] - prefix - len(rope))
    sines = torch.stack([torch.stack(pair, 2).flatten(1) for pair in pairs])
    tables = [F.pad(cosines[None], around, value=1.0), F.pad(sines, around)]
    return torch.cat(tables).repeat(1, 1, s.lanes // s.width)


def _sizes(heads: int, calls: Calls, tensors: Sequence[torch.Tensor]) -> WholeSizes:
    """Return the sizes of what a device computes of queries, keys and values, (batch, tokens,
    heads x width), or all in one, side by side or as (batch, tokens, 3, heads x width)."""
    batch, tokens, *columns = tensors[0].shape
    is_one = len(tensors) == 1
    width = math.prod(columns) // heads // (3 if is_one else 1)
    batch //= calls.image_shards
    heads //= calls.head_shards
    sizes = WholeSizes(batch, tokens, heads, width, calls.dtype(tensors[-1]))
    return replace(sizes, packed=is_one and sizes.fills_registers)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sizes: WholeSizes, calls: Calls, angles, segments, *tensors_and_saved):
        *tensors, saved_result = tensors_and_saved
        ctx.save_for_backward(angles, segments, *tensors)
        ctx.sizes, ctx.calls = sizes, calls
        if saved_result is not None:
            return saved_result
        return _call_kernel(sizes, calls, angles, segments, tensors)[0]

    @staticmethod
    def backward(ctx, grad):
        angles, segments, *tensors = ctx.saved_tensors
        grad = grad.to(tensors[0].dtype)
        grads = _call_kernel(ctx.sizes, ctx.calls, angles, segments, tensors, grad)
        return None, None, None, None, *grads, None


def _call_kernel(
    sizes: WholeSizes,
    calls: Calls,
    angles: torch.Tensor | None,
    segments: torch.Tensor | None,
    tensors: Sequence[torch.Tensor],
    *grad: torch.Tensor,
) -> list[torch.Tensor]:
    """Compute attention on each device's part of images and heads; with ``grad``, the gradient of
    the result, return the gradients of ``tensors``: queries, keys and values, or all in one."""
    is_one = len(tensors) == 1
    parts = [calls.part(x, -1) for x in (*tensors, *grad)]
    shapes = [part.shape for part in parts]
    if is_one:
        qkv = parts.pop(0).flatten(2)
        parts[:0] = [qkv] * 3 if sizes.packed else qkv.chunk(3, -1)
    if angles is not None:
        parts.append(calls.replicated(angles))
    if segments is not None:
        padded = F.pad(segments, (0, sizes.segments[2] - sizes.tokens))
        parts += [calls.part(padded[:, None])] * 2
    if segments is not None and sizes.windows:
        parts.append(calls.part(windows(sizes, segments)))
    (result,) = calls.call(kernel, sizes, parts, backward=len(grad) > 0)
    results = [result] if result.dim() == 3 else [*result.unbind(0)]
    if is_one and len(results) > 1:
        results = [torch.cat(results, -1)]
    if grad:
        results = [x.reshape(shapes[place]) for place, x in enumerate(results)]
    return [calls.whole(x, -1) for x in results]
