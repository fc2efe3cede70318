"""Flash attention on TPUs (``--attention flash``): no matrix of scores in HBM.

The kernels are JAX's, those that ``torch_xla.experimental.custom_kernel.flash_attention`` calls.
torch_xla's blocks are fixed; here they are large and divide the padded sequence. The model stays
timm's: what it asks of ``scaled_dot_product_attention`` is computed by the kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from models.blocks import attentions, use_product
from xla_fsdp import jax_private
from xla_fsdp.attention.kernels import Kernel, Shards, autocast_dtype, lower
from xla_fsdp.attention.sizes import LANES, SUBLANES, FlashSizes, padded_tokens, padded_width

# ------------------------------------------------------------------------------------------------
# The kernels, and the JAX functions that they are lowered from.
#
# The functions take statistics as (batch, heads, tokens), and, if there is padding, the ids of
# queries and keys as (batch, tokens) behind v. The kernels take statistics repeated over LANES, and
# wide ids.

_FORWARD = ["query", "key", "key"]
_BACKWARD = [*_FORWARD, "statistic", "statistic", "query", "statistic"]


def forward_function(s: FlashSizes, scale: float, for_backward: bool) -> Callable:
    """Return a JAX function (q, k, v, *ids) -> output.

    ``for_backward``: it also returns each row's sum of exponentials and largest score.
    """

    def forward(q, k, v, *ids):
        blocks = {"block": s.block, "key_block": s.key_block}
        return jax_private.flash_forward(
            q, k, v, ids, with_statistics=for_backward, scale=scale, **blocks
        )

    return forward


def query_gradient_function(s: FlashSizes, scale: float) -> Callable:
    """Return a JAX function (q, k, v, *ids, sums, largest, grad, inner) -> q's gradient.

    ``sums`` and ``largest`` are what the forward function returns, ``grad`` is the gradient of the
    output, ``inner`` the sum of it times the output over each row.
    """

    def gradient(*given):
        return jax_private.flash_query_gradient(
            *given, scale=scale, block=s.block, key_block=s.key_block
        )

    return gradient


def key_gradients_function(s: FlashSizes, scale: float) -> Callable:
    """Return a JAX function of the same arguments -> the gradients of k and of v."""

    def gradient(*given):
        return jax_private.flash_key_gradients(
            *given, scale=scale, block=s.block, key_block=s.key_block
        )

    return gradient


@functools.cache
def forward_kernel(s: FlashSizes, scale: float, for_backward: bool) -> Kernel:
    results = ["query", "statistic", "statistic"] if for_backward else ["query"]
    function = forward_function(s, scale, for_backward)
    return _lower(s, function, _FORWARD, results, products=2, key_axis=3)


@functools.cache
def query_gradient_kernel(s: FlashSizes, scale: float) -> Kernel:
    function = query_gradient_function(s, scale)
    return _lower(s, function, _BACKWARD, ["query"], products=3, key_axis=3)


@functools.cache
def key_gradients_kernel(s: FlashSizes, scale: float) -> Kernel:
    function = key_gradients_function(s, scale)
    return _lower(s, function, _BACKWARD, ["key", "key"], products=4, key_axis=2)


@dataclass(frozen=True)
class _Operand:
    """An argument or result of a kernel."""

    shape: tuple[int, ...]
    """As the JAX function has it."""
    dtype: torch.dtype
    block: tuple[int, ...]
    axes: tuple[int, ...]
    """The axes of the grid that choose the block."""

    def streamed_bytes(self, grid: tuple[int, ...]) -> int:
        """Return the bytes between HBM and the kernel: a block whenever the choice changes."""
        steps = [i for i in self.axes if grid[i] > 1]
        fetches = math.prod(grid[: max(steps) + 1]) if steps else 1
        return fetches * math.prod(self.block) * self.dtype.itemsize


def _lower(
    s: FlashSizes,
    function: Callable,
    arguments: list[str],
    results: list[str],
    *,
    products: int,
    key_axis: int,
) -> Kernel:
    """Lower a JAX function of such arguments and results to a kernel.

    It computes ``products`` matrix products of queries x keys. The grid's axes are images, heads,
    and blocks of queries and of keys; those of keys are axis ``key_axis``, 2 or 3.
    """
    query_axis, int32 = 5 - key_axis, torch.int32
    query, key = (1, 1, s.block, s.width), (1, 1, s.key_block, s.width)
    statistic = (1, 1, s.block, LANES)
    query_id, key_id = (1, s.block, LANES), (1, SUBLANES, s.key_block)
    kinds = {
        "query": _Operand(s.query_shape, s.dtype, query, (0, 1, query_axis)),
        "key": _Operand(s.key_shape, s.dtype, key, (0, 1, key_axis)),
        "statistic": _Operand(s.query_shape[:3], torch.float32, statistic, (0, 1, query_axis)),
        "query ids": _Operand((s.batch, s.tokens), int32, query_id, (0, query_axis)),
        "key ids": _Operand((s.batch, s.keys), int32, key_id, (0, key_axis)),
    }
    if s.masked:
        arguments = [*arguments[:3], "query ids", "key ids", *arguments[3:]]
    blocks = {query_axis: s.tokens // s.block, key_axis: s.keys // s.key_block}
    grid = (s.batch, s.heads, blocks[2], blocks[3])
    scores = math.prod(s.query_shape[:3]) * s.keys
    return lower(
        function,
        [(kinds[name].shape, kinds[name].dtype) for name in arguments],
        [
            (s.statistic_shape if name == "statistic" else kinds[name].shape, kinds[name].dtype)
            for name in results
        ],
        flops=2 * products * scores * s.width,
        transcendentals=scores,
        bytes_accessed=sum(kinds[name].streamed_bytes(grid) for name in arguments + results),
    )


# ------------------------------------------------------------------------------------------------
# Attention by these kernels. All tensors are padded, (batch, heads, tokens, width) and whole: with
# ``shards`` each device computes its part of them; without, the program is one device's.
#
# ``valid`` is 1 for keys that are no padding, int32 (batch, keys), or None if there is no padding.
# What a padded query computes is finite, is dropped, and has no gradient.


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    valid: torch.Tensor | None,
    scale: float,
    shards: Shards | None,
    *,
    for_backward: bool = True,
) -> list[torch.Tensor]:
    """Return softmax(scale q k') v.

    ``for_backward``: also each query's sum of exponentials and largest score, fp32 (batch, heads,
    tokens, LANES).
    """
    parts = _parts([q, k, v, *_ids(q, valid)], shards)
    kernel = forward_kernel(_sizes(parts, valid), scale, for_backward)
    return _wholes(kernel(parts), shards)


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    valid: torch.Tensor | None,
    sums: torch.Tensor,
    largest: torch.Tensor,
    grad: torch.Tensor,
    inner: torch.Tensor,
    scale: float,
    shards: Shards | None,
) -> list[torch.Tensor]:
    """Return the gradients of q, k and v, for the gradient ``grad`` of the output.

    ``sums`` and ``largest`` are what ``forward`` returns; ``inner``, of the same shape, is the sum
    over each row of the output times its gradient.
    """
    parts = _parts([q, k, v, *_ids(q, valid), sums, largest, grad, inner], shards)
    sizes = _sizes(parts, valid)
    found = [
        *query_gradient_kernel(sizes, scale)(parts),
        *key_gradients_kernel(sizes, scale)(parts),
    ]
    return _wholes(found, shards)


def _ids(q: torch.Tensor, valid: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the ids of queries and keys: a query attends to keys of its id; padding has another.

    Made outside of the parts: made inside the manual region, the partitioner aborts.
    """
    if valid is None:
        return []
    batch, _, tokens, _ = q.shape
    ones = torch.ones((batch, tokens, LANES), dtype=torch.int32, device=q.device)
    return [ones, valid[:, None].expand(-1, SUBLANES, -1)]


