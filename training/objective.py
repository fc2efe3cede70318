"""What a model is trained for: what it is shown of a batch, and the loss of what it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from training.backend import Backend
from training.normalize import Normalize

if TYPE_CHECKING:
    from training.resolve import Run


class Objective:
    """Prepares images on the devices, as a part of the step, and says what is to become less."""

    def __init__(self, run: Run, backend: Backend) -> None:
        """Put on the devices what it takes; to be made before the first step is recorded."""
        self.normalize = Normalize.of(run, backend.constant)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of (images, classes) logits, a scalar in fp32."""
        return F.cross_entropy(logits.float(), labels)
