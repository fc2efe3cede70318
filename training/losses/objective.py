"""What a model is trained for: what it is shown of a batch, and the loss of what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

from training.backend import Backend
from training.losses.distillation import Teacher, distillation_loss
from training.losses.mixing import Mixing
from training.losses.normalize import Normalize
from training.options.loss_config import LossConfig

if TYPE_CHECKING:
    from training.options.resolve import Run


class Targets(NamedTuple):
    """What a model is to answer."""

    labels: torch.Tensor
    """(images,), or their shares (images, classes)."""
    taught: torch.Tensor | None = None
    """What the teacher answers: logits (images, classes)."""


def _quietly(line: str) -> None: ...


class Objective:
    """Prepares images on the devices, as a part of the step, and says what is to become less."""

    def __init__(self, run: Run, backend: Backend, say: Callable[[str], None] = _quietly) -> None:
        """Put on the devices what it takes, and ``say`` what that is; to be made before the first
        step is recorded."""
        config = run.config.loss
        self.normalize = Normalize.of(run, backend.constant)
        self._mixing = None
        if config.mixes:
            self._mixing = Mixing(run, backend.constant, backend.image_rows)
        self._of_classes = config.mixes or config.bce_loss
        self._classes, self._smoothing = run.model.sizes.num_classes, config.smoothing
        self._loss = training_loss(config)
        self._teacher = Teacher(run, backend, say) if run.teacher else None
        self._taught_loss, self._alpha = distillation_loss(config), config.distillation_alpha

    def example(
        self, images: torch.Tensor, labels: torch.Tensor, pass_index: int
    ) -> tuple[torch.Tensor, Targets]:
        """Return what the model is shown of a micro-batch, and what it is to answer.

        ``pass_index``: the number of the pass since the start of training.
        """
        images = self.normalize(images)
        if self._of_classes:
            labels = smoothed(labels, self._classes, self._smoothing)
        if self._mixing is not None:
            mix = self._mixing.draw(pass_index)
            images, labels = self._mixing.images(images, mix), self._mixing.labels(labels, mix)
        return images, Targets(labels, self._teacher(images) if self._teacher else None)

    def loss(self, logits: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Return the mean loss of (images, classes) logits, a scalar in fp32."""
        logits = logits.float()
        loss = self._loss(logits, targets.labels)
        if targets.taught is None:
            return loss
        taught = self._taught_loss(logits, targets.taught)
        return (1 - self._alpha) * loss + self._alpha * taught


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
