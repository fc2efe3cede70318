"""Optimizers whose whole step, learning rate included, is one unchanging XLA graph.

AdamW's moments may be kept in bf16: then they are rounded at random by bits that are part of the
graph, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from timm.optim.lion import Lion
from torch import nn

from training.updates.newton_schulz import MOMENTUM
from training.updates.parameter_groups import MOMENTS, Update
from training.updates.stochastic_rounding import random_bits, to_bf16, upper
from xla_fsdp.bits import same_bits

_SMALLEST_LR = 1e-30
"""The learning rate that stands for 0: PyTorch's capturable AdamW divides by it, and 0/0 is NaN
where a gradient was always 0. An update of 1e-30 vanishes in fp32."""

Directions = Callable[[Sequence[nn.Parameter], Sequence[torch.Tensor]], list[torch.Tensor]]
"""Returns, of Muon's parameters and their momenta, what learning rates are multiplied by."""


def parameter_groups(
    parameters: Iterable[tuple[nn.Parameter, Sequence[Update]]],
    constant: Callable[[torch.Tensor], torch.Tensor],
) -> list[dict[str, Any]]:
    """Return PyTorch's groups of parameters that are updated alike.

    A parameter comes with the updates of those of the plain model that it holds: several of stacked
    blocks, whose "lr_scale" is then a tensor on the device, which ``constant`` puts there, with an
    entry for each; none if it does not train. "lr_scale" is None where nothing is scaled. The
    groups are in the order in which a step updates them: Muon's first.
    """
    groups: dict[tuple, dict[str, Any]] = {}
    for parameter, updates in parameters:
        if not updates:
            continue
        first, scales = updates[0], tuple(update.lr_scale for update in updates)
        is_one = len(set(scales)) == 1
        shape = () if is_one else tuple(parameter.shape)
        kind = (first.rule, first.weight_decay, scales[:1] if is_one else scales, shape)
        if kind not in groups:
            scale = torch.tensor(scales[0] if is_one else scales)
            scale = scale.view((*scale.shape, *(1 for _ in shape[1:])))
            groups[kind] = {
                "params": [],
                "rule": first.rule,
                "weight_decay": first.weight_decay,
                "lr_scale": None if is_one and scales[0] == 1 else constant(scale),
            }
        groups[kind]["params"].append(parameter)
    return sorted(groups.values(), key=lambda group: group["rule"] != "muon")


def build_optimizer(
    groups: list[dict[str, Any]],
    empty_like: Callable[[torch.Tensor], torch.Tensor],
    scalar: Callable[[float], torch.Tensor],
    directions: Directions,
    *,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.Optimizer:
    """Return the optimizer of these groups, counter and learning rate on the device, its state
    allocated.

    Host numbers in the update would be uploaded one by one, or compiled in.
    ``empty_like`` gives zeros laid out like a parameter, for the moments, ``scalar`` a device
    scalar; ``directions`` is for Muon.
    """
    optimizer: torch.optim.Optimizer
    rules = {group["rule"] for group in groups}
    if "lion" in rules:
        optimizer = Lion(groups, betas=betas, foreach=False)
    elif "muon" in rules:
        optimizer = MuonAndAdamW(groups, directions, betas=betas, eps=eps)
    else:
        optimizer = torch.optim.AdamW(groups, betas=betas, eps=eps, capturable=True, foreach=False)
    set_lr(optimizer, 0.0, scalar)  # only now: the constructor would read a tensor back
    for group in optimizer.param_groups:
        rule = group["rule"]
        for parameter in group["params"]:
            step = {"step": scalar(0.0)} if rule == "adamw" else {}
            moments = {name: empty_like(parameter) for name in MOMENTS[rule]}
            optimizer.state[parameter] = step | moments
    return optimizer


class MuonAndAdamW(torch.optim.AdamW):
    """PyTorch's AdamW, but with Muon's step for the groups whose "rule" is "muon"."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        directions: Directions,
        *,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, betas=betas, eps=eps, capturable=True, foreach=False)
        self._directions = directions

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters; the gradients of Muon's are gone afterwards."""
        chosen = [
            (parameter, group)
            for group in self.param_groups
            for parameter in group["params"]
            if group["rule"] == "muon"
        ]
        if chosen:
            self._step_muon(chosen)
        super().step()

    def _step_muon(self, chosen: Sequence[tuple[nn.Parameter, Mapping[str, Any]]]) -> None:
        momenta = [self.state[parameter]["momentum_buffer"] for parameter, _ in chosen]
        for (parameter, _), momentum in zip(chosen, momenta, strict=True):
            assert parameter.grad is not None
            momentum.lerp_(parameter.grad, 1 - MOMENTUM)
            parameter.grad = None  # AdamW passes it over
        found = self._directions([parameter for parameter, _ in chosen], momenta)
        for (parameter, group), direction in zip(chosen, found, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(direction * group["lr"])


def set_lr(
    optimizer: torch.optim.Optimizer, lr: float, scalar: Callable[[float], torch.Tensor]
) -> None:
    """Give each group its learning rate, a tensor on the device: of stacked blocks one for each."""
    value = scalar(max(lr, _SMALLEST_LR))
    for group in optimizer.param_groups:
        group["lr"] = value
        if group["lr_scale"] is not None:
            scaled = (value * group["lr_scale"]).clamp(min=_SMALLEST_LR)
            # PyTorch's AdamW drops dimensions of 1, which would broadcast along others.
            group["lr"] = scaled.expand(group["params"][0].shape) if scaled.dim() else scaled


@torch.no_grad()
def step_unless(
    optimizer: torch.optim.Optimizer, skip: torch.Tensor, keys: torch.Tensor | None = None
) -> None:
    """Take the step, but where ``skip``, a boolean device scalar, holds, leave all as it was.

    Both outcomes are one graph: what is kept is chosen as it is written, and nothing else is read.
    ``keys``, where AdamW's moments are bf16: an int32 number on the device for each parameter, from
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
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], keys: torch.Tensor
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
