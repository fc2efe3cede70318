"""What updates a process's parts of the parameters: AdamW, Lion, Muon, EMA, the fp16 loss scale.

Each takes ``skipped``, a scalar on the device, 1.0 or 0.0: at 1.0 weights, moments and counters
keep all their bits. The host reads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from timm.optim.lion import Lion, lion
from torch import nn

from torch_fsdp.domain import all_to_all
from training.backend import State
from training.checkpoints.state import ShardedTensor
from training.config import EmaConfig
from training.optimizers import (
    MOMENTS,
    MOMENTUM,
    UPDATES,
    Update,
    Updates,
    exchanged_inside,
    lr_factor,
    orthogonalized,
    random_bits,
    to_bf16,
    upper,
    weight_of_newest,
)


def build_optimizer(
    parts: Mapping[str, nn.Parameter],
    updates: Updates,
    *,
    betas: tuple[float, float],
    eps: float,
    fused: bool,
    dtype: torch.dtype | None,
) -> torch.optim.Optimizer:
    """Return the optimizer of those of ``parts`` that are in ``updates``, its state allocated.

    Parts and updates are by names in the plain model. ``dtype`` is that of the moments; None: the
    parameters'. A group holds what is updated alike, with "rule" and "lr_scale". Muon's parameters
    are in AdamW's groups, too, but ``Muon`` takes their step.
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
    """Set the learning rate of each group."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


# -- AdamW in plain operations: where PyTorch has no fused one, or moments are bf16 ----------------


@torch.no_grad()
def step_unless(
    optimizer: torch.optim.Optimizer,
    skipped: torch.Tensor,
    keys: Mapping[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Take AdamW's step, unless ``skipped``: as PyTorch's fused AdamW with its ``found_inf``.

    The state of each parameter must have been allocated. Where moments are bf16, they are rounded
    stochastically by bits that follow from ``keys`` and the step's number.
    """
    takes = 1 - skipped
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            # What is not finite would survive the weight of 0 that a skipped step gives it.
            grad = torch.where(skipped > 0, 0.0, parameter.grad)
            state = optimizer.state[parameter]
            if keys is None:
                _step_adamw(parameter, grad, state, group, takes)
                continue
            # One parameter at a time: there is no room for the fp32 moments of all.
            new = {name: tensor.float() for name, tensor in state.items()}
            _step_adamw(parameter, grad, new, group, takes)
            # Rounding keeps the moments of a skipped step: they are bf16 numbers.
            bits = random_bits(parameter.shape, parameter.device, keys[parameter], new["step"])
            state["exp_avg"].copy_(to_bf16(new["exp_avg"], bits))
            state["exp_avg_sq"].copy_(to_bf16(new["exp_avg_sq"], upper(bits)))


def _step_adamw(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, torch.Tensor],
    group: dict[str, Any],
    takes: torch.Tensor,
) -> None:
    """Take the step if ``takes`` is 1.0; at 0.0 all stays as it is."""
    first, second = group["betas"]
    step, mean, square = state["step"], state["exp_avg"], state["exp_avg_sq"]
    step.add_(takes)
    mean.lerp_(grad, (1 - first) * takes)
    square.lerp_(grad.square(), (1 - second) * takes)
    parameter.mul_(1 - group["lr"] * group["weight_decay"] * takes)
    count = step.clamp(min=1)  # before the first step that is taken, 1 - beta ** 0 would divide
    scale = (square / (1 - second**count)).sqrt() + group["eps"]
    parameter.sub_(mean / scale * (group["lr"] * takes / (1 - first**count)))


# -- Lion ------------------------------------------------------------------------------------------


@torch.no_grad()
def step_lion_unless(optimizer: torch.optim.Optimizer, skipped: torch.Tensor) -> None:
    """Take Lion's step, unless ``skipped``."""
    for group in optimizer.param_groups:
        for part in group["params"]:
            weights, moment = part.detach(), optimizer.state[part]["exp_avg"]
            new_weights, new_moment = weights.clone(), moment.clone()
            first, second = group["betas"]
            lion(
                [new_weights],
                [part.grad],
                [new_moment],
                beta1=first,
                beta2=second,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                caution=False,
                foreach=False,
            )
            skips = skipped.to(part.device) > 0
            _copy_unless(skips, weights, new_weights)
            _copy_unless(skips, moment, new_moment)


def _copy_unless(skips: torch.Tensor, old: torch.Tensor, new: torch.Tensor) -> None:
    """Write ``new`` into ``old``, unless ``skips``, a boolean scalar on the device."""
    old.copy_(torch.where(skips, old, new))


