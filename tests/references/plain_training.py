"""The reference for test_sharding: timm's model, PyTorch's AdamW, no XLA, no FSDP.

Prints one JSON line. Takes the clipping norm; everything else is as in tests/cli.py.
"""

import json
import math
import sys

import torch
import torch.nn.functional as F

from data.loader import Share
from data.source import open_data
from tests.cli import DIGITS, TINY_MODEL, TINY_RUN
from tests.references.normalized import normalized
from tests.references.plain_checkpoint import tiny_timm_model
from tests.resolved import on_xla
from tests.stand_ins.filled import filled
from training.backend import dataset_request


def main() -> None:
    max_norm = float(sys.argv[1])
    source = ["--data_dir", str(DIGITS), "--hflip", "0"]
    run = on_xla([*source, *TINY_MODEL, *TINY_RUN])
    how = run.config.optimizer
    model = tiny_timm_model()
    model.load_state_dict(filled(run.model, run.config.seed).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr, weight_decay=how.weight_decay)

    data, images = open_data(dataset_request(run)), run.config.data
    train_loader = data.train_loader(images.batch_size, Share())
    val_loader = data.val_loader(images.batch_size, Share())
    total = len(train_loader) * run.config.num_epochs
    losses, norms = [], []
    for step, (images, labels) in zip(range(6), train_loader.epoch(0), strict=False):
        warm = how.warmup_steps
        ratio = (
            step / warm
            if step < warm
            else 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))
        )
        for group in optimizer.param_groups:
            group["lr"] = how.lr * ratio
        loss = F.cross_entropy(model(normalized(images, run)), labels)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    model.eval()
    loss_sum = correct = count = 0.0
    with torch.no_grad():
        for images, labels in val_loader.epoch(0):
            images, labels = images[labels >= 0], labels[labels >= 0]
            logits = model(normalized(images, run))
            loss_sum += F.cross_entropy(logits, labels, reduction="sum").item()
            correct += (logits.argmax(1) == labels).sum().item()
            count += len(labels)
    print(
        json.dumps(
            {
                "loss": losses,
                "grad_norm": norms,
                "val_loss": loss_sum / count,
                "val_top1": 100 * correct / count,
            }
        )
    )


if __name__ == "__main__":
    main()
