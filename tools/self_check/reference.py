"""The reference of the self-check: the same updates in plain PyTorch on the CPU, unsharded.

Also computes the tolerances: by how much rounding alone may change the devices' results.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from data.batch import Batch, micro_batches
from tools.self_check.plain import backward, clip_and_step, normalized
from tools.self_check.small_run import UPDATES, batches, first_weights
from training.backend import Backend, scan_eagerly
from training.objectives.registry import open_objective
from training.resolve import Run
from training.schedule import Schedule, StepRates, schedules_of_features

MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = dict[str, torch.Tensor]

TEACHER = "teacher"

_LR = 0.05
_NEWEST = 0.1
"""The share of the newest weights in a teacher after an update."""
_ROWS_AT_ONCE = 32


@dataclass(frozen=True)
class Settings:
    """Settings of the updates; the check's own, so that a wrong gradient cannot hide.

    ``eps`` is as large as a typical gradient: without it AdamW's first update is nearly the
    gradients' signs, which no factor changes, and which rounding turns where one is small.
    ``max_norm`` is half of the first gradient's norm, so that clipping is at work.
    """

    lr: float
    eps: float
    max_norm: float

    def rates(self, run: Run) -> StepRates:
        """Return what schedules would give for each update."""
        schedules = schedules_of_features(run.config, steps_per_epoch=0, total_steps=0)
        rates = Schedule(self.lr, 0, 0, shape="constant", **schedules).at(0)
        return replace(rates, newest=_NEWEST) if run.config.objective.has_teacher else rates


@dataclass
class Outcome:
    """Losses, gradient norms and states of the updates."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    states: dict[int, dict[str, Tensors]] = field(default_factory=dict)
    """After each update, by its number: "weights", each of MOMENTS, TEACHER if there is one."""


def compute(run: Run, parts: int) -> tuple[Settings, Outcome, Outcome]:
    """Return the settings, the outcome in fp32, and the outcome with all rounded to bf16.

    ``parts``: the number of parts of a batch, each of which is divided into passes.
    """
    plain = _Training(run, parts, torch.float32, torch.float32)
    data = list(batches(run, None, positions=plain.takes_positions))[:UPDATES]
    _, norm = plain.gradients(0, data[0])
    clips = run.config.optimizer.clip_grad_norm > 0
    count = sum(parameter.numel() for parameter in plain.weights.values())
    typical = norm / (2.0 if clips else 1.0) / math.sqrt(count)
    settings = Settings(_LR, typical, norm / 2 if clips else 0.0)
    stored = torch.float32 if run.backend_config.keeps_fp32_weights else torch.bfloat16
    rounded = _Training(run, parts, torch.bfloat16, stored)
    return settings, plain.run(data, settings), rounded.run(data, settings)


class _Training:
    """A training whose weights are stored in one dtype and computed with in another."""

    def __init__(self, run: Run, parts: int, computed: torch.dtype, stored: torch.dtype) -> None:
        self._run, self._parts = run, parts

        def build() -> nn.Module:
            """Return the model on the CPU, with the first weights, which casts its inputs."""
            model = run.build_model(lambda values: values)
            first_weights(run.config.seed, model, "")

            def cast(_: nn.Module, inputs: Any) -> Any:
                return tree_map_only(
                    torch.Tensor, lambda x: x.to(computed) if x.is_floating_point() else x, inputs
                )

            model.register_forward_pre_hook(cast)
            return model

        self._model = build()
        self.weights = {
            name: nn.Parameter(parameter.detach().to(stored, copy=True))
            for name, parameter in self._model.named_parameters()
            if name not in run.model.frozen
        }
        self._model.to(computed)
        self._models = {"weights": self._model}
        self._stored: dict[str, Mapping[str, torch.Tensor]] = {"weights": self.weights}
        """What the models compute with, before it is rounded to what they compute in."""
        teacher = None
        if run.config.objective.has_teacher:
            self._stored[TEACHER] = {n: w.detach().clone() for n, w in self.weights.items()}
            teacher = build().to(computed).requires_grad_(False).eval()
            self._models[TEACHER] = teacher
        # Labels are compared by PyTorch itself. Features' objectives compute here as on one device.
        self._objective = None
        if any(feature.objective for feature in run.config.active_features):
            same, nothing = nn.Identity(), lambda *_: None
            alone = SimpleNamespace(
                **dict.fromkeys(("constant", "sum", "mean", "all_gather"), same),
                **dict.fromkeys(("begin_micro_batch", "end_step"), nothing),
                scan=scan_eagerly,
                replicas_here=1,
                teacher=teacher,
            )
            self._objective = open_objective(run, cast(Backend, alone))
        self.takes_positions = bool(self._objective and self._objective.takes_positions)

    def run(self, data: Sequence[Batch], settings: Settings) -> Outcome:
        config, outcome = self._run.config.optimizer, Outcome()
        assert config.betas is not None  # resolved
        optimizer: Any = torch.optim.AdamW(
            self.weights.values(), settings.lr, config.betas, settings.eps, config.weight_decay
        )
        outcome.states[0] = _copies(self._stored)
        for update, batch in enumerate(data, 1):
            loss, norm = self.gradients(update - 1, batch)
            outcome.losses.append(loss)
            outcome.norms.append(norm)
            clip_and_step(optimizer, settings.max_norm)
            for name, average in self._stored.get(TEACHER, {}).items():
                average.lerp_(self.weights[name].detach(), _NEWEST)
            moments = {
                kind: {
                    name: optimizer.state[weight].get(kind, torch.zeros_like(weight))
                    for name, weight in self.weights.items()
                }
                for kind in MOMENTS
            }
            outcome.states[update] = _copies(self._stored | moments)
        return outcome

    def gradients(self, update: int, batch: Batch) -> tuple[float, float]:
        """Leave the gradients of the mean loss in ``weights``; return the loss and their norm.

        ``update``: the number of updates before.
        """
        with torch.no_grad():
            for kind, model in self._models.items():
                for name, values in self._stored[kind].items():
                    model.get_parameter(name).copy_(values)
        self._model.zero_grad()
        total = sum(part.item() for part in backward(self._losses(update, batch)))
        gradients = []
        for name, weight in self.weights.items():
            gradient = self._model.get_parameter(name).grad
            if gradient is None:  # a head that the objective does not use: it is not updated
                weight.grad = None
                continue
            weight.grad = gradient.to(weight.dtype, copy=True)
            gradients.append(gradient.float())
        return total, nn.utils.get_total_norm(gradients).item()

    def _losses(self, update: int, batch: Batch) -> Iterator[torch.Tensor]:
        """Yield the mean loss in parts, which add up to it."""
        if self._objective is None:
            fields = (batch[name].split(_ROWS_AT_ONCE) for name in ("image", "target"))
            for images, labels in zip(*fields, strict=True):  # in parts, for the memory
                logits = self._model(normalized(images, self._run.config.data.preprocessing))
                loss = F.cross_entropy(logits.float(), labels, reduction="sum")
                yield loss / len(batch["target"])
            return
        # The micro-batches of a step: each has some images of each part of the batch.
        self._objective.begin_step(Settings(0.0, 0.0, 0.0).rates(self._run))
        count = self._run.config.data.grad_accum_steps
        parts = micro_batches(batch, self._parts, count)
        self._objective.before_micro_batches(self._model, parts, update * count)
        for number, part in enumerate(parts):
            yield self._objective.loss(self._model, part, update * count + number) / count


