"""Flash attention in place of PyTorch's product, on TPUs: no N x N matrix in HBM.

The model stays timm's: what it asks of ``scaled_dot_product_attention`` is computed by kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from xla_fsdp.attention.kernels import (
    forward_kernel,
    key_gradients_kernel,
    query_gradient_kernel,
)
from xla_fsdp.attention.sizes import LANES, SUBLANES, Shape, padded_tokens, padded_width

if TYPE_CHECKING:  # parts.py, and plain products with it, can do without
    import torch_xla.distributed.spmd as xs


@dataclass(frozen=True)
class BatchShards:
    """How a batch lies on the devices of an SPMD program: each calls the kernels on its own part.

    ``axis``: the mesh axis, or axes, that dimension 0 is sharded along.
    """

    mesh: xs.Mesh
    axis: str | tuple[str, ...] | None

    def part(self, x: torch.Tensor) -> torch.Tensor:
        import torch_xla.distributed.spmd as xs

        return xs.enable_manual_sharding(x * 1, self._spec(x), mesh=self.mesh).global_tensor

    def whole(self, part: torch.Tensor, batch: int) -> torch.Tensor:
        import torch_xla.distributed.spmd as xs

        shape = torch.Size((batch, *part.shape[1:]))
        joined = xs.disable_manual_sharding(part, self._spec(part), shape, mesh=self.mesh)
        return joined.global_tensor

    def _spec(self, x: torch.Tensor) -> tuple:
        return (self.axis,) + (None,) * (x.dim() - 1)


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of queries, keys and values that computes what attention does with them."""


def use_flash(module: nn.Module, shards: BatchShards | None) -> None:
    """Let all attention of timm's in ``module``, a block, compute its product by the kernels.

    ``shards`` is None where the program is one device's. See ``use_product``.
    """
    use_product(module, functools.partial(attention, shards=shards))


def use_product(module: nn.Module, product: Product) -> None:
    """Let all attention of timm's in ``module``, a block, compute its product by ``product``.

    Call it on the module that will run: a copy of it would run the original.
    """
    for part in module.modules():
        if hasattr(part, "fused_attn"):
            # timm's own products, by TIMM_FUSED_ATTN=0, would not be seen.
            part.fused_attn = True  # type: ignore[assignment]
            _compute_inside(part, _ByProduct(product))


def _compute_inside(module: nn.Module, mode: TorchFunctionMode) -> None:
    forward = module.forward

    def forward_with_mode(*args, **kwargs):
        with mode:
            return forward(*args, **kwargs)

    module.forward = forward_with_mode


class _ByProduct(TorchFunctionMode):
    """Takes ``scaled_dot_product_attention`` over from PyTorch, as far as a ViT's blocks use it."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self._product = product

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attention(self, q, k, v, attn_mask=None, dropout_p: float = 0.0, is_causal: bool = False):
        if attn_mask is not None or dropout_p or is_causal:
            raise NotImplementedError("attention has no mask and no dropout here")
        return self._product(q, k, v)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shards: BatchShards | None = None
) -> torch.Tensor:
    """Compute softmax(q k' / sqrt(width)) v in autocast's dtype: (batch, heads, tokens, width)."""
    tokens, width = q.shape[-2:]
    dtype = v.dtype
    if torch.is_autocast_enabled("xla"):
        dtype = torch.get_autocast_dtype("xla")
    pad = (0, padded_width(width) - width, 0, padded_tokens(tokens) - tokens)
    q, k, v = (F.pad(x.to(dtype), pad) if any(pad) else x.to(dtype) for x in (q, k, v))
    scale = width**-0.5
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        output = _WithGradient.apply(q, k, v, scale, tokens, shards)
    else:
        (output,) = _forward(q, k, v, scale, tokens, shards, for_backward=False)
    return output[..., :tokens, :width]


def _forward(q, k, v, scale: float, valid: int, shards: BatchShards | None, *, for_backward: bool):
    parts = [_part(x, shards) for x in (q, k, v, *_ids(q, valid))]
    kernel = forward_kernel(_shape(parts[0], valid), scale, for_backward)
    return [_whole(x, shards, len(q)) for x in kernel(parts)]


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale: float, valid: int, shards: BatchShards | None):
        output, *rows = _forward(q, k, v, scale, valid, shards, for_backward=True)
        ctx.save_for_backward(q, k, v, output, *rows)
        ctx.scale, ctx.valid, ctx.shards = scale, valid, shards
        return output

    @staticmethod
    def backward(ctx, grad):
        q, k, v, output, sums, largest = ctx.saved_tensors
        inner = (output.float() * grad.float()).sum(-1, keepdim=True).expand(sums.shape)
        arguments = (q, k, v, *_ids(q, ctx.valid), sums, largest, grad.to(q.dtype), inner)
        parts = [_part(x, ctx.shards) for x in arguments]
        shape = _shape(parts[0], ctx.valid)
        grads = [
            *query_gradient_kernel(shape, ctx.scale)(parts),
            *key_gradients_kernel(shape, ctx.scale)(parts),
        ]
        return *(_whole(x, ctx.shards, len(q)) for x in grads), None, None, None


def _part(x: torch.Tensor, shards: BatchShards | None) -> torch.Tensor:
    return shards.part(x) if shards else x


def _whole(x: torch.Tensor, shards: BatchShards | None, batch: int) -> torch.Tensor:
    return shards.whole(x, batch) if shards else x


def _shape(part: torch.Tensor, valid: int) -> Shape:
    batch, heads, tokens, width = part.shape
    return Shape(batch, heads, tokens, tokens, width, valid, part.dtype)


def _ids(q: torch.Tensor, valid: int) -> list[torch.Tensor]:
    """If tokens are padded: queries take the keys of their own number, and padding has another.

    What a padded query computes is finite, is dropped, and has no gradient.
    """
    batch, _, tokens, _ = q.shape
    if valid == tokens:
        return []
    ours = (torch.arange(tokens, device=q.device) < valid).to(torch.int32)
    return [
        torch.ones((batch, tokens, LANES), dtype=torch.int32, device=q.device),
        ours.expand(batch, SUBLANES, -1),
    ]
