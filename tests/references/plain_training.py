"""The reference for test_sharding: timm's model, PyTorch's AdamW, no XLA, no FSDP."""

import torch

from tests.fakes.filled import filled
from tests.references.plain_checkpoint import tiny_timm_model
from tests.references.plain_steps import evaluate, train, warm_cosine
from tests.support.cli import DIGITS, TINY_MODEL, TINY_RUN
from tests.support.resolved import on_xla


def train_plain(max_norm: float) -> dict[str, float | list[float]]:
    """Figures of a run as in tests/support/cli.py, with gradients clipped to this norm."""
    source = ["--data_dir", str(DIGITS), "--hflip", "0", "--clip_grad_norm", str(max_norm)]
    run = on_xla([*source, *TINY_MODEL, *TINY_RUN])
    how = run.config.optimizer
    model = tiny_timm_model()
    model.load_state_dict(filled(run.model, run.config.seed).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr, weight_decay=how.weight_decay)
    losses, norms = train(model, optimizer, run, 6, warm_cosine(how))
    val_loss, val_top1 = evaluate(model, run)
    return {"loss": losses, "grad_norm": norms, "val_loss": val_loss, "val_top1": val_top1}
