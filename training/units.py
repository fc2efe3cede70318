"""The units in which a model is sharded, and how much of each is on a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.backend import Backend
    from training.resolve import Run


@dataclass(frozen=True)
class Units:
    """Consecutive units that are alike, such as the blocks of a model."""

    first: str
    """The name of the first one; "" for the unit of everything around the blocks."""
    last: str
    count: int
    parameters: int
    """Of each."""
    on_device: int
    """Parameters of each that the first device stores between steps, with padding."""
    grad_ckpt: str
    """What is recomputed in the backward pass, as ``--grad_ckpt``."""

    def __str__(self) -> str:
        name, each = self.first or "around the blocks", ""
        if self.count > 1:
            name, each = f"{self.first} to {self.last}", " each"
        return (
            f"{name}: {self.parameters:,} parameters{each}, {self.on_device:,} on each device, "
            f"activation checkpointing {self.grad_ckpt}"
        )


def units_of(run: Run, backend: Backend) -> list[Units]:
    """Return the units of the sharded model in order, those that are alike as one."""
    names = [name for name, _ in run.model.units(run.model.meta)]

    def unit_of(parameter: str) -> str:
        return next((name for name in names[:-1] if parameter.startswith(f"{name}.")), names[-1])

    unit = {name: unit_of(name) for name, _ in run.model.meta.named_parameters()}
    parameters, on_device = defaultdict[str, int](int), defaultdict[str, float](float)
    for name, parameter in run.model.meta.named_parameters():
        parameters[unit[name]] += parameter.numel()
    for plain_names, size in backend.local_parameters():
        for name in plain_names:  # of one unit, or the same parameter of units that are alike
            on_device[unit[name]] += size / len(plain_names)

    def facts(name: str) -> tuple[str, int, int, str]:
        grad_ckpt = run.config.sharding.grad_ckpt if name else "none"
        return name.rpartition(".")[0], parameters[name], round(on_device[name]), grad_ckpt

    def alike() -> Iterator[Units]:
        for (_, size, held, grad_ckpt), group in groupby(names, facts):
            first, *others = group
            last = others[-1] if others else first
            yield Units(first, last, 1 + len(others), size, held, grad_ckpt)

    return list(alike())
