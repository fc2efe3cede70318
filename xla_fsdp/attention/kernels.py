"""Flash attention in place of PyTorch's product, on TPUs: no N x N matrix in HBM.

The model stays timm's: what it asks of ``scaled_dot_product_attention`` is computed by kernels.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from models.blocks import attentions, use_product
from xla_fsdp import jax_private, torch_xla_private
from xla_fsdp.attention.sizes import LANES, SUBLANES, Shape, padded_tokens, padded_width

if TYPE_CHECKING:
    import torch_xla.distributed.spmd as xs


# ------------------------------------------------------------------------------------------------
# JAX's Pallas kernels of flash attention, lowered for TPUs and called from PyTorch/XLA.
#
# They are those that ``torch_xla.experimental.custom_kernel.flash_attention`` calls, lowered on any
# machine (torch_xla's own way needs a TPU attached), in blocks that divide the sequence, and with
# what each of them costs noted in its call.


@dataclass(frozen=True)
class _Operand:
    """An argument or a result: of which shape, in which blocks, chosen by which grid axes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    block: tuple[int, ...]
    axes: tuple[int, ...]

    def streamed_bytes(self, grid: tuple[int, ...]) -> int:
        """Return the bytes between HBM and the kernel: a block whenever the choice changes."""
        steps = [i for i in self.axes if grid[i] > 1]
        fetches = math.prod(grid[: max(steps) + 1]) if steps else 1
        return fetches * math.prod(self.block) * self.dtype.itemsize


BRANCHES: dict[str, int] = {}
"""The branches of each kernel that was lowered here, by its code: who counts the cycles of a
compiled program meets its kernels as code alone."""


