"""AdamW whose whole step, learning rate included, is one unchanging XLA graph.

Its moments may be kept in bf16: then they are rounded at random by bits that are part of the graph,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from training.stochastic_rounding import random_bits, to_bf16, upper
from xla_fsdp.bits import same_bits

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
    ``empty_like`` gives zeros laid out like a parameter, for the moments, ``scalar`` a device
    scalar.
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
def step_unless(
    optimizer: torch.optim.AdamW, skip: torch.Tensor, keys: torch.Tensor | None = None
) -> None:
    """Take the step, but where ``skip``, a boolean device scalar, holds, leave all as it was.

    Both outcomes are one graph: what is kept is chosen as it is written, and nothing else is read.
    ``keys``, where the moments are bf16: an int32 number on the device for each parameter, from
    which and the step's number the bits follow that they are rounded by.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [t for p in parameters for t in optimizer.state[p].values()]
    tensors = [*parameters, *state]
    before = [tensor.detach().clone() for tensor in tensors]  # of the recording: no copy is made
    if keys is None:
        optimizer.step()
    else:
        _step_in_fp32(optimizer, parameters, keys)
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(skip, old, tensor))


def _step_in_fp32(
    optimizer: torch.optim.AdamW, parameters: list[nn.Parameter], keys: torch.Tensor
) -> None:
    kept = [optimizer.state[parameter] for parameter in parameters]
    for parameter, state in zip(parameters, kept, strict=True):
        optimizer.state[parameter] = {name: tensor.float() for name, tensor in state.items()}
    optimizer.step()
    for parameter, state, key in zip(parameters, kept, keys.unbind(), strict=True):
        new = optimizer.state[parameter]
        bits = random_bits(parameter.shape, parameter.device, key, new["step"])
        state["exp_avg"].copy_(to_bf16(new["exp_avg"], bits, same_bits))
        state["exp_avg_sq"].copy_(to_bf16(new["exp_avg_sq"], upper(bits), same_bits))
        optimizer.state[parameter] = state
