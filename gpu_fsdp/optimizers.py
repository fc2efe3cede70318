"""The optimizer on each process's own parts of the parameters, and Lion's step there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from timm.optim.lion import Lion, lion
from torch import nn

from training.updates.parameter_groups import MOMENTS, Update, Updates


def build_optimizer(
    parts: Mapping[str, nn.Parameter],
    updates: Updates,
    *,
    betas: tuple[float, float],
    eps: float,
    fused: bool,
    dtype: torch.dtype | None,
) -> torch.optim.Optimizer:
    """Return the optimizer of the parts, by plain names, that ``updates`` has, its state allocated.

    ``dtype`` is that of the moments; None: the parameters'. Parts are in groups of those that are
    updated alike, with "rule" and "lr_scale"; Muon's are in AdamW, whose step is not for them.
    """
    groups: dict[Update, dict[str, Any]] = {}
    for name, part in parts.items():
        if name in updates:
            update = updates[name]
            alike = Update(update.rule, update.weight_decay, update.lr_scale)
            groups.setdefault(alike, {"params": [], **asdict(alike)})["params"].append(part)
    optimizer: torch.optim.Optimizer
    if any(update.rule == "lion" for update in groups):
        optimizer = Lion(list(groups.values()), betas=betas)
    else:
        optimizer = torch.optim.AdamW(list(groups.values()), betas=betas, eps=eps, fused=fused)
    for group in optimizer.param_groups:
        for part in group["params"]:
            counter = {"step": torch.zeros((), device=part.device)}
            optimizer.state[part] = (counter if group["rule"] == "adamw" else {}) | {
                name: torch.zeros_like(part, dtype=dtype, requires_grad=False)
                for name in MOMENTS[group["rule"]]
            }
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give each group its learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


@torch.no_grad()
def step_lion_unless(optimizer: torch.optim.Optimizer, skipped: torch.Tensor) -> None:
    """Take Lion's step, unless ``skipped``, a scalar, is 1.0: then all keeps its bits."""
    for group in optimizer.param_groups:
        for part in group["params"]:
            old = part.detach(), optimizer.state[part]["exp_avg"]
            new = old[0].clone(), old[1].clone()
            first, second = group["betas"]
            lion(
                [new[0]],
                [part.grad],
                [new[1]],
                beta1=first,
                beta2=second,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                caution=False,
                foreach=False,
            )
            keep_unless(skipped.to(part.device) > 0, old[0], new[0])
            keep_unless(skipped.to(part.device) > 0, old[1], new[1])


def keep_unless(skips: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> None:
    """Write ``new`` into ``old``, unless ``skips``, a boolean scalar on the device."""
    old.copy_(torch.where(skips, old, new))