@dataclass(frozen=True)
class Kernel:
    """A lowered kernel: its call's configuration, and its results' shapes and dtypes."""

    config: str
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    branches: int = 1
    """Of how many branches a program takes one, each as often as the others."""

    def __post_init__(self) -> None:
        BRANCHES[json.loads(self.config)["custom_call_config"]["body"]] = self.branches

    def __call__(self, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        return torch_xla_private.call_tpu_kernel(
            arguments, self.config, [list(shape) for shape in self.shapes], self.dtypes
        )


def _operands(s: Shape, query: int, key: int) -> dict[str, _Operand]:
    """Return what each kind of operand looks like to a kernel.

    The grid's axes are images, heads and, numbered ``query`` and ``key``, blocks of tokens.
    """
    head, row = (1, 1, s.block, s.width), (1, 1, s.block, LANES)
    key_head = (1, 1, s.key_block, s.width)
    return {
        "query": _Operand(s.heads_of, s.dtype, head, (0, 1, query)),
        "key": _Operand(s.heads_of_keys, s.dtype, key_head, (0, 1, key)),
        "row": _Operand(s.rows, torch.float32, row, (0, 1, query)),
        "query ids": _Operand((), torch.int32, (1, s.block, LANES), (0, query)),
        "key ids": _Operand((), torch.int32, (1, SUBLANES, s.key_block), (0, key)),
    }


def _lower(
    s: Shape,
    trace: Callable,
    arguments: list[str],
    results: list[str],
    *,
    products: int,
    key_axis: int,
) -> Kernel:
    """Lower JAX's function ``trace`` of arrays of these kinds to a kernel.

    It computes ``products`` matrix products of queries x keys; ``key_axis`` is the grid's axis of
    keys.
    """
    kinds = _operands(s, query=5 - key_axis, key=key_axis)
    ids = ["query ids", "key ids"] if s.masked else []
    arguments = [*arguments[:3], *ids, *arguments[3:]]  # as the kernels have them
    traced = {"row": s.scores, "query ids": s.scores[::2], "key ids": (s.batch, s.keys)}
    given = [(traced.get(kind, kinds[kind].shape), kinds[kind].dtype) for kind in arguments]
    config = json.loads(mosaic_config(trace, given))
    blocks = [s.tokens // s.block, s.keys // s.key_block]
    grid = (s.batch, s.heads, *(blocks if key_axis == 3 else reversed(blocks)))
    scores = math.prod(s.scores) * s.keys
    config["custom_call_config"]["cost_estimate"] = {
        "flops": 2 * products * scores * s.width,
        "transcendentals": scores,
        "bytes_accessed": sum(kinds[k].streamed_bytes(grid) for k in arguments + results),
    }
    return Kernel(
        json.dumps(config), [kinds[k].shape for k in results], [kinds[k].dtype for k in results]
    )


def mosaic_config(trace: Callable, given: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    """Return the configuration of the custom call of a JAX function's one Pallas kernel."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # it only lowers: a TPU, if any, is torch_xla's
    names = {torch.bfloat16: "bfloat16", torch.float32: "float32", torch.int32: "int32"}
    arrays = [jax.ShapeDtypeStruct(shape, names[dtype]) for shape, dtype in given]
    config = torch_xla_private.kernel_config(jax_private.lower_for_tpu(trace, arrays))
    assert config is not None
    return config


# -- what is lowered: JAX's functions, with statistics of rows (batch, heads, tokens) --------
# ``rest`` begins with the ids of queries and keys, (batch, tokens), if there is padding.


def forward_function(s: Shape, scale: float, for_backward: bool) -> Callable:
    """Return a function (q, k, v, *rest) -> output.

    ``for_backward``: it gives each row's sum of exponentials and largest score, too.
    """

    def forward(q, k, v, *ids):
        return jax_private.flash_forward(
            q,
            k,
            v,
            ids,
            with_statistics=for_backward,
            scale=scale,
            block=s.block,
            key_block=s.key_block,
        )

    return forward


def query_gradient_function(s: Shape, scale: float) -> Callable:
    """Return a function (q, k, v, *rest) -> q's gradient.

    ``rest`` ends with sums, largest scores, the gradient of the output, and the sum of it times the
    output over each row.
    """
    return _of_backward(jax_private.flash_query_gradient, s, scale)


def key_gradients_function(s: Shape, scale: float) -> Callable:
    """Return a function of the same arguments -> the gradients of k and of v."""
    return _of_backward(jax_private.flash_key_gradients, s, scale)


def _of_backward(kernel: Callable, s: Shape, scale: float) -> Callable:
    def gradient(q, k, v, *rest):
        *ids, sums, largest, grad, inner = rest
        given = {"q": q, "k": k, "v": v, "ids": ids, "sums": sums, "largest": largest}
        return kernel(
            **given, grad=grad, inner=inner, scale=scale, block=s.block, key_block=s.key_block
        )

    return gradient


# -- what is called: the same, with those statistics repeated over LANES, and wide ids -------

_FORWARD = ["query", "key", "key"]
_BACKWARD = [*_FORWARD, "row", "row", "query", "row"]


@functools.cache
def forward_kernel(s: Shape, scale: float, for_backward: bool) -> Kernel:
    results = ["query", "row", "row"] if for_backward else ["query"]
    function = forward_function(s, scale, for_backward)
    return _lower(s, function, _FORWARD, results, products=2, key_axis=3)


@functools.cache
def query_gradient_kernel(s: Shape, scale: float) -> Kernel:
    function = query_gradient_function(s, scale)
    return _lower(s, function, _BACKWARD, ["query"], products=3, key_axis=3)


@functools.cache
def key_gradients_kernel(s: Shape, scale: float) -> Kernel:
    function = key_gradients_function(s, scale)
    return _lower(s, function, _BACKWARD, ["key", "key"], products=4, key_axis=2)


# ------------------------------------------------------------------------------------------------


_HEADS_APART = 4
"""Dimensions of (batch, heads, tokens, width)."""
Along = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Shards:
    """How images and heads lie on the devices of an SPMD program: each calls the kernels on its
    own.

    ``images``, ``heads``: the mesh axis, or axes, that they are sharded along. Images are dimension
    0; which one heads are, if any, each call tells.
    """

    mesh: xs.Mesh
    images: Along
    heads: Along = None

    def part(self, x: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Return a device's part of the whole tensor."""
        import torch_xla.distributed.spmd as xs

        spec = self._spec(x, heads)
        return xs.enable_manual_sharding(x * 1, spec, mesh=self.mesh).global_tensor

    def whole(self, part: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """Return the whole of which each device has a part."""
        import torch_xla.distributed.spmd as xs

        spec = self._spec(part, heads)
        shape = torch.Size(
            size * self._parts(along) for size, along in zip(part.shape, spec, strict=True)
        )
        return xs.disable_manual_sharding(part, spec, shape, mesh=self.mesh).global_tensor

    @property
    def heads_parts(self) -> int:
        """Return into how many parts heads are sharded."""
        return self._parts(self.heads)

    def _spec(self, x: torch.Tensor, heads: int | None) -> tuple[Along, ...]:
        spec: list[Along] = [self.images, *[None] * (x.dim() - 1)]
        if heads is not None:
            spec[heads] = self.heads
        return tuple(spec)

    def _parts(self, along: Along) -> int:
        axes = (along,) if isinstance(along, str) else along or ()
        return math.prod(self.mesh.shape()[axis] for axis in axes)


def use_flash(module: nn.Module, shards: Shards | None) -> None:
    """Let all attention of timm's in ``module``, a block, compute its product by the kernels.

    ``shards`` is None where the program is one device's. See ``use_product``.
    """
    for part in attentions(module):
        use_product(part, functools.partial(attention, shards=shards))


def padded(x: torch.Tensor) -> torch.Tensor:
    """Add zeros to (batch, heads, tokens, width), as the kernels want tokens and width to be."""
    tokens, width = x.shape[-2:]
    columns = padded_width(width)
    pad = (0, columns - width, 0, padded_tokens(tokens, columns, x.dtype) - tokens)
    return F.pad(x, pad) if any(pad) else x


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shards: Shards | None = None
) -> torch.Tensor:
    """Compute softmax(q k' / sqrt(width)) v in autocast's dtype: (batch, heads, tokens, width)."""
    tokens, width = q.shape[-2:]
    dtype = v.dtype
    if torch.is_autocast_enabled("xla"):
        dtype = torch.get_autocast_dtype("xla")
    q, k, v = (padded(x.to(dtype)) for x in (q, k, v))
    scale = width**-0.5
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        output = _WithGradient.apply(q, k, v, scale, tokens, shards)
    else:
        (output,) = _forward(q, k, v, scale, tokens, shards, for_backward=False)
    return output[..., :tokens, :width]


def _forward(q, k, v, scale: float, valid: int, shards: Shards | None, *, for_backward: bool):
    parts = [_part(x, shards) for x in (q, k, v, *ids(q, _valid(q, valid)))]
    kernel = forward_kernel(_shape(parts[0], valid), scale, for_backward)
    return [_whole(x, shards) for x in kernel(parts)]


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale: float, valid: int, shards: Shards | None):
        output, *rows = _forward(q, k, v, scale, valid, shards, for_backward=True)
        ctx.save_for_backward(q, k, v, output, *rows)
        ctx.scale, ctx.valid, ctx.shards = scale, valid, shards
        return output

    @staticmethod
    def backward(ctx, grad):
        q, k, v, output, sums, largest = ctx.saved_tensors
        inner = (output.float() * grad.float()).sum(-1, keepdim=True).expand(sums.shape)
        arguments = (q, k, v, *ids(q, _valid(q, ctx.valid)), sums, largest, grad.to(q.dtype), inner)
        parts = [_part(x, ctx.shards) for x in arguments]
        shape = _shape(parts[0], ctx.valid)
        grads = [
            *query_gradient_kernel(shape, ctx.scale)(parts),
            *key_gradients_kernel(shape, ctx.scale)(parts),
        ]
        return *(_whole(x, ctx.shards) for x in grads), None, None, None


def _part(x: torch.Tensor, shards: Shards | None) -> torch.Tensor:
    return shards.part(x, _heads_of(x)) if shards else x


def _whole(part: torch.Tensor, shards: Shards | None) -> torch.Tensor:
    return shards.whole(part, _heads_of(part)) if shards else part


def _heads_of(x: torch.Tensor) -> int | None:
    """Return which dimension heads are; tokens' numbers are the same for all."""
    return 1 if x.dim() == _HEADS_APART else None


def _shape(part: torch.Tensor, valid: int) -> Shape:
    batch, heads, tokens, width = part.shape
    return Shape(batch, heads, tokens, tokens, width, valid, part.dtype)


def _valid(q: torch.Tensor, count: int) -> torch.Tensor | None:
    """Tell which tokens, the first ``count``, are no padding: see ``ids``; None if all are none."""
    batch, _, tokens, _ = q.shape
    if count == tokens:
        return None
    return (torch.arange(tokens, device=q.device) < count).to(torch.int32).expand(batch, -1)


def ids(q: torch.Tensor, valid: torch.Tensor | None) -> list[torch.Tensor]:
    """Return the numbers of queries and keys: queries take keys of their own, padding has another.

    ``valid`` has 1 for a key that is none, int32 (batch, keys); None, and nothing is returned, if
    there is no padding. What a padded query computes is finite, is dropped, and has no gradient.
    """
    if valid is None:
        return []
    batch, _, tokens, _ = q.shape
    ones = torch.ones((batch, tokens, LANES), dtype=torch.int32, device=q.device)
    return [ones, valid[:, None].expand(-1, SUBLANES, -1)]
