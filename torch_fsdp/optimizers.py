"""Muon on sharded parameters: each matrix is whole in one process, for as long as it needs.

A Newton-Schulz iteration is products of a whole matrix with itself, and each process has a part of
each matrix. So the matrices are shared out between the processes: one exchange brings each its own
ones' parts, another one brings the results back. In all, a process then holds and computes its
share of what one process alone would.
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

from torch_fsdp.domain import exchanged
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

# ------------------------------------------------------------------------------------------------
# The factor that fp16 multiplies the loss with, so that small gradients do not become zero.


_INITIAL = 2.0**16
_GROWTH_STEPS = 2000
"""Steps without an overflow before the scale is doubled. All figures are PyTorch's GradScaler's."""
_LEAST, _MOST = 1.0, 2.0**24


class LossScale:
    """A scale that is halved when gradients overflow, and doubled when they have not for long.

    It lives on the device and is never read. PyTorch's GradScaler is the model, but where gradients
    are on the host (``--cpu_offload``) it copies its scalars there without waiting for them; it
    takes a loss that is not a number for an overflow; and it can shrink to zero.
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
        """Return copies on the CPU of what a checkpoint keeps."""
        steps = self._good_steps.long()
        return {"loss_scale": self.value.cpu(), "loss_scale_good_steps": steps.cpu()}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Take back what ``state`` gave."""
        self.value = state["loss_scale"].to(self.value)
        self._good_steps = state["loss_scale_good_steps"].to(self._good_steps)


# ------------------------------------------------------------------------------------------------
# AdamW in plain operations: where PyTorch has no fused one, and where moments are bf16.


@torch.no_grad()
def step_unless(
    optimizer: torch.optim.Optimizer,
    skipped: torch.Tensor,
    keys: Mapping[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Take the optimizer's step, unless ``skipped``, a scalar on the device, is 1.0 and not 0.0.

    Computes what PyTorch's fused AdamW does with its ``found_inf``: nothing is read by the host,
    and where the step is skipped, weights, moments and the step counter keep all their bits. The
    state of each parameter must have been allocated. Where its moments are bf16, they are rounded
    at random by bits that follow from ``keys`` and the step's number.
    """
    takes = 1 - skipped
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                # What is not finite would survive the weight of 0 that a skipped step gives it.
                grad = torch.where(skipped > 0, 0.0, parameter.grad)
                state = optimizer.state[parameter]
                if keys is None:
                    _step(parameter, grad, state, group, takes)
                    continue
                # Of one parameter at a time: in fp32 there is no room for the moments of all.
                new = {name: tensor.float() for name, tensor in state.items()}
                _step(parameter, grad, new, group, takes)
                _round(new, state, keys[parameter])


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


def _round(new: dict[str, torch.Tensor], state: dict[str, torch.Tensor], key: torch.Tensor) -> None:
    """Write the moments of a step into ``state``; those of a skipped one are bf16 numbers."""
    mean = new["exp_avg"]
    bits = random_bits(mean.shape, mean.device, key, new["step"])
    state["exp_avg"].copy_(to_bf16(mean, bits))
    state["exp_avg_sq"].copy_(to_bf16(new["exp_avg_sq"], upper(bits)))


# ------------------------------------------------------------------------------------------------
# The moving average of the weights (EMA) on GPUs: of each process's own part of each parameter.


