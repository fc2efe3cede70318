"""Classification of images in sequences that hold several."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from data.batch import PADDING, Batch
from training.backend import Backend
from training.objectives.classify import Classification

if TYPE_CHECKING:
    from training.resolve import Run


class SequenceClassification(Classification):
    """Classification of the images of sequences, which may have free slots: each image has the same
    weight, whichever sequence of the step it is in."""

    def __init__(self, run: Run, backend: Backend, say: Callable[[str], None]) -> None:
        super().__init__(run, backend, say)
        self._sequences = run.config.data.batch_size
        self._counts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def loss(self, model: nn.Module, batch: Batch, micro_batch_index: int) -> torch.Tensor:
        """Return a value whose mean over all replicas and micro-batches is the mean loss over the
        images of the step."""
        labels, in_step = batch["target"], batch["batch_images"]  # the same number in each sequence
        logits = model(self._input(batch)).float()
        losses = self._cross_entropy(
            logits,
            labels.flatten(),
            ignore_index=PADDING,
            reduction="sum",
            label_smoothing=self._smoothing,
        )
        self._counts.append((in_step.mean(), (batch["segment_ids"] > 0).sum().float()))
        return losses * (self._sequences / len(labels) / in_step).mean()

    def parts(self) -> dict[str, torch.Tensor]:
        """Return the number of images and of non-padding tokens in the step."""
        counts, self._counts = self._counts, []
        in_step, tokens = zip(*counts, strict=True)
        return {"images": in_step[0], "tokens": self._backend.sum(torch.stack(tokens).sum())}
