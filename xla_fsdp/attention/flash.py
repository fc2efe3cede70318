"""Flash attention on TPUs (``--attention flash``): no matrix of scores in HBM.

The kernels are JAX's, those that ``torch_xla.experimental.custom_kernel.flash_attention`` calls.
torch_xla's blocks are fixed; here they are large and divide the padded sequence. The model stays
timm's: what it asks of ``scaled_dot_product_attention`` is computed by the kernels.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from models.blocks import attentions, use_product
from xla_fsdp import jax_private
from xla_fsdp.attention.kernels import Kernel, Shards, autocast_dtype, lower
from xla_fsdp.attention.sizes import LANES, SUBLANES, FlashSizes, padded_tokens, padded_width

_FORWARD = ["query", "key", "key"]
_BACKWARD = [*_FORWARD, "statistic", "statistic", "query", "statistic"]
_KERNELS = {
    "output": (_FORWARD, ["query"], 2, 3),
    "output and statistics": (_FORWARD, ["query", "statistic", "statistic"], 2, 3),
    "query gradient": (_BACKWARD, ["query"], 3, 3),
    "key gradients": (_BACKWARD, ["key", "key"], 4, 2),
}
"""Of each kernel the arguments and results, the matrix products of queries x keys that it computes,
and the axis of its grid that counts blocks of keys. The axes are images, heads, and blocks of
queries and of keys, or of keys and of queries."""


@dataclass(frozen=True)
class _Operand:
    """An argument or result of a kernel."""

    shape: tuple[int, ...]
    """As the JAX function has it."""
    dtype: torch.dtype
    block: tuple[int, ...]
    axes: tuple[int, ...]
    """The axes of the grid that choose the block."""


GRADIENTS = ("query gradient", "key gradients")


@functools.cache
def kernel(computes: str, s: FlashSizes, scale: float) -> Kernel:
    """Return the kernel of ``jax_private.flash_function``.

    It takes statistics repeated over LANES, and wide ids.
    """
    arguments, results, products, key_axis = _KERNELS[computes]
    query_axis, int32 = 5 - key_axis, torch.int32
    query, key = (1, 1, s.block, s.width), (1, 1, s.key_block, s.width)
    statistic = (1, 1, s.block, LANES)
    query_id, key_id = (1, s.block, LANES), (1, SUBLANES, s.key_block)
    kinds = {
        "query": _Operand(s.query_shape, s.dtype, query, (0, 1, query_axis)),
        "key": _Operand((s.batch, s.heads, s.keys, s.width), s.dtype, key, (0, 1, key_axis)),
        "statistic": _Operand(s.query_shape[:3], torch.float32, statistic, (0, 1, query_axis)),
        "query ids": _Operand((s.batch, s.tokens), int32, query_id, (0, query_axis)),
        "key ids": _Operand((s.batch, s.keys), int32, key_id, (0, key_axis)),
    }
    if s.masked:
        arguments = [*arguments[:3], "query ids", "key ids", *arguments[3:]]
    blocks = {query_axis: s.tokens // s.block, key_axis: s.keys // s.key_block}
    grid = (s.batch, s.heads, blocks[2], blocks[3])
    scores = math.prod(s.query_shape[:3]) * s.keys
    streamed_bytes = 0  # between HBM and the kernel: a block whenever the grid's choice changes
    for operand in (kinds[name] for name in arguments + results):
        steps = [axis for axis in operand.axes if grid[axis] > 1]
        fetches = math.prod(grid[: max(steps) + 1]) if steps else 1
        streamed_bytes += fetches * math.prod(operand.block) * operand.dtype.itemsize
    return lower(
        jax_private.flash_function(computes, scale=scale, block=s.block, key_block=s.key_block),
        [(kinds[name].shape, kinds[name].dtype) for name in arguments],
        [
            (s.statistic_shape if name == "statistic" else kinds[name].shape, kinds[name].dtype)
            for name in results
        ],
        flops=2 * products * scores * s.width,
        transcendentals=scores,
        bytes_accessed=streamed_bytes,
    )


def call(
    computes: Sequence[str],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    valid: torch.Tensor | None,
    scale: float,
    shards: Shards | None,
    *of_backward: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the results of these kernels, one after the other, for softmax(scale q k') v.

    All tensors are padded, (batch, heads, tokens, width) and whole: with ``shards`` each device
    computes its part of them; without, the program is one device's. Statistics are fp32 (batch,
    heads, tokens, LANES). ``of_backward`` are what gradients need: sums, largest, grad, inner.

    ``valid`` is 1 for keys that are no padding, int32 (batch, keys), or None if there is no
    padding. What a padded query computes is finite, is dropped, and has no gradient.
    """
    given = [q, k, v]
    # A query attends to keys of its id, and padding has another one. Ids are made outside of the
    # parts: made inside the manual region, the partitioner aborts.
    if valid is not None:
        batch, _, tokens, _ = q.shape
        ones = torch.ones((batch, tokens, LANES), dtype=torch.int32, device=q.device)
        given += [ones, valid[:, None].expand(-1, SUBLANES, -1)]
    given += of_backward
    if shards:  # heads are dimension 1; ids, of 3 dimensions, have none
        given = [shards.part(x, 1 if x.dim() == 4 else None) for x in given]
    batch, heads, tokens, width = given[0].shape
    masked, keys = valid is not None, given[1].shape[2]
    sizes = FlashSizes(batch, heads, tokens, keys, width, given[0].dtype, masked)
    found = [x for each in computes for x in kernel(each, sizes, scale)(given)]
    return [shards.whole(x, 1) for x in found] if shards else found


