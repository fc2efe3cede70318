"""What the devices should compute: the same updates in plain PyTorch on the CPU, unsharded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.transforms.v2.functional import normalize

from data.loading.loader import Batch
from training.options.resolve import Run
from training.self_check.content import UPDATES, FirstWeights, batches

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
