"""A feature that the program does not know, as a user writes it outside of the program.

A source with a field of its own, an objective with parameters of its own, a hook, two flags, one
exclusion: ``--data_source gratings --objective angle``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from config_fields import flag, positive, positive_number
from data.batch import Field
from data.source import DataSource, Split, View
from models.with_head import with_head
from training.data import input_of
from training.feature import Feature
from training.loop import Hook
from training.objectives.base import MeanLoss, Objective

IMAGES = {"train": 256, "val": 64}


@dataclass(frozen=True)
class AngleConfig:
    """The flags."""

    group: ClassVar[str] = "objective"

    angle_weight: float = flag(
        1.0,
        "weight of the loss of the angle",
        kind=positive_number,
        requires=("objective=angle",),
    )
    angle_log_interval: int = flag(
        2,
        "number of steps between lines about the angle",
        kind=positive,
        requires=("objective=angle",),
    )


class Gratings(Split):
    """Gratings of random angles and phases, each determined by the seed and its number."""

    def __init__(self, request, name):
        super().__init__(request, name, np.zeros(IMAGES[name], np.int64))

    def digest(self):
        return f"gratings {self.seed} {len(self)}"

    def load_sample(self, number, epoch, index):
        drawn = np.random.default_rng((self.seed, self.name == "train", number))
        angle, phase = drawn.uniform(0, math.pi), drawn.uniform(0, 2 * math.pi)
        rows, columns = np.indices(self.request.size)
        wave = np.sin(rows * math.sin(angle) + columns * math.cos(angle) + phase)
        image = torch.from_numpy((127.5 + 127 * wave).astype(np.uint8))
        angles = torch.tensor([math.cos(2 * angle), math.sin(2 * angle)])
        return {"image": image.expand(self.request.shape), "angle": angles}


def open_gratings(request):
    """Return the source."""
    return DataSource("gratings", {name: Gratings(request, name) for name in request.splits})


class AngleView(View):
    """An image and its angle, as a point on the unit circle."""

    def fields(self, request, image_dtype, *, is_train):
        fields = super().fields(request, image_dtype, is_train=is_train)
        return fields | {"angle": Field((2,), torch.float32)}


class Angle(Feature):
    """All of it."""

    flags = AngleConfig
    turned_on_by = ("--objective angle",)
    choices: ClassVar = {
        "objective": {"angle": "regression of the angle of gratings"},
        "data_source": {"gratings": "gratings of known angles"},
    }
    sources: ClassVar = {"gratings": open_gratings}
    excludes: ClassVar = {"--vflip": "it would change the angle"}
    objective = f"{__name__}:AngleObjective"

    def extend_model(self, spec, config):
        return with_head(spec, "head_angle", 2)

    def view(self, run, *, augment):
        return AngleView()

    def hooks(self, training):
        config = training.run.config.of(AngleConfig)
        return [AngleLog(training.session, config.angle_log_interval)]


class AngleObjective(Objective):
    """The squared error; in evaluations, with noise on the images."""

    def __init__(self, run, backend, say):
        self._backend = backend
        self._input = input_of(run, backend.constant)
        self._weight = run.config.of(AngleConfig).angle_weight
        say(f"objective: angle, weight {self._weight:g}")

    def loss(self, model, batch, micro_batch_index):
        _, angles = model(self._input(batch))
        return self._weight * (angles.float() - batch["angle"]).square().mean()

    def measure(self, images=0):
        return MeanLoss(self._errors_with_noise, self._backend)

    def _errors_with_noise(self, model, batch):
        images = self._input(batch)
        _, angles = model(images + 0.1 * torch.randn_like(images))
        errors = (angles.float() - batch["angle"]).square().mean(1)
        return {"loss": errors, "drawn": F.dropout(torch.rand_like(errors), 0.5)}


@dataclass
class AngleLog(Hook):
    """Says now and then that a step was made."""

    session: object
    interval: int

    def after_step(self, done):
        if done.at.step % self.interval == 0:
            self.session.reports.say(f"angles after step {done.at.step}")
