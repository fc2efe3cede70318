"""Optimizers and weight averaging, whose whole update is one XLA graph that never changes.

So the learning rate, counters and the random bits for stochastic rounding are device tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch_xla.core.xla_builder as xb
from torch import nn

from models.positions import Constant
from training.optimizer_rules import ElementwiseOptimizer, allocate_state, elementwise
from training.optimizers import MOMENTUM, Update, WeightAverage, round_moments
from xla_fsdp.torch_xla_private import call_computation

_SMALLEST_LR = 1e-30
"""The learning rate that stands for 0: PyTorch's capturable AdamW divides by it, and 0/0 is NaN
where a gradient was always 0. An update of 1e-30 vanishes in fp32."""

Directions = Callable[[Sequence[nn.Parameter], Sequence[torch.Tensor]], list[torch.Tensor]]
"""A function of Muon's parameters and their momenta: the updates before the learning rate."""


def build_optimizer(
    parameters: Mapping[nn.Parameter, Sequence[Update]],
    zeros_like: Callable[[torch.Tensor], torch.Tensor],
    constant: Constant,
    *,
    betas: tuple[float, float],
    eps: float,
    decays: bool = True,
) -> torch.optim.Optimizer:
    """Return the optimizer of these parameters, with its state allocated.

    A parameter comes with the updates of the plain model's parameters that it holds: none if it
    does not train, several if it holds stacked blocks. Those that are updated alike are a group,
    Muon's first; its "lr_scale" may have an entry for each of stacked blocks.

    Counters and learning rates (``set_lr``) are on the device, by ``constant``: host numbers would
    be uploaded one by one, or compiled in. ``zeros_like`` returns zeros laid out like a parameter.
    ``decays`` off: ``step_unless`` decays the weights, by a factor that changes.
    """
    by_kind: dict[tuple, dict[str, Any]] = {}
    for parameter, updates in parameters.items():
        if not updates:
            continue
        first, scales = updates[0], tuple(update.lr_scale for update in updates)
        is_one = len(set(scales)) == 1
        shape = () if is_one else tuple(parameter.shape)
        kind = (replace(first, matrix=None), scales[:1] if is_one else scales, shape)
        if kind not in by_kind:
            scale = torch.tensor(scales[0] if is_one else scales)
            scale = scale.view((*scale.shape, *(1 for _ in shape[1:])))
            by_kind[kind] = {
                "params": [],
                "rule": first.rule,
                "decay": first.weight_decay,
                "weight_decay": first.weight_decay if decays else 0.0,
                "lr_scale": None if is_one and scales[0] == 1 else constant(scale),
                "factor": first.factor,
            }
        by_kind[kind]["params"].append(parameter)
    groups = sorted(by_kind.values(), key=lambda group: group["rule"] != "muon")
    optimizer: torch.optim.Optimizer
    if rule := next(filter(None, (elementwise(group["rule"]) for group in groups)), None):
        optimizer = ElementwiseOptimizer(groups, rule, betas=betas, eps=eps)
    else:
        optimizer = torch.optim.AdamW(groups, betas=betas, eps=eps, capturable=True, foreach=False)
    allocate_state(optimizer, zeros_like, lambda _: constant(torch.tensor(0.0)))
    return optimizer


def set_lr(
    optimizer: torch.optim.Optimizer,
    lr: float,
    constant: Constant,
    factors: Mapping[str, torch.Tensor],
) -> None:
    """Set each group's learning rate, a tensor on the device: one for each of stacked blocks.
    ``factors``: by the fields of ``StepRates`` those that change, device scalars."""
    value = constant(torch.tensor(max(lr, _SMALLEST_LR)))
    for group in optimizer.param_groups:
        group["lr"] = value
        if group["factor"] in factors:
            group["lr"] = (value * factors[group["factor"]]).clamp(min=_SMALLEST_LR)
        if group["lr_scale"] is not None:
            scaled = (group["lr"] * group["lr_scale"]).clamp(min=_SMALLEST_LR)
            # PyTorch's AdamW drops dimensions of 1, which would broadcast along others.
            group["lr"] = scaled.expand(group["params"][0].shape) if scaled.dim() else scaled


