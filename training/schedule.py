"""The scheduled values of each step: the learning rate (a linear warmup, then one of several
curves) and other values that change from step to step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.errors import UsageError

if TYPE_CHECKING:
    from training.config import RunConfig
    from training.resolve import Run


@dataclass(frozen=True)
class Position:
    """Where a run stands: updates done, full epochs done, images into the current epoch."""

    step: int = 0
    epoch: int = 0
    images_in_epoch: int = 0

    def in_batches(self, batch_size: int, epoch_steps: int) -> Position:
        """Return the same position in the data in whole batches of this size, of which an epoch has
        ``epoch_steps``."""
        batches = self.images_in_epoch // batch_size
        if batches >= epoch_steps:
            return Position(self.step, self.epoch + 1)
        return Position(self.step, self.epoch, batches * batch_size)


SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "linear": lambda x: 1 - x,
    "sqrt": lambda x: 1 - math.sqrt(x),
    "constant": lambda x: 1.0,
}
"""Curves from 1 at x = 0 to 0 at x = 1; "constant" stays at 1."""


@dataclass(frozen=True)
class StepRates:
    """The scheduled values of one step, on the host."""

    lr: float
    """The learning rate."""
    last_layer: float = 1.0
    """The factor of the last layers' learning rate (``ModelSpec.last_layers``): 0 freezes them."""
    backbone: float = 1.0
    """The factor of the learning rate of the backbone: of all but heads and what features add."""
    weight_decay: float = 1.0
    """The factor of each parameter's weight decay."""
    newest: float | None = None
    """The fraction that the newest weights contribute to their EMA after the step; None: as set by
    ``--model_ema_decay``."""
    teacher_temp: float = 1.0
    """The softmax temperature of the teacher."""
    rope_factors: tuple[float, float] | None = None
    """The factors of the coordinates of rotary positions, for images or global crops, and for local
    crops; None: unchanged."""


@dataclass(frozen=True)
class RopeFactors:
    """The random factors of a step, log-uniform from 1 / ``limit`` to ``limit``; none if ``limit``
    is 1."""

    limit: float
    seed: int

    def at(self, step: int) -> tuple[float, float] | None:
        if self.limit == 1:
            return None
        drawn = random.Random(f"{self.seed} rope {step}")
        own, other = (self.limit ** drawn.uniform(-1, 1) for _ in range(2))
        return own, other


@dataclass(frozen=True)
class Ramp:
    """A number that moves from ``first`` to ``last`` over ``steps`` steps, and then stays."""

    first: float
    last: float
    steps: int
    shape: str = "linear"

    def at(self, step: int) -> float:
        if step >= self.steps or self.first == self.last:
            return self.last
        return self.last + (self.first - self.last) * SHAPES[self.shape](step / self.steps)


