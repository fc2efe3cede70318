"""Training and evaluation in plain PyTorch, on the images of a run: what references share."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from data.batch import Batch, BatchShard
from data.open import open_data
from tools.self_check.plain import backward, clip_and_step, normalized
from training.config import OptimizerConfig
from training.data import dataset_request
from training.resolve import Run

Rate = Callable[[int, int], float]
"""The learning rate of a step, of so many in all."""


def warm_cosine(how: OptimizerConfig) -> Rate:
    """Half a cosine after a linear warmup from 0."""

    def rate(step: int, total: int) -> float:
        part = (step - how.warmup_steps) / (total - how.warmup_steps)
        if part < 0:
            return how.lr * step / how.warmup_steps
        return how.lr * 0.5 * (1 + math.cos(math.pi * part))

    return rate


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Run,
    steps: int,
    rate: Rate | None = None,
    bf16: bool = False,
) -> tuple[list[float], list[float]]:
    """The losses and gradient norms of the first steps, clipped; in bf16 under autocast."""

    def losses_of(step: int, batch: Batch) -> Iterator[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(normalized(batch["image"], run.config.data.preprocessing))
        yield F.cross_entropy(logits.float(), batch["target"])

    return train_by(losses_of, optimizer, run, steps, rate)


def train_by(
    losses_of: Callable[[int, Batch], Iterable[torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    run: Run,
    steps: int,
    rate: Rate | None = None,
) -> tuple[list[float], list[float]]:
    """The losses and gradient norms of the first steps, clipped. ``losses_of``: the parts of the
    mean loss of a step's batch."""
    request = dataset_request(run, labels=run.config.objective.uses_labels)
    loader = open_data(request).train_loader(run.config.data.batch_size, BatchShard())
    epochs = (loader.epoch(epoch) for epoch in range(run.config.num_epochs))
    batches = itertools.islice(itertools.chain.from_iterable(epochs), steps)
    losses, norms = [], []
    for step, batch in enumerate(batches):
        if rate:
            for group in optimizer.param_groups:
                lr = rate(step, len(loader) * run.config.num_epochs)
                group["lr"] = lr * group.get("lr_scale", 1)
        losses.append(sum(part.item() for part in backward(losses_of(step, batch))))
        norms.append(clip_and_step(optimizer, run.config.optimizer.clip_grad_norm).item())
    return losses, norms


@torch.no_grad()
def evaluate(model: nn.Module, run: Run) -> tuple[float, float]:
    """The mean loss on val/ and the percentage of images that are classified right."""
    model.eval()
    loader = open_data(dataset_request(run)).val_loader(
        run.config.data.global_micro_batch_size, BatchShard()
    )
    loss = right = count = 0.0
    for batch in itertools.islice(loader.epoch(0), run.config.log.eval_batches or None):
        present = batch["target"] >= 0
        images, labels = batch["image"][present], batch["target"][present]
        logits = model(normalized(images, run.config.data.preprocessing))
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(1) == labels).sum().item()
        count += len(labels)
    return loss / count, 100 * right / count
