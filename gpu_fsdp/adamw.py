"""AdamW in plain operations: where PyTorch has no fused one, and where moments are bf16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from training.updates.stochastic_rounding import random_bits, to_bf16, upper


@torch.no_grad()
def step_unless(
    optimizer: torch.optim.Optimizer,
    skipped: torch.Tensor,
    keys: Mapping[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Take the optimizer's step, unless ``skipped``, a scalar on the device, is 1.0 and not 0.0.

    Computes what PyTorch's fused AdamW does with its ``found_inf``: nothing is read by the host,
    and where the step is skipped, weights, moments and the step counter keep all their bits. The
    state of each parameter must have been allocated. Where its moments are bf16, they are rounded
    at random by bits that follow from ``keys`` and the step's number.
    """
    takes = 1 - skipped
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                # What is not finite would survive the weight of 0 that a skipped step gives it.
                grad = torch.where(skipped > 0, 0.0, parameter.grad)
                state = optimizer.state[parameter]
                if keys is None:
                    _step(parameter, grad, state, group, takes)
                    continue
                # Of one parameter at a time: in fp32 there is no room for the moments of all.
                new = {name: tensor.float() for name, tensor in state.items()}
                _step(parameter, grad, new, group, takes)
                _round(new, state, keys[parameter])


def _step(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, torch.Tensor],
    group: dict[str, Any],
    takes: torch.Tensor,
) -> None:
    first, second = group["betas"]
    step, mean, square = state["step"], state["exp_avg"], state["exp_avg_sq"]
    step.add_(takes)
    mean.lerp_(grad, (1 - first) * takes)
    square.lerp_(grad.square(), (1 - second) * takes)
    parameter.mul_(1 - group["lr"] * group["weight_decay"] * takes)
    count = step.clamp(min=1)  # before the first step that is taken, 1 - beta ** 0 would divide
    scale = (square / (1 - second**count)).sqrt() + group["eps"]
    parameter.sub_(mean / scale * (group["lr"] * takes / (1 - first**count)))


def _round(new: dict[str, torch.Tensor], state: dict[str, torch.Tensor], key: torch.Tensor) -> None:
    """Write the moments of a step into ``state``; those of a skipped one are bf16 numbers."""
    mean = new["exp_avg"]
    bits = random_bits(mean.shape, mean.device, key, new["step"])
    state["exp_avg"].copy_(to_bf16(mean, bits))
    state["exp_avg_sq"].copy_(to_bf16(new["exp_avg_sq"], upper(bits)))