# -- Muon ------------------------------------------------------------------------------------------
#
# A Newton-Schulz iteration is products of a whole matrix with itself, and each process has a part
# of each matrix. So the matrices are divided among the processes: one exchange brings each of them
# the parts of its matrices, another one returns the results. In all, a process then holds and
# computes its share of what one process alone would.


class Muon:
    """Takes Muon's step for the groups of an optimizer whose "rule" is "muon".

    ``parts``: all parts of this process, by names in the plain model; ``views``: each as a part of
    the global tensor; ``group``: the processes that shard them, None where each has them whole.
    Matrices are orthogonalized in ``dtype``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[str, nn.Parameter],
        views: Callable[[str], torch.Tensor],
        updates: Updates,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        eps: float,
    ) -> None:
        names = {part: name for name, part in parts.items()}
        self._state, self._dtype, self._eps = optimizer.state, dtype, eps
        self._chosen: list[tuple[nn.Parameter, Mapping[str, Any], tuple[int, int]]] = []
        ranges = []
        for settings in optimizer.param_groups:
            for part in settings["params"] if settings["rule"] == "muon" else ():
                matrix = updates[names[part]].matrix
                assert matrix is not None
                self._chosen.append((part, settings, matrix))
                ranges.append(_flat_range(views(names[part])))
        matrices = [matrix for *_, matrix in self._chosen]
        self._whole = _WholeMatrices(matrices, ranges, group)

    @torch.no_grad()
    def step_unless(self, skipped: torch.Tensor) -> None:
        """Update all of Muon's parameters, unless ``skipped``.

        Their gradients are None afterwards, so that AdamW skips them.
        """
        skips, momenta = skipped > 0, []
        for part, _, _ in self._chosen:
            momentum = self._state[part]["momentum_buffer"]
            assert part.grad is not None
            _copy_unless(skips, momentum, momentum.lerp(part.grad, 1 - MOMENTUM))
            part.grad = None
            momenta.append(momentum.flatten().to(self._dtype))
        found = self._whole.compute(momenta, lambda whole: orthogonalized(whole, self._eps))
        for (part, group, matrix), direction in zip(self._chosen, found, strict=True):
            lr, old = group["lr"], part.detach()
            step = direction.view(old.shape).float() * (lr * lr_factor(matrix))
            _copy_unless(skips, old, old * (1 - lr * group["weight_decay"]) - step)


class _WholeMatrices:
    """Matrices of which each process of a group has a range of the flattened elements."""

    def __init__(
        self,
        matrices: Sequence[tuple[int, int]],
        ranges: Sequence[range],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._matrices, self._group = matrices, group
        count, rank = (1, 0) if group is None else (group.size(), group.rank())
        self._ranges: list[Sequence[range]] = [ranges] * count
        if count > 1:
            dist.all_gather_object(self._ranges, ranges, group=group)
        # Which matrices each process computes: the next largest goes to the one with least work,
        # which grows with the elements times the shorter side.
        work = [math.prod(matrix) * min(matrix) for matrix in matrices]
        self._owned: list[list[int]] = [[] for _ in range(count)]
        load = [0] * count
        for i in sorted(range(len(matrices)), key=lambda i: -work[i]):
            least = load.index(min(load))
            self._owned[least].append(i)
            load[least] += work[i]
        self._mine = self._owned[rank]

    def compute(
        self, parts: Sequence[torch.Tensor], how: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return this process's parts, flat as ``parts``, of what ``how`` makes of each matrix."""
        if self._group is None or len(self._owned) == 1:
            pairs = zip(parts, self._matrices, strict=True)
            return [how(part.view(matrix)).flatten() for part, matrix in pairs]
        mine, empty = self._mine, parts[0].new_empty(0)

        # Parts of each process's matrices to it.
        sent = [torch.cat([empty, *(parts[i] for i in owned)]) for owned in self._owned]
        sizes = [(sum(len(ranges[i]) for i in mine),) for ranges in self._ranges]
        received = all_to_all(sent, sizes, self._group)
        whole = {i: empty.new_empty(math.prod(self._matrices[i])) for i in mine}
        for ranges, part in zip(self._ranges, received, strict=True):
            for i, piece in zip(mine, part.split([len(ranges[i]) for i in mine]), strict=True):
                whole[i][ranges[i].start : ranges[i].stop] = piece

        results = {i: how(each.view(self._matrices[i])).flatten() for i, each in whole.items()}

        # And back.
        sent = [
            torch.cat([empty, *(results[i][ranges[i].start : ranges[i].stop] for i in mine)])
            for ranges in self._ranges
        ]
        sizes = [(sum(parts[i].numel() for i in owned),) for owned in self._owned]
        found: dict[int, torch.Tensor] = {}
        for owned, part in zip(self._owned, all_to_all(sent, sizes, self._group), strict=True):
            pieces = part.split([parts[i].numel() for i in owned])
            found |= dict(zip(owned, pieces, strict=True))
        return [found[i] for i in range(len(parts))]


