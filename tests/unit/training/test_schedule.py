"""The learning rate against PyTorch/XLA's ViT-10B example, timm's and PyTorch's schedulers."""

import math

import pytest
import torch
from timm.scheduler import CosineLRScheduler, StepLRScheduler, WSDLRScheduler
from torch.optim.lr_scheduler import LinearLR, StepLR

from tests.support.cli import DIGITS, TINY_MODEL, tiny
from tests.support.resolved import on_gpus
from tests.support.usage_error import told_in_one_line
from training.errors import UsageError
from training.schedule import Position, Schedule, make_schedule


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
    schedule = Schedule(peak, warmup, total)
    rates = [schedule.lr(step) for step in range(total)]
    assert rates == pytest.approx(example_rates(peak, warmup, total), rel=1e-12, abs=1e-18)


def test_zero_after_the_end():
    assert Schedule(1e-3, 10, 100).lr(100) == 0.0
    assert Schedule(1e-3, 100, 100).lr(100) == 0.0


@pytest.mark.parametrize(
    ("frozen", "warmup", "factors"),
    [
        (0, 0, [1, 1, 1]),
        (2, 0, [0, 0, 1, 1]),
        (2, 4, [0, 0, 0, 0.25, 0.5, 0.75, 1, 1]),
        (0, 2, [0, 0.5, 1]),
    ],
)
def test_heads_first(frozen, warmup, factors):
    schedule = Schedule(1.0, 0, 10, heads_first_steps=frozen, backbone_warmup_steps=warmup)
    assert [schedule.at(step).backbone for step in range(len(factors))] == factors


# -- with rates to begin and end at ---------------------------------------------------

PEAK, WARMUP, TOTAL, FIRST, LEAST = 1e-3, 7, 40, 1e-5, 2e-5
COMMON = (PEAK, WARMUP, TOTAL, FIRST, LEAST)


