"""How far what was found is from what should be, and how far rounding alone may take it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.transforms.v2.functional import normalize

from data.loader import Batch
from tools.self_check.small_run import UPDATES, FirstWeights, batches
from training.resolve import Run

# ------------------------------------------------------------------------------------------------
# The lines of a self-check, printed as they are found, by one process.


PASS, FAIL, SKIP = "pass", "FAIL", "skip"
_NAME_WIDTH = 20


@dataclass
class Table:
    """``silent`` in all processes but the first; the figures may be the first one's alone."""

    silent: bool
    failed: int = 0
    passed: int = 0
    _began: float = field(default_factory=time.perf_counter)

    def say(self, text: str) -> None:
        if not self.silent:
            print(text, flush=True)

    def line(self, good: bool | None, name: str, text: str) -> None:
        """Print a line; ``good`` is None where nothing could be told."""
        verdict = SKIP if good is None else PASS if good else FAIL
        self.failed += verdict == FAIL
        self.passed += verdict == PASS
        self.say(f"{verdict}  {name:{_NAME_WIDTH}} {text}")

    def within(self, name: str, found: float, allowed: float, text: str) -> None:
        """Print a line for a figure that should be 0; ``text`` says what it is of."""
        good = found <= allowed  # not a number: no
        relation = "at most" if good else "more than"
        self.line(good, name, f"{found:.1e} ({relation} {allowed:.1e}) {text}")

    def end(self) -> None:
        seconds = time.perf_counter() - self._began
        checks = f"{self.passed + self.failed} checks, {seconds:.0f} s"
        if self.failed:
            self.say(f"self check FAILED: {self.failed} of {checks}")
        else:
            self.say(f"self check passed: {checks}")


def size_of(count: float) -> str:
    """Bytes for a person to read."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


# ------------------------------------------------------------------------------------------------
# What the devices should compute: the same updates in plain PyTorch on the CPU, unsharded.


MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors = dict[str, torch.Tensor]

_LR = 0.05
_ROWS_AT_ONCE = 32


@dataclass(frozen=True)
class Settings:
    """Of the updates; the check's own, so that a wrong gradient cannot hide.

    ``eps`` is as large as a typical gradient: without it AdamW's first update is nearly the
    gradients' signs, which no factor changes, and which rounding turns where one is small.
    ``max_norm`` is half of the first gradient's norm, so that clipping is at work.
    """

    lr: float
    eps: float
    max_norm: float


@dataclass
class Outcome:
    """What the updates have led to. The state is that after the update of this number."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    states: dict[int, dict[str, Tensors]] = field(default_factory=dict)
    """By update: "weights", and each of MOMENTS."""


def compute(run: Run) -> tuple[Settings, Outcome, Outcome]:
    """Return how to update, what then comes out in fp32, and what if all is rounded to bf16."""
    data = list(batches(run))[:UPDATES]
    plain = _Training(run, torch.float32, torch.float32)
    _, norm = plain.gradients(data[0])
    clips = run.config.optimizer.clip_grad_norm > 0
    count = sum(parameter.numel() for parameter in plain.weights.values())
    typical = norm / (2.0 if clips else 1.0) / math.sqrt(count)
    settings = Settings(_LR, typical, norm / 2 if clips else 0.0)
    stored = torch.float32 if run.own.keeps_fp32_weights else torch.bfloat16
    rounded = _Training(run, torch.bfloat16, stored)
    return settings, plain.run(data, settings), rounded.run(data, settings)


