"""Ring attention: keys and values go from process to process while each one's queries stay.

A process holds its own keys and values and those of one other, whatever the size of the image
(Liu, Zaharia, Abbeel, arXiv 2310.01889). What comes next is on its way while attention to what is
here is computed.
"""

from __future__ import annotations

import torch

from gpu_fsdp.domain import products
from gpu_fsdp.domain.group import DomainGroup


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: int, scale: float, group: DomainGroup
) -> torch.Tensor:
    """Compute attention of the queries that are here to the keys of all processes of ``group``.

    Each tensor is (batch, heads, tokens, width); the first ``prefix`` keys are those of class and
    register tokens, the same in all processes: each uses its own.
    """
    width = v.shape[-1]
    pad = products.padded(max(q.shape[-1], width), v)
    if pad > q.shape[-1] == width:
        q, k, v = (torch.nn.functional.pad(x, (0, pad - x.shape[-1])) for x in (q, k, v))
    return _Ring.apply(q, k, v, prefix, scale, group)[..., :width]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, prefix: int, scale: float, group: DomainGroup):
        here, output, statistics = _joined(k, v, prefix), None, None
        for step in range(group.size):
            coming = _pass_on(here, step, group)
            keys, values = (k, v) if step == 0 else _apart(here, k)
            found, total = products.forward(q, keys, values, scale)
            found = found.float()
            if output is None or statistics is None:
                output, statistics = found, total
            else:
                together = torch.logaddexp(statistics, total)
                output = output * (statistics - together).exp()[..., None]
                output += found * (total - together).exp()[..., None]
                statistics = together
            if coming is not None:
                here = coming()
        assert output is not None
        output = output.to(v.dtype)
        ctx.save_for_backward(q, k, v, output, statistics)
        ctx.prefix, ctx.scale, ctx.group = prefix, scale, group
        return output

    @staticmethod
    def backward(ctx, grad):
        q, k, v, output, statistics = ctx.saved_tensors
        group, prefix = ctx.group, ctx.prefix
        grad, here = grad.contiguous(), _joined(k, v, prefix)
        grad_q, so_far = torch.zeros_like(q, dtype=torch.float32), None
        of_prefix: tuple[torch.Tensor, torch.Tensor] = (k[:, :, :0], v[:, :, :0])
        for step in range(group.size):
            coming = _pass_on(here, step, group)
            keys, values = (k, v) if step == 0 else _apart(here, k)
            own_q, own_k, own_v = products.backward(
                grad, q, keys, values, output, statistics, ctx.scale
            )
            grad_q += own_q
            if step == 0:
                of_prefix = own_k[:, :, :prefix], own_v[:, :, :prefix]
            own = _joined(own_k, own_v, prefix if step == 0 else 0).float()
            if so_far is not None:  # what the processes before have found for these keys
                own += so_far()
            # One step behind the keys that it is for: with the last, it comes home.
            so_far = group.pass_on(own, _shape_after(own, step + 1, group))
            if coming is not None:
                here = coming()
        assert so_far is not None
        grad_k, grad_v = _apart(so_far(), k)
        grad_k = torch.cat([of_prefix[0], grad_k.to(k.dtype)], dim=2)
        grad_v = torch.cat([of_prefix[1], grad_v.to(v.dtype)], dim=2)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None


def _joined(k: torch.Tensor, v: torch.Tensor, prefix: int) -> torch.Tensor:
    """Return keys and values of the patches in one tensor, to be passed on together."""
    return torch.cat([k[:, :, prefix:], v[:, :, prefix:]], dim=-1)


def _apart(joined: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = k.shape[-1]
    return joined[..., :width].contiguous(), joined[..., width:].contiguous()


def _pass_on(here: torch.Tensor, step: int, group: DomainGroup):
    """Begin to pass keys and values on, if this is not the last step."""
    if step + 1 == group.size:
        return None
    return group.pass_on(here, _shape_after(here, step + 1, group))


def _shape_after(x: torch.Tensor, steps: int, group: DomainGroup) -> tuple[int, ...]:
    """Return the shape of what comes in the place of ``x`` from that many processes before."""
    batch, heads, _, width = x.shape
    return batch, heads, group.patches_after(steps), width
