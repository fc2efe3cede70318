"""The processes that share an image, and what they tell each other: with gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class DomainGroup:
    """The processes that hold the rows of the same images, of which this is number ``index``.

    In each of them a loss of the same value is computed, and gradients are those of the sum of
    these losses: what is passed forward to all is added up from all on the way back.
    """

    group: dist.ProcessGroup
    index: int
    patches: tuple[int, ...]
    """How many patches of each image each of them has."""

    @property
    def size(self) -> int:
        return len(self.patches)

    def patches_after(self, steps: int) -> int:
        """Return how many patches the process has that is ``steps`` places before this one."""
        return self.patches[(self.index - steps) % self.size]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all of them."""
        return _Sum.apply(x, self.group)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """Return the maximum over all of them, of each number."""
        return _Largest.apply(x, self.group)

    def exchange(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Give each of them one of ``parts``; return what each gives, of these shapes."""
        return list(_Exchange.apply(self.group, [tuple(shape) for shape in shapes], *parts))

    def pass_on(self, x: torch.Tensor, shape: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Begin to give ``x`` to the next one; return what waits for what the one before gives.

        That has the shape ``shape``. It has no gradient.
        """
        given, taken = x.contiguous(), x.new_empty(tuple(shape))
        after = dist.get_global_rank(self.group, (self.index + 1) % self.size)
        before = dist.get_global_rank(self.group, (self.index - 1) % self.size)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, given, after, self.group),
                dist.P2POp(dist.irecv, taken, before, self.group),
            ]
        )
        return functools.partial(_arrived, works, taken, given)


def _arrived(works: list[dist.Work], taken: torch.Tensor, _given: torch.Tensor) -> torch.Tensor:
    """Wait for what is taken; what is given is held until it is sent."""
    for work in works:
        work.wait()
    return taken


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _all_reduced(x, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return _all_reduced(grad, ctx.group), None


class _Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        largest = _all_reduced(x, group, dist.ReduceOp.MAX)
        ctx.group = group
        ctx.save_for_backward(x == largest)
        return largest

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (here,) = ctx.saved_tensors
        here = here.to(grad.dtype)
        equal = _all_reduced(here, ctx.group)  # divided among equals, as amax does
        return _all_reduced(grad, ctx.group) * here / equal, None


def _all_reduced(
    x: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=op, group=group)
    return total


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, shapes: list[tuple[int, ...]], *parts):
        ctx.group, ctx.given = group, [tuple(part.shape) for part in parts]
        return exchanged(parts, shapes, group)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):
        return None, None, *exchanged(grads, ctx.given, ctx.group)


def exchanged(
    parts: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], group: dist.ProcessGroup
) -> tuple[torch.Tensor, ...]:
    """Give each process of ``group`` one of ``parts``; return what each gives, of these shapes."""
    given = torch.cat([part.reshape(-1) for part in parts])
    sizes = [math.prod(shape) for shape in shapes]
    taken = given.new_empty(sum(sizes))
    dist.all_to_all_single(taken, given, sizes, [part.numel() for part in parts], group=group)
    return tuple(part.view(shape) for part, shape in zip(taken.split(sizes), shapes, strict=True))
