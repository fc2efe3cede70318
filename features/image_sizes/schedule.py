"""``--image_size_schedule``: the size of the images of each batch of a training.

Small images first make the same number of images cheaper, and the largest come last, as in FixRes
(https://arxiv.org/abs/1906.06423) and EfficientNetV2 (https://arxiv.org/abs/2104.00298, section 4);
or each batch has a size drawn at random.
"""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass, replace

from data.config import DataConfig
from data.images import ArrangedView
from data.source import BatchSizes, DatasetRequest

MAGNITUDE = re.compile(r"(?<=-m)\d+(?=-|$)")
"""The magnitude in the name of a policy of RandAugment."""


@dataclass(frozen=True)
class SizeSchedule:
    """The sizes of square images over a training of ``steps`` batches, counted from its start."""

    sides: tuple[int, ...]
    """In pixels."""
    shares: tuple[float, ...]
    """The share of the steps that have images of each side, in this order; none: the side of each
    step is drawn at random, from all alike."""
    seed: int
    steps: int

    @classmethod
    def of(cls, config: DataConfig, seed: int, steps: int) -> SizeSchedule | None:
        """Return what ``--image_size_schedule`` asks for; None without the flag."""
        if not config.size_schedule:
            return None
        sides, shares = zip(*config.size_schedule, strict=True)
        return cls(sides, tuple(share for share in shares if share is not None), seed, steps)

    def number(self, step: int) -> int:
        """Return the place in ``sides`` of the side of a step, from 0 on. It depends on nothing but
        the step: loader processes and resumed runs know it."""
        if not self.shares:
            return random.Random(f"{self.seed} image sizes {step}").randrange(len(self.sides))
        ends = list(itertools.accumulate(self.shares))[:-1]  # the last one is there to the end
        return sum(step >= round(end * self.steps) for end in ends)

    def side(self, step: int) -> int:
        return self.sides[self.number(step)]

    def config_of(self, config: DataConfig, side: int) -> DataConfig:
        """Return ``config`` for images of a side. With ``--aa_min_magnitude`` the magnitude of
        RandAugment is linear in the side, as in EfficientNetV2, whose sides are at equal
        distances."""
        least, smallest, largest = config.aa_min_magnitude, min(self.sides), max(self.sides)
        if not config.aa or least is None or smallest == largest:
            return config

        def scaled(match: re.Match) -> str:
            share = (side - smallest) / (largest - smallest)
            return str(round(least + (int(match[0]) - least) * share))

        return replace(config, aa=MAGNITUDE.sub(scaled, config.aa))


@dataclass(frozen=True)
class SizeScheduleView(ArrangedView):
    """Whole images, whose size in training is that of the step."""

    def sizes(self, request: DatasetRequest, steps: int) -> BatchSizes | None:
        schedule = SizeSchedule.of(request.config, request.seed, steps)
        assert schedule

        def number(epoch: int, batch: int, batches_per_epoch: int) -> int:
            return schedule.number(epoch * batches_per_epoch + batch)

        requests = [
            replace(
                request,
                size=(side, side),
                config=schedule.config_of(request.config, side),
                view=self.view,
            )
            for side in schedule.sides
        ]
        return BatchSizes(requests, number)