def _copies(state: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Tensors]:
    return {
        kind: {name: tensor.detach().float().clone() for name, tensor in tensors.items()}
        for kind, tensors in state.items()
    }


# -- What is allowed -------------------------------------------------------------------------------

_BF16 = torch.finfo(torch.bfloat16).eps / 2
"""Unit roundoff: half the distance from 1.0 to the next number."""
_EXACT_LOSS, _EXACT_STATE = 2e-5, 2e-4
"""Allowed in fp32, where only the order of sums differs."""
_TIMES = 4.0
"""What is allowed, in multiples of what rounding does to plain PyTorch."""
_MOST, _MOST_OF_ONE = 0.3, 0.45
"""The most that is ever allowed, of all together and of one tensor, which may have few values: it
may not hide a factor of 2, nor of 1/2."""
_SMALL = 0.1
"""The least size that a tensor is compared with, as a share of the typical value: some gradients
are zero but for rounding, as of a bias that is the same for all keys."""


@dataclass(frozen=True)
class Distance:
    """How far some tensors are from others, relative: of all together, and of the worst one."""

    whole: float
    worst: float
    name: str = ""
    """Of the worst one."""


def distance(found: Tensors, expected: Tensors, start: Tensors | None = None) -> Distance:
    """Compare two sets of tensors; with ``start``, how far they have moved from there."""

    def square(tensor: torch.Tensor) -> float:
        return tensor.double().square().sum().item()

    moved = {n: e - start[n] if start else e for n, e in expected.items()}
    off = {name: square(found[name] - value) for name, value in expected.items()}
    size = {name: square(value) for name, value in moved.items()}
    typical = sum(size.values()) / sum(value.numel() for value in moved.values())
    worst, worst_name = 0.0, ""
    for name, value in moved.items():
        against = max(size[name], _SMALL**2 * typical * value.numel())
        relative = math.sqrt(off[name] / against)
        if not relative <= worst:  # also for NaN
            worst, worst_name = relative, name
    return Distance(math.sqrt(sum(off.values()) / sum(size.values())), worst, worst_name)


def apart(found: list[float], expected: list[float]) -> float:
    """Return the largest relative distance of numbers."""
    distances = [abs(f - e) / max(abs(e), 1e-9) for f, e in zip(found, expected, strict=True)]
    return max(x if math.isfinite(x) else math.inf for x in distances)


@dataclass(frozen=True)
class Tolerances:
    """What is allowed where values are rounded with a unit roundoff of ``rounding``.

    ``plain`` is computed in fp32, ``rounded`` the same all in bf16: the distance between them is
    the effect of rounding on this very model, and dtypes with more bits are allowed less of it.
    """

    rounding: float
    plain: Outcome
    rounded: Outcome

    def loss(self) -> float:
        # A loss after updates is as far off as what these updates were made of.
        far = self._apart(UPDATES, "exp_avg", None).whole
        return min(_MOST, max(_EXACT_LOSS, 8 * self.rounding, self._times * far))

    def norm(self) -> float:
        """Return what is allowed of the norm, which is not as far off as the gradient itself."""
        return max(self.state(update, "exp_avg", None).whole for update in (1, UPDATES))

    def state(self, update: int, kind: str, start: Tensors | None) -> Distance:
        far = self._apart(update, kind, start)
        return Distance(
            min(_MOST, max(_EXACT_STATE, self._times * far.whole)),
            min(_MOST_OF_ONE, max(_EXACT_STATE, self._times * far.worst)),
        )

    def _apart(self, update: int, kind: str, start: Tensors | None) -> Distance:
        """Return the difference that rounding to bf16 makes."""
        rounded, plain = self.rounded.states[update], self.plain.states[update]
        return distance(rounded[kind], plain[kind], start)

    @property
    def _times(self) -> float:
        """What is allowed, in multiples of the difference that rounding to bf16 makes."""
        return _TIMES * self.rounding / _BF16
