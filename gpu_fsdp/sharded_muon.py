"""Muon on sharded parameters: each matrix is whole in one process, for as long as it needs.

A Newton-Schulz iteration is products of a whole matrix with itself, and each process has a part of
each matrix. So the matrices are shared out between the processes: one exchange brings each its own
ones' parts, another one brings the results back. In all, a process then holds and computes its
share of what one process alone would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gpu_fsdp.domain.group import exchanged
from gpu_fsdp.optimizers import keep_unless
from training.checkpoints.shards import ShardedTensor
from training.updates.newton_schulz import MOMENTUM, lr_factor, orthogonalized
from training.updates.parameter_groups import Updates


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
