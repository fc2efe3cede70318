"""The schedule of the learning rate: linear warmup from zero, then cosine to zero."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WarmupCosine:
    """Gives the schedule of PyTorch/XLA's ViT-10B example, as a pure function of the step.

    Step s counts from 0 (the first update runs at ``lr(0)``, which is 0 with any
    warmup). With W warmup steps and T total steps: peak * s / W for s < W, then
    peak * (1 + cos(pi * (s - W) / (T - W))) / 2. Zero from step T on.
    """

    peak: float
    warmup_steps: int
    total_steps: int

    def lr(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if step >= self.total_steps:
            return 0.0
        where = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        return self.peak * 0.5 * (1 + math.cos(math.pi * where))