class _Training:
    """Weights kept in one precision, computed with in another."""

    def __init__(self, run: Run, computed: torch.dtype, stored: torch.dtype) -> None:
        self._config = run.config.optimizer
        self._model = run.model.build()
        channels = run.model.sizes.input_shape[0]
        self._colours = run.config.data.preprocessing.of_channels(channels)
        FirstWeights(run.config.seed)(self._model, "")
        self.weights = {
            name: nn.Parameter(each.detach().to(stored, copy=True))
            for name, each in self._model.named_parameters()
        }
        self._model.to(computed)

    def run(self, data: Sequence[Batch], settings: Settings) -> Outcome:
        config, outcome = self._config, Outcome()
        assert config.betas is not None  # resolved
        optimizer: Any = torch.optim.AdamW(
            self.weights.values(),
            lr=settings.lr,
            betas=config.betas,
            eps=settings.eps,
            weight_decay=config.weight_decay,
        )
        outcome.states[0] = {"weights": self._copies(self.weights)}
        for update, batch in enumerate(data, 1):
            loss, norm = self.gradients(batch)
            outcome.losses.append(loss)
            outcome.norms.append(norm)
            if settings.max_norm > 0:
                nn.utils.clip_grad_norm_(self.weights.values(), settings.max_norm)
            optimizer.step()
            outcome.states[update] = {"weights": self._copies(self.weights)} | {
                kind: self._copies({n: optimizer.state[p][kind] for n, p in self.weights.items()})
                for kind in MOMENTS
            }
        return outcome

    def gradients(self, batch: Batch) -> tuple[float, float]:
        """Leave those of the mean loss in ``weights``; returns the loss and their norm."""
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(self.weights[name])
        self._model.zero_grad()
        total = 0.0
        for images, labels in _parts(batch):
            if images.dtype == torch.uint8:
                images = normalize(images / 255, *self._colours)
            logits = self._model(images.to(next(self._model.parameters()).dtype))
            loss = F.cross_entropy(logits.float(), labels, reduction="sum") / len(batch[1])
            loss.backward()
            total += loss.item()
        gradients = []
        for name, parameter in self._model.named_parameters():
            assert parameter.grad is not None
            self.weights[name].grad = parameter.grad.to(self.weights[name].dtype, copy=True)
            gradients.append(parameter.grad.float())
        return total, nn.utils.get_total_norm(gradients).item()

    @staticmethod
    def _copies(tensors: dict[str, Any]) -> Tensors:
        return {name: each.detach().float().clone() for name, each in tensors.items()}


def _parts(batch: Batch) -> Iterator[Batch]:
    """Some rows at a time, for the memory."""
    images, labels = (part.split(_ROWS_AT_ONCE) for part in batch)
    yield from zip(images, labels, strict=True)


# ------------------------------------------------------------------------------------------------


_BF16 = torch.finfo(torch.bfloat16).eps / 2
"""Half the distance from 1.0 to the next number: by such a share a value may be rounded."""
_EXACT = {"loss": 2e-5, "state": 2e-4}
"""Allowed in fp32, where other orders of summing show."""
_TIMES = 3.0
"""What is allowed is so many times as much as plain PyTorch's own rounding makes."""
_MOST = 0.3
"""Nothing allowed may hide a factor of 2."""
_SMALL = 0.1
"""A tensor whose values are smaller than this share of the typical one is measured against that:
some gradients are zero but for rounding, as of a bias that is the same for all keys."""


@dataclass(frozen=True)
class Distance:
    """How far some tensors are from others, relative: of all together, and of the worst one."""

    whole: float
    worst: float
    name: str = ""
    """Of the worst one."""


def distance(found: Tensors, expected: Tensors, start: Tensors | None = None) -> Distance:
    """Compare two sets of tensors; with ``start``, how far they have moved from there."""
    moved = {n: e - start[n] if start else e for n, e in expected.items()}
    off = {name: _square(found[name] - value) for name, value in expected.items()}
    size = {name: _square(value) for name, value in moved.items()}
    typical = sum(size.values()) / sum(value.numel() for value in moved.values())
    worst, name = 0.0, ""
    for each, value in moved.items():
        against = max(size[each], _SMALL**2 * typical * value.numel())
        relative = math.sqrt(off[each] / against)
        if not relative <= worst:  # also where it is not a number
            worst, name = relative, each
    return Distance(math.sqrt(sum(off.values()) / sum(size.values())), worst, name)


def _square(tensor: torch.Tensor) -> float:
    return tensor.double().square().sum().item()


def apart(found: list[float], expected: list[float]) -> float:
    """Return the largest relative distance of numbers."""
    each = [abs(f - e) / max(abs(e), 1e-9) for f, e in zip(found, expected, strict=True)]
    return max(x if math.isfinite(x) else math.inf for x in each)


@dataclass(frozen=True)
class Tolerances:
    """What is allowed where values are rounded by ``rounding``.

    ``plain`` is computed in fp32, ``rounded`` the same all in bf16: what lies between them is what
    rounding makes of this very model, and less of it is expected of finer numbers.
    """

    rounding: float
    plain: Outcome
    rounded: Outcome

    def loss(self) -> float:
        return min(_MOST, max(_EXACT["loss"], 8 * self.rounding))

    def norm(self) -> float:
        """Return what is allowed of the norm, which is not as far off as the gradient itself."""
        return max(self.state(update, "exp_avg", None).whole for update in (1, UPDATES))

    def state(self, update: int, kind: str, start: Tensors | None) -> Distance:
        rounded, plain = self.rounded.states[update][kind], self.plain.states[update][kind]
        far = distance(rounded, plain, start)
        return Distance(self._scaled(far.whole), self._scaled(far.worst))

    def _scaled(self, of_bf16: float) -> float:
        return min(_MOST, max(_EXACT["state"], _TIMES * of_bf16 * self.rounding / _BF16))