# ------------------------------------------------------------------------------------------------
# In a model.


def use_flash(module: nn.Module, shards: Shards | None) -> None:
    """Let all of timm's attention in ``module``, a block, compute its product by the kernels.

    ``shards`` is None where the program is one device's. See ``use_product``.
    """
    for part in attentions(module):
        use_product(part, functools.partial(attention, shards=shards))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shards: Shards | None = None
) -> torch.Tensor:
    """Compute softmax(q k' / sqrt(width)) v in autocast's dtype: (batch, heads, tokens, width)."""
    tokens, width = q.shape[-2:]
    dtype = autocast_dtype(v)
    q, k, v = (padded(x.to(dtype)) for x in (q, k, v))
    scale = width**-0.5
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        output = _FlashAttention.apply(q, k, v, scale, tokens, shards)
    else:
        (output,) = call(["output"], q, k, v, _valid(q, tokens), scale, shards)
    return output[..., :tokens, :width]


def padded(x: torch.Tensor) -> torch.Tensor:
    """Pad (batch, heads, tokens, width) with zeros to sizes that the kernels take."""
    tokens, width = x.shape[-2:]
    columns = padded_width(width)
    pad = (0, columns - width, 0, padded_tokens(tokens, columns, x.dtype) - tokens)
    return F.pad(x, pad) if any(pad) else x


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale: float, tokens: int, shards: Shards | None):
        given = (q, k, v, _valid(q, tokens), scale, shards)
        output, *statistics = call(["output and statistics"], *given)
        ctx.save_for_backward(q, k, v, output, *statistics)
        ctx.scale, ctx.tokens, ctx.shards = scale, tokens, shards
        return output

    @staticmethod
    def backward(ctx, grad):
        q, k, v, output, sums, largest = ctx.saved_tensors
        inner = (output.float() * grad.float()).sum(-1, keepdim=True).expand(sums.shape)
        of_backward = (sums, largest, grad.to(q.dtype), inner)
        given = (q, k, v, _valid(q, ctx.tokens), ctx.scale, ctx.shards, *of_backward)
        return *call(GRADIENTS, *given), None, None, None


def _valid(q: torch.Tensor, count: int) -> torch.Tensor | None:
    """Return which tokens, the first ``count``, are no padding; None if there is no padding."""
    batch, _, tokens, _ = q.shape
    if count == tokens:
        return None
    return (torch.arange(tokens, device=q.device) < count).to(torch.int32).expand(batch, -1)
