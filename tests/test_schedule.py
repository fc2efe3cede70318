"""The learning rate against PyTorch/XLA's ViT-10B example: its formula in PyTorch's scheduler."""

import math

import pytest
import torch

from training.schedule import WarmupCosine


def example_rates(peak, warmup, total):
    """Learning rates that torch's LambdaLR gives with the example's formula."""

    def ratio(step):
        if step < warmup:
            return step * 1.0 / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, ratio)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("peak", "warmup", "total"), [(1e-3, 10, 100), (3e-3, 0, 57), (1.0, 56, 57), (1e-3, 100, 40)]
)
def test_every_step(peak, warmup, total):
    schedule = WarmupCosine(peak, warmup, total)
    rates = [schedule.lr(step) for step in range(total)]
    assert rates == pytest.approx(example_rates(peak, warmup, total), rel=1e-12, abs=1e-18)


def test_zero_after_the_end():
    assert WarmupCosine(1e-3, 10, 100).lr(100) == 0.0
    assert WarmupCosine(1e-3, 100, 100).lr(100) == 0.0
