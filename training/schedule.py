"""The schedules of the learning rate: a linear warmup, then one of several curves."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from training.config import RunConfig
from training.errors import UsageError


def _cosine(where: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * where))


def _linear(where: float) -> float:
    return 1 - where


def _sqrt(where: float) -> float:
    return 1 - math.sqrt(where)


SHAPES: dict[str, Callable[[float], float]] = {"cosine": _cosine, "linear": _linear, "sqrt": _sqrt}
"""The ways from 1, at 0, down to 0, at 1."""


@dataclass(frozen=True)
class Schedule(abc.ABC):
    """Gives the learning rate as a pure function of the step.

    Step s counts from 0: the first update runs at ``lr(0)``. With W warmup steps it is
    warmup_lr + (peak - warmup_lr) * s / W for s < W, then min_lr + (peak - min_lr) * ``share(s)``.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    warmup_lr: float = 0.0
    min_lr: float = 0.0

    def lr(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.warmup_lr + (self.peak - self.warmup_lr) * step / self.warmup_steps
        return self.min_lr + (self.peak - self.min_lr) * self.share(step)

    def warning(self, end: int) -> str | None:
        """Return a line for the log where a run that ends at step ``end`` never ends its warmup."""
        if end >= self.warmup_steps or not self.peak:
            return None
        return (
            f"warning: the warmup takes {self.warmup_steps:,} steps, the run ends at {end:,}: the "
            f"learning rate stays below {self.lr(end):.2g}, --lr {self.peak:g} is not reached; "
            "give fewer --warmup_steps (or --warmup_epochs)"
        )

    @abc.abstractmethod
    def share(self, step: int) -> float:
        """Return the share of the peak, from 1 to 0, that is left in a step after the warmup."""


@dataclass(frozen=True)
class WarmupCosine(Schedule):
    """Gives the schedule of PyTorch/XLA's ViT-10B example.

    The share is (1 + cos(pi * (s - W) / (T - W))) / 2 with T total steps, and 0 from step T on.
    """

    shape: ClassVar[str] = "cosine"

    def share(self, step: int) -> float:
        if step >= self.total_steps:
            return 0.0
        where = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return SHAPES[self.shape](where)


@dataclass(frozen=True)
class WarmupLinear(WarmupCosine):
    """Gives a straight line from the peak to ``min_lr``."""

    shape: ClassVar[str] = "linear"


@dataclass(frozen=True)
class WarmupConstant(Schedule):
    """Gives the peak in all steps after the warmup."""

    def share(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    """Gives the peak, and a decay in the last ``decay_steps`` D of T total steps (WSD).

    The share there is ``decay_shape`` of (s - (T - D)) / D: "sqrt", 1 - sqrt(x), and "linear" are
    those of https://arxiv.org/abs/2405.18392; the schedule is of https://arxiv.org/abs/2404.06395.
    """

    decay_steps: int = 1
    decay_shape: str = "sqrt"

    def share(self, step: int) -> float:
        steps_left = self.total_steps - step
        if steps_left >= self.decay_steps:
            return 1.0
        return SHAPES[self.decay_shape](1 - max(0, steps_left) / self.decay_steps)


def make_schedule(config: RunConfig, steps_per_epoch: int, end: int) -> Schedule:
    """Return the schedule that the flags ask for.

    Steps are batches of the present size since the start of training. ``end`` is the last one of
    the run, which ``--max_steps`` may put before the last one of all epochs. Raises UsageError if
    warmup and decay of WSD are longer than the run.
    """
    how, peak, warmup = config.schedule, config.optimizer.lr, config.optimizer.warmup_steps
    if how.warmup_epochs is not None:
        warmup = round(how.warmup_epochs * steps_per_epoch)
    if how.lr_schedule != "wsd":
        total = config.num_epochs * steps_per_epoch
        return _TO_THE_END[how.lr_schedule](peak, warmup, total, how.warmup_lr, how.min_lr)
    assert how.decay_steps is not None  # checked (training/resolve.py)
    if warmup + how.decay_steps > end:
        raise UsageError(
            f"{warmup:,} steps of warmup and --decay_steps {how.decay_steps} are more than the "
            f"{end:,} steps of the run: give fewer, or more --num_epochs"
        )
    return WarmupStableDecay(
        peak, warmup, end, how.warmup_lr, how.min_lr, how.decay_steps, how.decay_shape
    )


_TO_THE_END = {"cosine": WarmupCosine, "linear": WarmupLinear, "constant": WarmupConstant}