class WeightAverage:
    """Keeps, in fp32, an average of each part, where the part is."""

    def __init__(self, parts: Mapping[str, torch.Tensor], config: EmaConfig) -> None:
        """Begin with the parts' values."""
        self._parts, self._config = dict(parts), config
        self.values = {name: part.detach().clone() for name, part in parts.items()}
        first = next(iter(self.values.values()))
        self.updates = torch.zeros((), device=first.device)
        """How many updates the average has seen."""

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Take up the weights of a step; of one that was ``skipped``, 1.0 and not 0.0, nothing.

        Nothing is read by the host, unless the parts are there (``--cpu_offload``).
        """
        takes = 1 - skipped.to(self.updates.device)
        self.updates.add_(takes)
        how = self._config
        weight = weight_of_newest(self.updates, how.model_ema_decay, warmup=how.model_ema_warmup)
        weight = weight * takes
        for name, average in self.values.items():
            average.lerp_(self._parts[name], weight)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all averages here."""
        return sum(average.nbytes for average in self.values.values())

    def added_to(self, state: State, view: Callable[[str, torch.Tensor], torch.Tensor]) -> State:
        """Return the state with the averages in it, each as ``view`` shows it by its name."""
        ema = {name: view(name, average) for name, average in self.values.items()}
        return replace(state, step=state.step | {UPDATES: self.updates.cpu()}, ema=ema)

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Go on with the values that were read; where there were none, begin with the weights."""
        if state.ema is not None:
            self.updates.copy_(state.step[UPDATES])
            return
        for name, average in self.values.items():
            average.copy_(self._parts[name])

    def in_place_of_weights(self, exchanged: Callable[[], None]) -> AbstractContextManager[None]:
        """Let the model compute with the average inside; ``exchanged`` is called when the parts
        have other values. One part at a time is copied, so that there is room."""
        return exchanged_inside(self._exchange, exchanged)

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, average in self.values.items():
            part = self._parts[name]
            weights = part.detach().clone()
            part.copy_(average)
            average.copy_(weights)


# ------------------------------------------------------------------------------------------------
# The optimizer on each process's own parts of the parameters, and Lion's step there.


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


# ------------------------------------------------------------------------------------------------


class Muon:
    """Takes Muon's step for the groups of an optimizer whose "rule" is "muon".

    ``parts``: all parts of this process by their plain names; ``views``: each as a part of the
    global tensor; ``group``: the processes that shard them, None where each has them whole.
    ``dtype`` is what matrices are orthogonalized in.
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
        """Update all of Muon's parameters, unless ``skipped``, a scalar on the device, is 1.0.

        Their gradients are gone afterwards, so that the rest is the other optimizer's.
        """
        skips, momenta = skipped > 0, []
        for part, _, _ in self._chosen:
            momentum = self._state[part]["momentum_buffer"]
            assert part.grad is not None
            keep_unless(skips, momentum, momentum.lerp(part.grad, 1 - MOMENTUM))
            part.grad = None
            momenta.append(momentum.flatten().to(self._dtype))
        found = self._whole.compute(momenta, lambda whole: orthogonalized(whole, self._eps))
        for (part, group, matrix), direction in zip(self._chosen, found, strict=True):
            lr, old = group["lr"], part.detach()
            step = direction.view(old.shape).float() * (lr * lr_factor(matrix))
            keep_unless(skips, old, old * (1 - lr * group["weight_decay"]) - step)


class _WholeMatrices:
    """Matrices of which each process of a group has a range of the flattened elements."""

    def __init__(
        self,
        matrices: Sequence[tuple[int, int]],
        ranges: Sequence[range],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._matrices, self._group = matrices, group
        self._count, self._me = (1, 0) if group is None else (group.size(), group.rank())
        self._ranges: list[Sequence[range]] = [ranges] * self._count
        if self._count > 1:
            dist.all_gather_object(self._ranges, ranges, group=group)
        self._owned = _shared_out(matrices, self._count)

    def compute(
        self, parts: Sequence[torch.Tensor], how: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return this process's parts, flat as ``parts``, of what ``how`` makes of each matrix."""
        if self._group is None or self._count == 1:
            pairs = zip(parts, self._matrices, strict=True)
            return [how(part.view(matrix)).flatten() for part, matrix in pairs]
        mine = self._owned[self._me]
        given = [_joined([parts[i] for i in owned], parts[0]) for owned in self._owned]
        whole = {i: parts[0].new_empty(math.prod(self._matrices[i])) for i in mine}
        for ranges, taken in zip(
            self._ranges, exchanged(given, self._sizes_of(mine), self._group), strict=True
        ):
            for i, piece in zip(mine, taken.split([len(ranges[i]) for i in mine]), strict=True):
                whole[i][ranges[i].start : ranges[i].stop] = piece
        results = {i: how(each.view(self._matrices[i])).flatten() for i, each in whole.items()}
        given = [
            _joined([results[i][ranges[i].start : ranges[i].stop] for i in mine], parts[0])
            for ranges in self._ranges
        ]
        sizes = [(sum(parts[i].numel() for i in owned),) for owned in self._owned]
        found: dict[int, torch.Tensor] = {}
        for owned, taken in zip(self._owned, exchanged(given, sizes, self._group), strict=True):
            pieces = taken.split([parts[i].numel() for i in owned])
            found |= dict(zip(owned, pieces, strict=True))
        return [found[i] for i in range(len(parts))]

    def _sizes_of(self, matrices: Sequence[int]) -> list[tuple[int]]:
        """Return how many elements of these matrices each process has."""
        return [(sum(len(ranges[i]) for i in matrices),) for ranges in self._ranges]


def _shared_out(matrices: Sequence[tuple[int, int]], count: int) -> list[list[int]]:
    """Return which matrices each of ``count`` processes is to compute: the next largest goes to the
    one that has least work, which grows with the elements times the shorter side."""
    work = [math.prod(matrix) * min(matrix) for matrix in matrices]
    owned: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for i in sorted(range(len(matrices)), key=lambda i: -work[i]):
        least = load.index(min(load))
        owned[least].append(i)
        load[least] += work[i]
    return owned


def _joined(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([like.new_empty(0), *parts])


def _flat_range(view: torch.Tensor) -> range:
    """Return which elements of the flattened global tensor a part is; they are in a row."""
    if not isinstance(view, ShardedTensor):
        return range(view.numel())
    if not view.chunks:
        return range(0)
    first = 0
    for place, size in zip(view.chunks[0].offsets, view.shape, strict=True):
        first = first * size + place
    return range(first, first + sum(chunk.data.numel() for chunk in view.chunks))