def _sizes(parts: list[torch.Tensor], valid: torch.Tensor | None) -> FlashSizes:
    batch, heads, tokens, width = parts[0].shape
    keys, dtype = parts[1].shape[2], parts[0].dtype
    return FlashSizes(batch, heads, tokens, keys, width, dtype, masked=valid is not None)


def _parts(tensors: list[torch.Tensor], shards: Shards | None) -> list[torch.Tensor]:
    """Return a device's parts. Heads are dimension 1; ids, of 3 dimensions, have none."""
    return [shards.part(x, 1 if x.dim() == 4 else None) for x in tensors] if shards else tensors


def _wholes(parts: list[torch.Tensor], shards: Shards | None) -> list[torch.Tensor]:
    return [shards.whole(x, 1) for x in parts] if shards else parts


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
        (output,) = forward(q, k, v, _valid(q, tokens), scale, shards, for_backward=False)
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
        output, *statistics = forward(q, k, v, _valid(q, tokens), scale, shards)
        ctx.save_for_backward(q, k, v, output, *statistics)
        ctx.scale, ctx.tokens, ctx.shards = scale, tokens, shards
        return output

    @staticmethod
    def backward(ctx, grad):
        q, k, v, output, sums, largest = ctx.saved_tensors
        inner = (output.float() * grad.float()).sum(-1, keepdim=True).expand(sums.shape)
        given = (q, k, v, _valid(q, ctx.tokens), sums, largest, grad.to(q.dtype), inner)
        return *gradients(*given, ctx.scale, ctx.shards), None, None, None


def _valid(q: torch.Tensor, count: int) -> torch.Tensor | None:
    """Return which tokens, the first ``count``, are no padding; None if there is no padding."""
    batch, _, tokens, _ = q.shape
    if count == tokens:
        return None
    return (torch.arange(tokens, device=q.device) < count).to(torch.int32).expand(batch, -1)
