"""AdamW whose whole step, learning rate included, is one unchanging XLA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

_SMALLEST_LR = 1e-30
"""The learning rate that stands for 0: PyTorch's capturable AdamW divides by it, and 0/0 is NaN
where a gradient was always 0. An update of 1e-30 vanishes in fp32."""


def build_adamw(
    parameters: Iterable[nn.Parameter],
    empty_like: Callable[[torch.Tensor], torch.Tensor],
    scalar: Callable[[float], torch.Tensor],
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.AdamW:
    """Return AdamW with step counter and learning rate on the device, its state allocated.

    Host numbers in the update would be uploaded one by one, or compiled in.
    ``empty_like`` gives zeros laid out like a parameter, ``scalar`` a device scalar.
    """
    optimizer = torch.optim.AdamW(
        list(parameters),
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        capturable=True,
        foreach=False,
    )
    set_lr(optimizer, 0.0, scalar)  # only now: the constructor would read a tensor back
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": scalar(0.0),
                "exp_avg": empty_like(parameter),
                "exp_avg_sq": empty_like(parameter),
            }
    return optimizer


def set_lr(
    optimizer: torch.optim.AdamW, lr: float, scalar: Callable[[float], torch.Tensor]
) -> None:
    value = scalar(max(lr, _SMALLEST_LR))
    for group in optimizer.param_groups:
        group["lr"] = value


@torch.no_grad()
def step_unless(optimizer: torch.optim.AdamW, skip: torch.Tensor) -> None:
    """Take the step, but where ``skip``, a boolean device scalar, holds, leave all as it was.

    Both outcomes are one graph: what is kept is chosen as it is written, and nothing else is read.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [t for p in parameters for t in optimizer.state[p].values()]
    tensors = [*parameters, *state]
    before = [tensor.detach().clone() for tensor in tensors]  # of the recording: no copy is made
    optimizer.step()
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(skip, old, tensor))