def _flat_range(view: torch.Tensor) -> range:
    """Return which elements of the flattened global tensor a part is; they are adjacent."""
    if not isinstance(view, ShardedTensor):
        return range(view.numel())
    if not view.chunks:
        return range(0)
    first = 0
    for place, size in zip(view.chunks[0].offsets, view.shape, strict=True):
        first = first * size + place
    return range(first, first + sum(chunk.data.numel() for chunk in view.chunks))


# -- The moving average of the weights (EMA) -------------------------------------------------------


class PartsAverage:
    """An fp32 average of each part, on the part's device."""

    def __init__(self, parts: Mapping[str, torch.Tensor], config: EmaConfig) -> None:
        """Start with the parts' values."""
        self._parts, self._config = dict(parts), config
        self.values = {name: part.detach().clone() for name, part in parts.items()}
        first = next(iter(self.values.values()))
        self.updates = torch.zeros((), device=first.device)
        """How many updates the average has seen."""

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Average the weights after an update; no change if it was ``skipped``."""
        takes = 1 - skipped.to(self.updates.device)  # with --cpu_offload the host
        self.updates.add_(takes)
        how = self._config
        weight = weight_of_newest(self.updates, how.model_ema_decay, warmup=how.model_ema_warmup)
        weight = weight * takes
        for name, average in self.values.items():
            average.lerp_(self._parts[name], weight)

    def added_to(self, state: State, view: Callable[[str, torch.Tensor], torch.Tensor]) -> State:
        """Return the state with the averages in it, each as ``view`` returns it by its name."""
        ema = {name: view(name, average) for name, average in self.values.items()}
        return replace(state, step=state.step | {UPDATES: self.updates.cpu()}, ema=ema)

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Continue with the values that were read; without any, start with the weights."""
        if state.ema is not None:
            self.updates.copy_(state.step[UPDATES])
            return
        for name, average in self.values.items():
            average.copy_(self._parts[name])

    def in_place_of_weights(self, exchanged: Callable[[], None]) -> AbstractContextManager[None]:
        """Return a context in which the parts hold the average.

        ``exchanged`` is called after the parts have other values, at the start and at the end. One
        part at a time is copied, so that there is room.
        """

        @torch.no_grad()
        def exchange() -> None:
            for name, average in self.values.items():
                part = self._parts[name]
                weights = part.detach().clone()
                part.copy_(average)
                average.copy_(weights)

        return exchanged_inside(exchange, exchanged)


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

    def unscale(self, gradients: list[torch.Tensor]) -> None:
        """Divide the gradients, which are all on one device, by the scale: in place and exactly."""
        inverse = self.value.reciprocal().to(gradients[0].device)
        torch._foreach_mul_(gradients, inverse)

    def is_least(self) -> torch.Tensor:
        """Return 1.0 if the scale cannot shrink, so is not to blame for an overflow, else 0.0."""
        return (self.value <= _LEAST).float()

    def update(self, overflowed: torch.Tensor, counts: torch.Tensor) -> None:
        """Adapt to whether a step ``overflowed``, if it ``counts``; both are 1.0 or 0.0."""
        good = (self._good_steps + 1) * (1 - overflowed)
        grows = (good >= _GROWTH_STEPS).float()
        value = self.value * (1 + grows - 0.5 * overflowed)
        # A weight of 0 or 1 gives exactly the one or the other.
        self.value = torch.lerp(self.value, value.clamp(_LEAST, _MOST), counts)
        self._good_steps = torch.lerp(self._good_steps, good * (1 - grows), counts)

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies on the CPU for a checkpoint."""
        steps = self._good_steps.long()
        return {"loss_scale": self.value.cpu(), "loss_scale_good_steps": steps.cpu()}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what ``state`` returned."""
        self.value = state["loss_scale"].to(self.value)
        self._good_steps = state["loss_scale_good_steps"].to(self._good_steps)
