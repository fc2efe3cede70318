"""Optimizers for a process's parts of the parameters (AdamW, Lion, Muon), and the fp16 loss scale.

Each takes ``skipped``, a device scalar of 1.0 or 0.0. If it is 1.0, weights, moments and counters
do not change. The host never reads it.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_fsdp.orthogonalize import Matrix, Orthogonalize
from training.config import RunConfig
from training.optimizer_rules import ElementwiseOptimizer, allocate_state, elementwise
from training.optimizers import (
    MOMENTUM,
    Update,
    Updates,
    key_of,
    lr_factor,
    ns_dtype,
    round_moments,
)
from training.schedule import StepRates

Orthogonalizer = Callable[[Mapping[str, Matrix]], Orthogonalize]
"""Returns what orthogonalizes these matrices, by names in the plain model, in their order."""


class PartsOptimizer:
    """Updates this process's parts of the trained parameters, each by its rule."""

    def __init__(
        self,
        parts: Mapping[str, nn.Parameter],
        views: Callable[[str], Tensor],
        updates: Updates,
        config: RunConfig,
        *,
        eps: float,
        betas: tuple[float, float],
        fused: bool,
        orthogonalizer: Orthogonalizer,
        units: Collection[str] = (),
        compiler: str | None = None,
    ) -> None:
        """Allocate the state.

        Parts and updates are by names in the plain model. ``views`` returns a part as one of the
        global tensor. ``fused``: PyTorch has a fused AdamW for the device. ``compiler``:
        torch.compile's backend for AdamW's plain operations, by the names of ``units`` (blocks);
        None: eager.
        """
        rounds = config.optimizer.optimizer_dtype == "bf16"
        # A group holds what is updated alike. Muon's parameters are in AdamW's groups, too.
        groups: dict[Update, dict[str, Any]] = {}
        for name, part in parts.items():
            if update := updates.get(name):
                alike = replace(update, matrix=None)
                groups.setdefault(alike, {"params": [], **asdict(alike)})["params"].append(part)
        rules = {update.rule for update in groups}
        rule = next(filter(None, map(elementwise, rules)), None)
        self._fused = fused and not rounds
        self._optimizer: Any
        if rule:
            self._optimizer = ElementwiseOptimizer(
                list(groups.values()), rule, betas=betas, eps=eps
            )
        else:
            self._optimizer = torch.optim.AdamW(
                list(groups.values()), betas=betas, eps=eps, fused=self._fused
            )
        self._decays = [group["weight_decay"] for group in self._optimizer.param_groups]
        dtype = torch.bfloat16 if rounds else None  # else the parameters'
        zeros_like = functools.partial(torch.zeros_like, dtype=dtype, requires_grad=False)
        allocate_state(
            self._optimizer, zeros_like, lambda part: torch.zeros((), device=part.device)
        )
        self.state: Mapping[Tensor, dict[str, Tensor]] = self._optimizer.state
        self._keys: dict[Tensor, Tensor] = {}
        if rounds:
            # The same for the same part in all replicas, which would diverge otherwise.
            for name, part in parts.items():
                offsets = [chunk.offsets for chunk in getattr(views(name), "chunks", ())]
                key = torch.tensor(key_of(config.seed, name, *offsets), dtype=torch.int32)
                self._keys[part] = key.to(part.device)
        self._compiles, self._adamw = compiler is not None, adamw
        if compiler:
            self._adamw = torch.compile(adamw, backend=compiler, fullgraph=True, dynamic=False)
        self._units: dict[Tensor, str] = {
            part: next((unit for unit in units if name.startswith(f"{unit}.")), "")
            for name, part in parts.items()
        }
        self._muon: Muon | None = None
        if "muon" in rules:
            dtype = ns_dtype(config.sharding.precision)
            self._muon = Muon(self._optimizer, parts, updates, orthogonalizer, dtype)

    @torch.no_grad()
    def step_unless(self, rates: StepRates, skipped: Tensor) -> None:
        """Update the parts by their gradients, unless ``skipped``."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        for group, weight_decay in zip(groups, self._decays, strict=True):
            group["lr"] = rates.lr * group["lr_scale"]
            group["lr"] *= getattr(rates, group["factor"]) if group["factor"] else 1
            group["weight_decay"] = weight_decay * rates.weight_decay
        if isinstance(self._optimizer, ElementwiseOptimizer):
            for group in groups:
                for part in group["params"]:
                    update_unless(self._optimizer, part, group, skipped)
            return
        if self._muon is not None:
            self._muon.step_unless(skipped)
        if self._fused:
            # Fused AdamW looks at it where its parameters are. With --cpu_offload that is the host:
            # it must be there now, AdamW's own copying would not wait.
            self._optimizer.found_inf = skipped.to(groups[0]["params"][0].device)
            self._optimizer.step()
            return
        if self._compiles:  # a number would be a constant of what is compiled
            numbers = [group[name] for group in groups for name in ("lr", "weight_decay")]
            on_device = torch.tensor(numbers).to(skipped.device, non_blocking=True).unbind()
            for index, group in enumerate(groups):
                group["lr"], group["weight_decay"] = on_device[2 * index : 2 * index + 2]
        # The parameters of one unit at a time: compiled for one block, the update serves all.
        for group in groups:
            updated = [part for part in group["params"] if part.grad is not None]
            for _, unit in itertools.groupby(updated, self._units.get):
                parts = list(unit)
                self._adamw(
                    [part.detach() for part in parts],
                    [part.grad for part in parts],
                    [state[part] for part in parts],
                    [self._keys.get(part) for part in parts],
                    skipped,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    betas=group["betas"],
                    eps=group["eps"],
                )


# -- AdamW in plain operations: where PyTorch has no fused one, or moments are bf16 ----------------


def adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    keys: Sequence[Tensor | None],
    skipped: Tensor,
    *,
    lr: float | Tensor,
    weight_decay: float | Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Take AdamW's step in place, unless ``skipped``: as PyTorch's fused one with ``found_inf``.

    ``keys``: where moments are bf16, they are rounded stochastically by bits that follow from the
    parameter's key and the step's number; None where they are not.
    """
    takes, (first, second) = 1 - skipped, betas
    for parameter, gradient, state, key in zip(parameters, gradients, states, keys, strict=True):
        # One parameter at a time: there is no room for the fp32 moments of all.
        exact = state if key is None else {name: t.float() for name, t in state.items()}
        step, mean, square = exact["step"], exact["exp_avg"], exact["exp_avg_sq"]
        # What is not finite would survive the weight of 0 that a skipped step gives it.
        gradient = torch.where(skipped > 0, 0.0, gradient)
        step.add_(takes)
        mean.lerp_(gradient, (1 - first) * takes)
        square.lerp_(gradient.square(), (1 - second) * takes)
        parameter.mul_(1 - lr * weight_decay * takes)
        count = step.clamp(min=1)  # before the first step taken, 1 - beta ** 0 would divide
        scale = (square / (1 - second**count)).sqrt() + eps
        parameter.sub_(mean / scale * (lr * takes / (1 - first**count)))
        if key is not None:
            round_moments(state, exact, key)


