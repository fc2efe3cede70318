"""The values a fresh model begins with, made on the CPU one unit at a time."""

from __future__ import annotations

import copy

import torch
from torch import nn

from training.backend import InitializeModule


class InitialValues:
    """The values that ``initialize`` gives each parameter, by its name in the plain model.

    It serves forms of FSDP that ask for single modules or shards, in an order of their own. It
    holds the values of one unit: asking unit by unit computes each of them once.
    """

    def __init__(
        self, model: nn.Module, units: list[tuple[str, nn.Module]], initialize: InitializeModule
    ) -> None:
        """Remember the structure of ``model``, which must still be on the meta device."""
        self._initialize = initialize
        root = copy.deepcopy(model)
        self._units = {}
        for name, unit in units:
            if unit is not model:
                self._units[name] = copy.deepcopy(unit)
                root.set_submodule(name, nn.Identity())
        self._units[""] = root
        self._current = ""
        self._values: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        unit = max((u for u in self._units if f"{name}.".startswith(f"{u}.")), key=len, default="")
        if unit != self._current or not self._values:
            module = copy.deepcopy(self._units[unit])
            self._initialize(module, unit)
            self._current = unit
            self._values = {
                f"{unit}.{inner}" if unit else inner: parameter.detach()
                for inner, parameter in module.named_parameters()
            }
        return self._values[name]
