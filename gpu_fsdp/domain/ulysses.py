"""Attention by exchanging tokens for heads: each process takes some heads of all tokens.

Two exchanges a call in the place of a ring's many, and PyTorch's attention as it is on whole
sequences (DeepSpeed Ulysses, arXiv 2309.14509). The processes must divide the heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu_fsdp.domain.group import DomainGroup


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix: tuple[int, int],
    scale: float,
    group: DomainGroup,
) -> torch.Tensor:
    """Compute attention of the queries that are here to the keys of all processes of ``group``.

    Each tensor is (batch, heads, tokens, width). ``prefix``: how many of the queries, and of the
    keys, come first that are the same in all processes.
    """
    first, before = prefix
    each = k.shape[1] // group.size
    mine = slice(group.index * each, (group.index + 1) * each)
    widths = [q.shape[-1], k.shape[-1], v.shape[-1]]
    patches = [k[:, :, before:], v[:, :, before:]]
    if first < q.shape[2]:
        patches.insert(0, q[:, :, first:])
    else:
        del widths[0]  # there are learned queries only
    whole = _heads_of_all(torch.cat(patches, dim=-1), each, group).split(widths, dim=-1)
    *queries, keys, values = whole
    keys = torch.cat([k[:, mine, :before], keys], dim=2)
    values = torch.cat([v[:, mine, :before], values], dim=2)
    asked = torch.cat([q[:, mine, :first], *queries], dim=2)
    found = F.scaled_dot_product_attention(asked, keys, values, scale=scale)
    output = []
    if first:
        part = found[:, :, :first]
        parts = group.exchange([part] * group.size, [part.shape] * group.size)
        output.append(torch.cat(parts, dim=1))
    if queries:
        output.append(_tokens_of_this(found[:, :, first:], group))
    return torch.cat(output, dim=2)


def _heads_of_all(x: torch.Tensor, each: int, group: DomainGroup) -> torch.Tensor:
    """Make of all heads of the tokens here, (batch, heads, tokens, width), some of all tokens."""
    batch, _, _, width = x.shape
    shapes = [(batch, each, count, width) for count in group.patches]
    return torch.cat(group.exchange(x.split(each, dim=1), shapes), dim=2)


def _tokens_of_this(x: torch.Tensor, group: DomainGroup) -> torch.Tensor:
    """Do the inverse of ``_heads_of_all``."""
    batch, each, _, width = x.shape
    shape = (batch, each, group.patches[group.index], width)
    parts = group.exchange(x.split(group.patches, dim=2), [shape] * group.size)
    return torch.cat(parts, dim=1)
