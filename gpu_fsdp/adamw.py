"""AdamW in plain operations, for devices that PyTorch has no fused AdamW for."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def step_unless(optimizer: torch.optim.AdamW, skipped: torch.Tensor) -> None:
    """Take the optimizer's step, unless ``skipped``, a scalar on the device, is 1.0 and not 0.0.

    Computes what PyTorch's fused AdamW does with its ``found_inf``: nothing is read by the host,
    and where the step is skipped, weights, moments and the step counter keep all their bits. The
    state of each parameter must have been allocated.
    """
    takes = 1 - skipped
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                # What is not finite would survive the weight of 0 that a skipped step gives it.
                grad = torch.where(skipped > 0, 0.0, parameter.grad)
                _step(parameter, grad, optimizer.state[parameter], group, takes)


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
