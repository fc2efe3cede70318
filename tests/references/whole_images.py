"""Training in plain PyTorch on whole images, in this process: the reference for sharded images."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from data.loader import Share
from data.source import open_data
from tests.cli import DIGITS, TINY_RUN, Result
from tests.references.normalized import normalized
from tests.references.plain_checkpoint import convert
from tests.resolved import on_gpus
from tests.stand_ins.filled import filled
from training.backend import dataset_request
from training.resolve import Run

STEPS = 5
# With so large an eps a gradient that is rounding alone, as a key bias's is, moves nothing.
SMALL = (
    "--hflip 0 --patch_size 4 --embed_dim 32 --num_heads 2 --num_blocks 2 --num_classes 10 "
    f"--batch_size 8 --num_workers 0 --warmup_steps 2 --lr 1e-2 --eps 1e-3 --max_steps {STEPS} "
    "--eval_batches 2"
).split()


@dataclass
class Training:
    """What came out: figures of each step, of the evaluation, and the last parameters."""

    losses: list[float]
    norms: list[float]
    val_loss: float
    parameters: dict[str, torch.Tensor]


def train_whole(*flags: str) -> Training:
    """Train as the flags say, later ones winning; they may not say how images are sharded."""
    run = on_gpus(["--data_dir", str(DIGITS), *TINY_RUN, *SMALL, *flags])
    how, images = run.config.optimizer, run.config.data
    model = filled(run.model, run.config.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=how.lr, eps=how.eps, weight_decay=how.weight_decay
    )
    loader = open_data(dataset_request(run)).train_loader(images.batch_size, Share())
    total = len(loader) * run.config.num_epochs
    epochs = (loader.epoch(epoch) for epoch in range(run.config.num_epochs))
    losses, norms = [], []
    batches = itertools.islice(itertools.chain.from_iterable(epochs), run.config.max_steps)
    for step, (pixels, labels) in enumerate(batches):
        part = (step - how.warmup_steps) / (total - how.warmup_steps)
        ratio = step / how.warmup_steps if part < 0 else 0.5 * (1 + math.cos(math.pi * part))
        optimizer.param_groups[0]["lr"] = how.lr * ratio
        loss = F.cross_entropy(model(normalized(pixels, run)), labels)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), how.clip_grad_norm).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    return Training(losses, norms, _val_loss(run, model), parameters)


@torch.no_grad()
def _val_loss(run: Run, model: nn.Module) -> float:
    model.eval()
    loader = open_data(dataset_request(run)).val_loader(run.config.data.pass_size, Share())
    total = count = 0.0
    for pixels, labels in itertools.islice(loader.epoch(0), run.config.log.eval_batches or None):
        pixels, labels = pixels[labels >= 0], labels[labels >= 0]
        total += F.cross_entropy(model(normalized(pixels, run)), labels, reduction="sum").item()
        count += len(labels)
    return total / count


def assert_like_whole(result: Result, whole: Training, rel: float = 1e-5) -> None:
    """The same losses, gradient norms, evaluation and parameters of a finished run."""
    assert result.column("loss") == pytest.approx(whole.losses, rel=rel)
    assert result.column("grad_norm") == pytest.approx(whole.norms, rel=rel)
    assert result.evaluations[-1]["val_loss"] == pytest.approx(whole.val_loss, rel=rel)
    last = result.ckpt_dir / f"step_{len(whole.losses)}"
    found = convert(last, result.ckpt_dir / "plain.pt")["model"]
    assert found.keys() == whole.parameters.keys()
    for name, expected in whole.parameters.items():
        assert found[name].shape == expected.shape
        # Biases begin at 0, and are so small after these steps that rounding shows in one process.
        off = (found[name] - expected).norm() / expected.norm().clamp(min=0.1)
        assert off <= rel, (name, off.item())
