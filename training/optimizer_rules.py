"""The rules by which parameters are updated (``--optimizer``), as backends need them: the state of
each, and those that update each entry of a parameter by its own gradient and state, Lion and the
optimizers of extensions. By these, backends update their shards and exchange nothing.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar

import torch
from timm.optim.lion import lion
from torch import Tensor

from training.feature_table import features


class Elementwise(abc.ABC):
    """How an optimizer updates a shard of a parameter."""

    moments: ClassVar[tuple[str, ...]] = ()
    """Names of its state tensors: fp32, with the shape of the shard, initially zeros. They are part
    of checkpoints."""
    counts_steps: ClassVar[bool] = False
    """Whether its state also has "step", the number of updates with the current one, a float scalar
    on the device."""

    @abc.abstractmethod
    def update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        *,
        lr: float | Tensor,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Update ``parameter`` and its ``state`` in place. The backend undoes it in steps that are
        not finite. ``lr``: a number, or a tensor that broadcasts to the parameter. On XLA all of it
        is part of one graph, so no value may reach Python."""


class Lion(Elementwise):
    """Lion (arXiv 2302.06675), as timm computes it."""

    moments = ("exp_avg",)

    def update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        *,
        lr: float | Tensor,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        lion(
            [parameter],
            [gradient],
            [state["exp_avg"]],
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            caution=False,
            foreach=False,
        )


def elementwise(name: str) -> Elementwise | None:
    """Return the optimizer with this name in ``--optimizer``; None for AdamW and Muon."""
    if name == "lion":
        return Lion()
    for feature in features():
        if name in feature.optimizers:
            module, _, of_class = feature.optimizers[name].partition(":")
            return getattr(import_module(module), of_class)()
    return None


class ElementwiseOptimizer(torch.optim.Optimizer):
    """``rule`` as an optimizer of PyTorch, whose state is allocated before the first step."""

    def __init__(
        self, groups: Any, rule: Elementwise, *, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps})
        self._rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter, self.state[parameter], group)

    def update(
        self,
        parameter: Tensor,
        values: Tensor,
        state: Mapping[str, Tensor],
        group: Mapping[str, Any],
    ) -> None:
        """Update ``values`` and ``state`` by the gradient of ``parameter`` and the settings of its
        ``group``."""
        if self._rule.counts_steps:
            state["step"].add_(1)
        assert parameter.grad is not None
        settings = {name: group[name] for name in ("lr", "weight_decay", "betas", "eps")}
        self._rule.update(values, parameter.grad, state, **settings)


_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}


def moments_of(rule: str) -> tuple[str, ...]:
    """Return the names of the state tensors of a rule that have the shape of the parameter, as in
    PyTorch's and timm's optimizers and in checkpoints."""
    added = elementwise(rule)
    return added.moments if added else _MOMENTS[rule]


def allocate_state(
    optimizer: torch.optim.Optimizer,
    zeros_like: Callable[[Tensor], Tensor],
    scalar: Callable[[Tensor], Tensor],
) -> None:
    """Allocate zeros as the state of each parameter of an optimizer, according to the "rule" of its
    group. ``zeros_like`` and ``scalar`` return moments and a counter for a parameter."""
    for group in optimizer.param_groups:
        rule, added = group["rule"], elementwise(group["rule"])
        counts, names = added.counts_steps if added else rule == "adamw", moments_of(rule)
        for parameter in group["params"]:
            counter = {"step": scalar(parameter)} if counts else {}
            moments = {name: zeros_like(parameter) for name in names}
            optimizer.state[parameter] = counter | moments