def rates_of_timm(scheduler, length=TOTAL - WARMUP, **how):
    """What a scheduler of timm gives before each update, stepped after each."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    scheduler = scheduler(
        optimizer, length, warmup_t=WARMUP, warmup_lr_init=FIRST, t_in_epochs=False, **how
    )
    rates = []
    for step in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step_update(step + 1)
    return rates


def rates_of(schedule):
    return [schedule.lr(step) for step in range(TOTAL)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            Schedule(*COMMON),
            lambda: rates_of_timm(CosineLRScheduler, lr_min=LEAST, warmup_prefix=True),
        ),
        (Schedule(*COMMON, "constant"), lambda: rates_of_timm(StepLRScheduler, 1, decay_rate=1.0)),
        *(
            (
                Schedule(*COMMON, shape, decay_steps),
                lambda n=decay_steps, fn=fn: rates_of_timm(
                    WSDLRScheduler, decay_t=n, decay_fn=fn, lr_min=LEAST
                ),
            )
            for decay_steps in (1, 12, TOTAL - WARMUP)
            for shape, fn in (("sqrt", "1-sqrt"), ("linear", "linear"), ("cosine", "cosine"))
        ),
    ],
)
def test_as_timm(schedule, expected):
    assert rates_of(schedule) == pytest.approx(expected(), rel=1e-9)
    end = PEAK if schedule.shape == "constant" else LEAST
    assert schedule.lr(TOTAL) == schedule.lr(10**9) == pytest.approx(end)


def test_linear_as_pytorch():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    scheduler = LinearLR(optimizer, 1.0, LEAST / PEAK, total_iters=TOTAL - WARMUP)
    for step in range(WARMUP, TOTAL + 5):
        found = Schedule(*COMMON, "linear").lr(step)
        assert found == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        scheduler.step()
    assert rates_of(Schedule(*COMMON, "linear"))[:WARMUP] == rates_of(Schedule(*COMMON))[:WARMUP]


def test_steps_as_timm():
    found = Schedule(PEAK, WARMUP, TOTAL, FIRST, shape="step", step_decay=(5, 0.7))
    expected = rates_of_timm(StepLRScheduler, 5, decay_rate=0.7, warmup_prefix=True)
    assert rates_of(found) == pytest.approx(expected, rel=1e-9)


def test_steps_as_in_pytorchs_fsdp_tutorial(tmp_path):
    """``StepLR(optimizer, step_size=1, gamma=0.7)``, stepped after each epoch of 11 steps."""
    flags = "--batch_size 128 --num_epochs 4 --warmup_steps 0 --lr 2e-3".split()
    decay = "--lr_schedule step --decay_epochs 1 --decay_rate 0.7".split()
    run = on_gpus([*tiny(tmp_path), "--backend", "cuda", "--max_steps", "100", *flags, *decay])
    schedule, last = make_schedule(run, 11, Position())
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2e-3)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(4):
        for step in range(11 * epoch, 11 * epoch + 11):
            assert schedule.lr(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        scheduler.step()
    assert last == 44


def test_a_warmup_longer_than_the_run(tmp_path):
    """Of 2 steps, the second trains with a 2,500th of --lr."""

    def schedule_of(steps):
        flags = ["--max_steps", "2", "--warmup_steps", str(steps), "--lr", "1e-2"]
        run = on_gpus([*tiny(tmp_path), "--backend", "cuda", *flags])
        return make_schedule(run, 11, Position())[0]

    schedule = schedule_of(2500)
    (warning,) = schedule.notes
    assert "the warmup takes 2,500 steps but the run ends at step 2: the learning" in warning
    assert "rate stays below 8e-06 and never reaches --lr 0.01; use fewer" in warning
    assert [schedule.lr(step) for step in (0, 1)] == pytest.approx([0, 4e-6])
    assert not schedule_of(2).notes


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--lr 1e-3 --min_lr 2e-3", "--min_lr 0.002 is above --lr 0.001"),
        ("--warmup_lr 1e-4 --warmup_steps 0", "--warmup_lr requires a warmup: --warmup_steps or"),
        ("--lr_schedule wsd", "--lr_schedule wsd requires --decay_steps"),
        (
            "--lr_schedule step --decay_epochs 0.001",
            "--decay_epochs 0.001 is less than one step: an epoch has 89 steps",
        ),
        ("--decay_rate 0.7", "--decay_rate 0.7 requires --lr_schedule step, not cosine"),
        ("--lr_schedule step --min_lr 1e-5", "--min_lr 1e-05 requires --lr_schedule"),
        (
            "--lr_schedule wsd --decay_steps 170 --warmup_steps 10 --num_epochs 2",
            "10 warmup steps and --decay_steps 170 exceed the 178 steps of the run",
        ),
    ],
)
def test_refused(flags, words, capsys, tmp_path):
    source = ["--data_dir", DIGITS, *TINY_MODEL, "--batch_size", "16", "--ckpt_dir", tmp_path / "n"]
    assert words in told_in_one_line(capsys, *source, *flags.split())
    assert not (tmp_path / "n").exists()


def test_a_decay_begins_where_a_stable_run_is(tmp_path):
    flags = [*tiny(tmp_path), "--backend", "cuda", "--batch_size", "128", "--lr", "1e-2"]
    flags += "--num_epochs 3 --warmup_steps 2 --lr_schedule wsd --min_lr 1e-4".split()

    def rates(first, max_steps, decay_steps):
        run = on_gpus([*flags, "--max_steps", str(max_steps), "--decay_steps", str(decay_steps)])
        schedule, last = make_schedule(run, 11, Position(first, 0, first * 128))
        return [schedule.lr(step) for step in range(first, last)]

    decayed = [1e-4 + (1e-2 - 1e-4) * (1 - math.sqrt(i / 8)) for i in range(8)]
    assert rates(6, 14, 8) == pytest.approx(decayed)
    assert rates(10, 14, 8) == pytest.approx(decayed[4:])
    assert rates(6, 9, 3)[0] == pytest.approx(1e-2)
    with pytest.raises(UsageError, match="2 warmup steps and --decay_steps 8 exceed the"):
        rates(6, 9, 8)