# -- Lion, and the optimizers of extensions --------------------------------------------------------


def update_unless(
    optimizer: ElementwiseOptimizer,
    part: nn.Parameter,
    group: Mapping[str, Any],
    skipped: Tensor,
) -> None:
    """Take the step of one parameter of the ``group``, unless ``skipped``."""
    weights, state = part.detach(), optimizer.state[part]
    new_weights, new_state = weights.clone(), {name: old.clone() for name, old in state.items()}
    optimizer.update(part, new_weights, new_state, group)
    skips = skipped.to(part.device) > 0
    _copy_unless(skips, weights, new_weights)
    for name, old in state.items():
        _copy_unless(skips, old, new_state[name])


def _copy_unless(skips: Tensor, old: Tensor, new: Tensor) -> None:
    """Write ``new`` into ``old``, unless ``skips``, a boolean scalar on the device."""
    old.copy_(torch.where(skips, old, new))


# -- Muon ------------------------------------------------------------------------------------------


class Muon:
    """Takes Muon's step for the groups of an optimizer whose "rule" is "muon".

    Parameters are as of ``PartsOptimizer``; matrices are orthogonalized in ``dtype``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[str, nn.Parameter],
        updates: Updates,
        orthogonalizer: Orthogonalizer,
        dtype: torch.dtype,
    ) -> None:
        names = {part: name for name, part in parts.items()}
        self._state, self._dtype = optimizer.state, dtype
        self._parameters: list[tuple[nn.Parameter, Mapping[str, Any]]] = [
            (part, settings)
            for settings in optimizer.param_groups
            if settings["rule"] == "muon"
            for part in settings["params"]
        ]
        matrices = {names[part]: updates[names[part]].matrix for part, _ in self._parameters}
        self._matrices = {name: matrix for name, matrix in matrices.items() if matrix is not None}
        self._orthogonalize = orthogonalizer(self._matrices)

    def step_unless(self, skipped: Tensor) -> None:
        """Update all of Muon's parameters, unless ``skipped``.

        Their gradients are None afterwards, so that AdamW skips them.
        """
        skips, momenta = skipped > 0, []
        for part, _ in self._parameters:
            momentum = self._state[part]["momentum_buffer"]
            assert part.grad is not None
            _copy_unless(skips, momentum, momentum.lerp(part.grad, 1 - MOMENTUM))
            part.grad = None
            momenta.append(momentum.to(self._dtype))
        directions = self._orthogonalize(momenta)
        for (part, settings), matrix, direction in zip(
            self._parameters, self._matrices.values(), directions, strict=True
        ):
            lr, old = settings["lr"], part.detach()
            step = direction.float() * (lr * lr_factor(matrix))
            _copy_unless(skips, old, old * (1 - lr * settings["weight_decay"]) - step)


# -- The factor of the loss in fp16, by which small gradients do not become zero -------------------

_INITIAL = 2.0**16  # all figures are PyTorch's GradScaler's
_GROWTH_STEPS = 2000
"""Steps without an overflow before the scale is doubled."""
_LEAST, _MOST = 1.0, 2.0**24


class LossScale:
    """A scale that is halved when gradients overflow, and doubled when they have not for long.

    It is on the device and never read. It follows PyTorch's GradScaler, which cannot be used: where
    gradients are on the host (``--cpu_offload``) it copies its scalars there without waiting for
    them; it treats a loss that is not a number as an overflow; and it can shrink to zero.
    """

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), _INITIAL, device=device)
        self._good_steps = torch.zeros((), device=device)  # since the last change or overflow

    def unscale(self, gradients: list[Tensor]) -> None:
        """Divide the gradients, which are all on one device, by the scale: in place and exactly."""
        inverse = self.value.reciprocal().to(gradients[0].device)
        torch._foreach_mul_(gradients, inverse)

    def is_least(self) -> Tensor:
        """Return 1.0 if the scale cannot shrink, so is not to blame for an overflow, else 0.0."""
        return (self.value <= _LEAST).float()

    def update(self, overflowed: Tensor, counts: Tensor) -> None:
        """Adapt to whether a step ``overflowed``, if it ``counts``; both are 1.0 or 0.0."""
        good = (self._good_steps + 1) * (1 - overflowed)
        grows = (good >= _GROWTH_STEPS).float()
        value = self.value * (1 + grows - 0.5 * overflowed)
        # A weight of 0 or 1 gives exactly the one or the other.
        self.value = torch.lerp(self.value, value.clamp(_LEAST, _MOST), counts)
        self._good_steps = torch.lerp(self._good_steps, good * (1 - grows), counts)

    def state(self) -> dict[str, Tensor]:
        """Return copies on the CPU for a checkpoint."""
        steps = self._good_steps.long()
        return {"loss_scale": self.value.cpu(), "loss_scale_good_steps": steps.cpu()}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` returned."""
        self.value = state["loss_scale"].to(self.value)
        self._good_steps = state["loss_scale_good_steps"].to(self._good_steps)