@torch.no_grad()
def step_unless(
    optimizer: torch.optim.Optimizer,
    skip: torch.Tensor,
    keys: torch.Tensor | None = None,
    directions: Directions | None = None,
    decay: torch.Tensor | None = None,
) -> None:
    """Update the parameters, or change nothing if ``skip``, a boolean device scalar, is true.

    Both are one graph. ``keys`` are for moments in bf16: an int32 number for each parameter, from
    which the random bits follow that they are rounded with. ``directions`` are for Muon. ``decay``:
    the factor of weight decay, a device scalar; None if it never changes.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = [t for p in parameters for t in optimizer.state[p].values()]
    tensors = [*parameters, *state]
    before = [tensor.detach().clone() for tensor in tensors]  # of the recording: no copy is made
    if decay is not None:  # as AdamW, Lion and Muon do it, before all else
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["decay"] else []:
                parameter.mul_(1 - group["lr"] * (group["decay"] * decay))
    groups = {
        parameter: group
        for group in optimizer.param_groups
        for parameter in (group["params"] if group["rule"] == "muon" else [])
    }
    if groups and directions is not None:
        momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in groups]
        for parameter, momentum in zip(groups, momenta, strict=True):
            momentum.lerp_(parameter.grad, 1 - MOMENTUM)
            parameter.grad = None  # so that AdamW skips it
        updates = directions([*groups], momenta)
        for (parameter, group), update in zip(groups.items(), updates, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(update * group["lr"])
    if keys is None:
        optimizer.step()
    else:  # in fp32
        moments = [optimizer.state[parameter] for parameter in parameters]
        for parameter in parameters:
            exact = {name: tensor.float() for name, tensor in optimizer.state[parameter].items()}
            optimizer.state[parameter] = exact
        optimizer.step()
        for parameter, rounded, key in zip(parameters, moments, keys.unbind(), strict=True):
            round_moments(rounded, optimizer.state[parameter], key, same_bits)
            optimizer.state[parameter] = rounded
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(skip, old, tensor))
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # a tensor of a parameter's shape would be a result, whole on each device


# ------------------------------------------------------------------------------------------------
# The moving average of the weights (EMA).


class XlaWeightAverage(WeightAverage):
    """The average by operations that torch_xla runs exactly, and without a copy or a new graph."""

    @staticmethod
    def _lerp(average: torch.Tensor, weights: torch.Tensor, share: torch.Tensor) -> None:
        # torch_xla 2.9's own lerp rounds at weight 1, where this is exactly ``weights``.
        way = weights - average
        average.copy_(torch.where(share < 0.5, average + share * way, weights - way * (1 - share)))

    @staticmethod
    def _swap(average: torch.Tensor, weights: torch.Tensor) -> None:
        weights.data, average.data = average.data, weights.data


# ------------------------------------------------------------------------------------------------
# Reads the bits of numbers on the devices as those of another dtype.
#
# torch_xla 2.9 computes ``Tensor.view(dtype)`` on the host, which has to wait for the devices.


_TYPES = {torch.float32: xb.Type.F32, torch.int32: xb.Type.S32}
_bitcasts: dict[tuple, object] = {}


def same_bits(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bits of ``x`` as numbers of another dtype of the same size."""
    kind = (tuple(x.shape), x.dtype, dtype)
    if kind not in _bitcasts:
        builder = xb.create_builder("bitcast")
        parameter = xb.mkparam(builder, 0, xb.Shape.create(_TYPES[x.dtype], kind[0]))
        _bitcasts[kind] = parameter.bitcast(_TYPES[dtype]).build("bitcast")
    (result,) = call_computation("xla::bitcast", [x], _bitcasts[kind])
    return result
