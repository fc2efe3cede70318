"""Puts another function in the place of PyTorch's attention product, from outside of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A function of queries, keys and values that computes what attention does with them."""


def attentions(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of timm's in ``module``, it among them, that compute attention."""
    return (part for part in module.modules() if hasattr(part, "fused_attn"))


def use_product(attention: nn.Module, product: Product) -> None:
    """Let one module of timm's attention compute its product by ``product``.

    Call it on the module that will run: a copy of it would run the original.
    """
    # timm's own products, by TIMM_FUSED_ATTN=0, would not be seen.
    attention.fused_attn = True  # type: ignore[assignment]
    forward, mode = attention.forward, _ByProduct(product)

    def forward_with_mode(*args, **kwargs):
        with mode:
            return forward(*args, **kwargs)

    attention.forward = forward_with_mode


class _ByProduct(TorchFunctionMode):
    """Takes ``scaled_dot_product_attention`` over from PyTorch, as far as a ViT uses it."""

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
