"""Loss and top-1 accuracy over a whole validation set, each image counted once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from data.loader import BatchLoader
from data.sampler import PADDING
from training.backend import Backend
from training.prefetch import prefetch


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """Mean cross-entropy."""
    top1: float
    """Percent of images whose highest logit is their label."""
    images: int


@torch.no_grad()
def evaluate(model: nn.Module, loader: BatchLoader, backend: Backend) -> Evaluation:
    """Run the model over ``loader``; padding (label -1) counts for nothing."""
    model.eval()
    batches = []
    for images, labels in prefetch(loader.epoch(0), backend.put, loader.prefetch_depth):
        logits = model(images).float()
        loss = F.cross_entropy(logits, labels, ignore_index=PADDING, reduction="sum")
        correct = (logits.argmax(dim=-1) == labels).sum()
        present = (labels != PADDING).sum()
        batches.append(backend.sum(torch.stack([loss, correct.float(), present.float()])))
        backend.end_step()
    model.train()
    # Added up on the host: exact counts, and no graph that depends on the number of batches.
    values = backend.read({str(i): totals for i, totals in enumerate(batches)}).result()
    loss_sum, correct_sum, count = (sum(column) for column in zip(*values.values(), strict=True))
    return Evaluation(loss_sum / count, 100 * correct_sum / count, int(count))
