"""Lets the attention of a model see the tokens of all processes that share an image."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from gpu_fsdp.domain.group import DomainGroup
from gpu_fsdp.domain.ring import ring_attention
from gpu_fsdp.domain.ulysses import ulysses_attention
from models.timm_private import has_own_queries


def see_all_tokens(model: nn.Module, form: str, group: DomainGroup) -> None:
    """Let every attention in ``model``, which is given a part of the tokens, see all of them.

    ``form`` is "ring" or "ulysses". Modules with an attribute ``fused_attn`` are timm's attention;
    they are changed themselves: a copy of one would run the original.
    """
    for part in model.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = True  # type: ignore[assignment] # its own products would not be seen
            mode = _OverProcesses(form, group, has_own_queries(part))
            part.forward = functools.partial(_forward_inside, mode, part.forward)


@torch.compiler.disable  # torch.compile knows neither the exchange between processes nor the mode
def _forward_inside(mode: _OverProcesses, forward: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    with mode:
        return forward(*args, **kwargs)


class _OverProcesses(TorchFunctionMode):
    """Takes ``scaled_dot_product_attention`` over from PyTorch, as far as a ViT uses it."""

    def __init__(self, form: str, group: DomainGroup, own_queries: bool) -> None:
        super().__init__()
        self._form, self._group, self._own_queries = form, group, own_queries

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attention(*args, **(kwargs or {}))

    def _attention(
        self, q, k, v, attn_mask=None, dropout_p: float = 0.0, is_causal: bool = False, scale=None
    ):
        if attn_mask is not None or dropout_p or is_causal:
            raise NotImplementedError("attention over processes has no mask and no dropout")
        scale = scale or q.shape[-1] ** -0.5
        before = k.shape[2] - self._group.patches[self._group.index]
        first = q.shape[2] if self._own_queries else before
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self._form == "ring":
            return ring_attention(q, k, v, before, scale, self._group)
        return ulysses_attention(q, k, v, (first, before), scale, self._group)
