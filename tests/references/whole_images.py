"""Training in plain PyTorch on whole images, in this process: the reference for sharded images."""

from dataclasses import dataclass

import pytest
import torch

from tests.fakes.filled import filled
from tests.references.plain_checkpoint import convert
from tests.references.plain_steps import evaluate, train, warm_cosine
from tests.support.cli import DIGITS, TINY_RUN, Result
from tests.support.resolved import on_gpus

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
    how = run.config.optimizer
    model = filled(run.model, run.config.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=how.lr, eps=how.eps, weight_decay=how.weight_decay
    )
    losses, norms = train(model, optimizer, run, run.config.max_steps, warm_cosine(how))
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    return Training(losses, norms, evaluate(model, run)[0], parameters)


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
