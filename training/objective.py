"""What a model is trained for: what it is shown of a batch, and the loss of what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

from training.backend import Backend
from training.loss_config import LossConfig
from training.mixing import Mixing
from training.normalize import Normalize

if TYPE_CHECKING:
    from training.resolve import Run


class Objective:
    """Prepares images on the devices, as a part of the step, and says what is to become less."""

    def __init__(self, run: Run, backend: Backend) -> None:
        """Put on the devices what it takes; to be made before the first step is recorded."""
        config = run.config.loss
        self.normalize = Normalize.of(run, backend.constant)
        self._mixing = None
        if config.mixes:
            self._mixing = Mixing(run, backend.constant, backend.image_rows)
        self._of_classes = config.mixes or config.bce_loss
        self._classes, self._smoothing = run.model.sizes.num_classes, config.smoothing
        self._loss = training_loss(config)

    def example(
        self, images: torch.Tensor, labels: torch.Tensor, pass_index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the model is shown of a micro-batch, and what it is to answer.

        The latter are labels (images,), or their shares (images, classes). ``pass_index``: the
        number of the pass since the start of training.
        """
        images = self.normalize(images)
        if self._of_classes:
            labels = smoothed(labels, self._classes, self._smoothing)
        if self._mixing is not None:
            mix = self._mixing.draw(pass_index)
            images, labels = self._mixing.images(images, mix), self._mixing.labels(labels, mix)
        return images, labels

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of (images, classes) logits, a scalar in fp32."""
        return self._loss(logits.float(), targets)


def training_loss(config: LossConfig) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the loss of logits and targets, as timm's training script chooses it.

    Where labels are mixed, or classes each for themselves, the targets are smoothed already.
    """
    if config.bce_loss:
        return BinaryCrossEntropy(
            target_threshold=config.bce_target_thresh, sum_classes=config.bce_sum
        )
    if config.mixes:
        return SoftTargetCrossEntropy()
    if config.smoothing:
        return LabelSmoothingCrossEntropy(config.smoothing)
    return F.cross_entropy


def smoothed(labels: torch.Tensor, classes: int, smoothing: float) -> torch.Tensor:
    """Return each class's share of each label, (images, classes), fp32, as timm's ``mixup_target``
    has it; by comparing, which needs no scatter on the devices."""
    other = smoothing / classes
    is_label = labels[:, None] == torch.arange(classes, device=labels.device)
    return is_label * (1.0 - smoothing) + other
