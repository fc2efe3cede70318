"""Copies the state on the devices to the host, and knows the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from training.backend import State
from training.updates.ema import UPDATES
from xla_fsdp.ema import WeightAverage

ToHost = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
"""A function that copies a tensor laid out as the parameter of this name, by plain names."""


@dataclass(frozen=True)
class Origin:
    """A tensor on the devices, and what was copied of it to the host."""

    name: str
    """The name on the devices of the parameter that it is, or that it is the state or EMA of."""
    tensor: torch.Tensor
    values: list[torch.Tensor]


@dataclass(frozen=True)
class HostState(State):
    """A state as it was copied to the host, which knows the way back."""

    is_copy = True
    origins: list[Origin] = field(default_factory=list)


def copy_to_host(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    average: WeightAverage | None,
    to_host: ToHost,
) -> HostState:
    """Copy parameters by their names, what ``optimizer`` keeps of them, and their average."""
    found: dict[str, torch.Tensor] = {}
    entries: dict[str, dict[str, torch.Tensor]] = {}
    origins: list[Origin] = []

    def copied(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        views = to_host(key, tensor)
        origins.append(Origin(key, tensor, list(views.values())))
        return views

    for key, parameter in parameters.items():
        views = copied(key, parameter.detach())
        found.update(views)
        kept = optimizer.state.get(parameter, {}) if optimizer else {}
        for entry, tensor in kept.items():
            if entry == "step":
                step = tensor.cpu()
                origins.append(Origin(key, tensor, [step] * len(views)))
                of_entry: dict[str, torch.Tensor] = dict.fromkeys(views, step)
            else:
                of_entry = copied(key, tensor)
            for name, view in of_entry.items():
                entries.setdefault(name, {})[entry] = view
    if optimizer is None:
        return HostState(found, None, {}, None, origins)
    if average is None:
        return HostState(found, entries, {}, None, origins)
    ema: dict[str, torch.Tensor] = {}
    for key, value in average.values.items():
        ema.update(copied(key, value))
    updates = average.updates.cpu()
    origins.append(Origin(UPDATES, average.updates, [updates]))
    return HostState(found, entries, {UPDATES: updates}, ema, origins)