@dataclass(frozen=True)
class Schedule:
    """The learning rate, and what else changes, as pure functions of the step.

    Step s counts from 0: the first update runs at ``lr(0)``. With W warmup steps it is
    warmup_lr + (peak - warmup_lr) * s / W for s < W, then min_lr + (peak - min_lr) * shape(x).
    With T total steps x is (s - W) / (T - W). "cosine" is the schedule of PyTorch/XLA's ViT-10B
    example.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    warmup_lr: float = 0.0
    min_lr: float = 0.0
    shape: str = "cosine"
    decay_steps: int | None = None
    """The D of warmup-stable-decay (WSD, https://arxiv.org/abs/2404.06395): the peak, and a decay
    in the last D steps, where x is (s - (T - D)) / D. "sqrt" and "linear" are the shapes of
    https://arxiv.org/abs/2405.18392."""
    step_decay: tuple[int, float] | None = None
    """In place of a curve: the number of steps between decays, counted from W, and their factor."""
    frozen_steps: int = 0
    """Number of steps at the start that do not change the last layers."""
    heads_first_steps: int = 0
    """Number of steps at the start that train only the heads."""
    backbone_warmup_steps: int = 0
    """Number of steps after these over which the backbone's learning rate rises from 0."""
    weight_decay: Ramp = Ramp(1.0, 1.0, 0)
    """The factor of each parameter's weight decay."""
    momentum: Ramp | None = None
    """The momentum of the teacher; None without one."""
    teacher_temp: Ramp = Ramp(1.0, 1.0, 0)
    rope_factors: RopeFactors = RopeFactors(1.0, 0)
    end: int | None = None
    """The last step of the run, in batches of the current size since the start of training;
    ``--max_steps`` may set it before ``total_steps``. None: ``total_steps``."""

    def at(self, step: int) -> StepRates:
        """Return all scheduled values of a step."""
        return StepRates(
            lr=self.lr(step),
            last_layer=float(step >= self.frozen_steps),
            backbone=self.backbone(step),
            weight_decay=self.weight_decay.at(step),
            newest=None if self.momentum is None else 1 - self.momentum.at(step),
            teacher_temp=self.teacher_temp.at(step),
            rope_factors=self.rope_factors.at(step),
        )

    @property
    def steps(self) -> int:
        """The last step of the run, in batches of the current size."""
        return self.total_steps if self.end is None else self.end

    @property
    def notes(self) -> list[str]:
        """Lines for the log: which steps train the heads alone, and a warning if the run ends
        within the warmup."""
        end, notes = self.steps, list[str]()
        if self.heads_first_steps:
            notes.append(
                f"the first {self.heads_first_steps:,} steps train only the heads; over the next "
                f"{self.backbone_warmup_steps:,} steps, the backbone's learning rate rises to "
                "that of the heads"
            )
        if end < self.warmup_steps and self.peak:
            notes.append(
                f"warning: the warmup takes {self.warmup_steps:,} steps but the run ends at step "
                f"{end:,}: the learning rate stays below {self.lr(end):.2g} and never reaches "
                f"--lr {self.peak:g}; use fewer --warmup_steps (or --warmup_epochs)"
            )
        return notes

    def backbone(self, step: int) -> float:
        """Return the factor of the backbone's learning rate: a linear warmup, like that of ``lr``,
        which starts after the steps that train only the heads."""
        trained = step - self.heads_first_steps
        if 0 <= trained < self.backbone_warmup_steps:
            return trained / self.backbone_warmup_steps
        return float(trained >= 0)

    def lr(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.warmup_lr + (self.peak - self.warmup_lr) * step / self.warmup_steps
        if self.step_decay:
            interval, factor = self.step_decay
            return self.peak * factor ** ((step - self.warmup_steps) // interval)
        if self.decay_steps is not None:
            steps_left = min(max(0, self.total_steps - step), self.decay_steps)
            x = 1 - steps_left / self.decay_steps
        elif step >= self.total_steps:
            x = 1.0
        else:
            x = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.min_lr + (self.peak - self.min_lr) * SHAPES[self.shape](x)


def make_schedule(run: Run, steps_per_epoch: int, at: Position) -> tuple[Schedule, int]:
    """Return the schedule that the flags of ``run`` set, for training from the position ``at``, and
    the number of the last step.

    The steps of the schedule are batches of the current size since the start of training; the steps
    of the run are updates. After a change of the batch size, the run makes as many more updates as
    there are batches left. Raises UsageError if warmup and decay of WSD are longer than the run.
    """
    config = run.config
    done = at.epoch * steps_per_epoch + at.images_in_epoch // config.data.batch_size
    last_step = at.step + max(0, config.num_epochs * steps_per_epoch - done)
    last_step = max(at.step, min(last_step, config.max_steps or last_step))
    end = done + last_step - at.step
    how, peak, warmup = config.schedule, config.optimizer.lr, config.optimizer.warmup_steps
    if how.warmup_epochs is not None:
        warmup = round(how.warmup_epochs * steps_per_epoch)
    total = config.num_epochs * steps_per_epoch

    # All but the learning rate; the temperature alone does not change along half a cosine over
    # the steps of --num_epochs.
    others: dict[str, Any] = {"rope_factors": rope_factors(run)}
    if how.weight_decay_end is not None:
        factor = how.weight_decay_end / config.optimizer.weight_decay
        others["weight_decay"] = Ramp(1.0, factor, total, "cosine")
    if how.freeze_backbone_epochs:
        warmup_epochs = how.backbone_warmup_epochs
        if warmup_epochs is None:
            warmup_epochs = how.freeze_backbone_epochs
        others["heads_first_steps"] = round(how.freeze_backbone_epochs * steps_per_epoch)
        others["backbone_warmup_steps"] = round(warmup_epochs * steps_per_epoch)
    others |= schedules_of_features(config, steps_per_epoch, total)
    if how.lr_schedule == "step":
        interval = round(how.decay_epochs * steps_per_epoch)
        if not interval:
            raise UsageError(
                f"--decay_epochs {how.decay_epochs:g} is less than one step: an epoch has "
                f"{steps_per_epoch:,} steps"
            )
        others["step_decay"] = interval, how.decay_rate
    if how.lr_schedule != "wsd":
        schedule = Schedule(
            peak, warmup, total, how.warmup_lr, how.min_lr, how.lr_schedule, end=end, **others
        )
        return schedule, last_step
    assert how.decay_steps is not None  # checked (training/resolve.py)
    if warmup + how.decay_steps > end:
        raise UsageError(
            f"{warmup:,} warmup steps and --decay_steps {how.decay_steps} exceed the {end:,} "
            "steps of the run: use fewer, or more --num_epochs"
        )
    shape, decay = how.decay_shape, how.decay_steps
    schedule = Schedule(
        peak, warmup, end, how.warmup_lr, how.min_lr, shape, decay, end=end, **others
    )
    return schedule, last_step


def schedules_of_features(
    config: RunConfig, steps_per_epoch: int, total_steps: int
) -> dict[str, Any]:
    """Return the fields of ``Schedule`` that features set for a training of ``total_steps``."""
    schedules: dict[str, Any] = {}
    for feature in config.active_features:
        schedules |= feature.schedules(config, steps_per_epoch, total_steps)
    return schedules


def rope_factors(run: Run) -> RopeFactors:
    """Return the source of random factors of rotary positions. A linear probe has none: its frozen
    blocks run in evaluation mode."""
    limit = 1.0 if run.config.optimizer.linear_probe else run.model.rope_rescale
    return RopeFactors(limit, run.config.seed)
