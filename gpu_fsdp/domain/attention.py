"""Lets the attention of a model see the tokens of all processes that share an image."""

from __future__ import annotations

import functools

import torch
from torch import nn

from gpu_fsdp.domain.group import DomainGroup
from gpu_fsdp.domain.ring import ring_attention
from gpu_fsdp.domain.ulysses import ulysses_attention
from models.attention_product import attentions, use_product
from models.timm_private import has_own_queries


def see_all_tokens(model: nn.Module, form: str, group: DomainGroup) -> None:
    """Let every attention in ``model``, which is given a part of the tokens, see all of them.

    ``form`` is "ring" or "ulysses".
    """
    for part in attentions(model):
        use_product(part, functools.partial(_over_processes, form, group, has_own_queries(part)))
        # torch.compile knows neither the exchange between processes nor the mode around it.
        part.forward = torch.compiler.disable(part.forward)


def _over_processes(form: str, group: DomainGroup, own_queries: bool, q, k, v) -> torch.Tensor:
    scale, before = q.shape[-1] ** -0.5, k.shape[2] - group.patches[group.index]
    first = q.shape[2] if own_queries else before
    q, k = q.to(v.dtype), k.to(v.dtype)
    if form == "ring":
        return ring_attention(q, k, v, before, scale, group)
    return ulysses_attention(q, k, v, (first, before), scale, group)
