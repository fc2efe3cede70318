"""What a run tells whoever watches it: the mean loss of an epoch, the sharded units, the bar."""

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import termios
from statistics import mean

import pytest
import torch

from run_vit_training import read_flags
from tests.support.cli import ROOT, command_of, tiny, train_tiny, train_tiny_gpu
from tests.support.marks import long
from training.optimizers import add_loss

EPOCHS_OF_3 = (
    "--patch_size 8 --batch_size 400 --test_epoch_interval 99 --eval_batches 1 --num_epochs 3"
).split()
LOSS = re.compile(r"epoch (\d) step (\d+), mean training loss of the epoch: ([\d.]+)(.*)")


@pytest.mark.parametrize(
    ("train", "more"),
    [
        (train_tiny, {"devices": 2}),
        (train_tiny_gpu, {"processes": 2}),
        long(train_tiny, {"flags": "--xla_fsdp nested --grad_accum_steps 2"}),
        long(train_tiny_gpu, {"flags": "--grad_accum_steps 2"}),
    ],
)
def test_mean_loss_of_each_epoch(train, more, tmp_path):
    """Of all steps of the epoch that this start has trained, also of those that are not logged."""
    flags = [*EPOCHS_OF_3, *more.pop("flags", "").split(), "--max_steps"]
    first = train(tmp_path, *flags, "5", **more)
    assert "new compilation" not in first.stdout
    assert [(line[0], line[1], line[3]) for line in LOSS.findall(first.stdout)] == [
        ("1", "3", ""),
        ("2", "5", " over 2 of 3 steps"),
    ]
    second = train(tmp_path, *flags, "8", "--log_step_interval", "4", **more)
    found = {
        (r["epoch"], r["step"], r["epoch_loss_steps"]): r["epoch_loss"]
        for r in second.records
        if "epoch_loss" in r
    }
    assert list(found) == [(1, 3, 3), (2, 5, 2), (2, 6, 1), (3, 8, 2)]
    losses = {step: record["loss"] for step, record in second.steps.items()}
    assert found[1, 3, 3] == pytest.approx(mean(losses[step] for step in (1, 2, 3)), rel=1e-6)
    assert found[2, 5, 2] == pytest.approx(mean(losses[step] for step in (4, 5)), rel=1e-6)
    assert found[2, 6, 1] == pytest.approx(losses[6], rel=1e-6)


def test_a_loss_that_is_not_finite_does_not_count():
    sums = torch.zeros(2)
    for loss, skipped in ((2.0, 0.0), (float("nan"), 1.0), (float("inf"), 1.0), (3.0, 0.0)):
        sums = add_loss(sums, torch.tensor(loss), torch.tensor(skipped))
    assert sums.tolist() == [5.0, 2.0]


def best_flag(*words):
    return read_flags(words).run.checkpoints.ckpt_best


def test_words_of_ckpt_best(capsys):
    assert best_flag("--lr", "1") is None
    assert best_flag("--ckpt_best") == best_flag("--ckpt_best", "best") == "best"
    assert best_flag("--ckpt_best", "--lr", "1") == "best"
    assert best_flag("--ckpt_best", "lowest_loss") == "lowest_loss"
    with pytest.raises(SystemExit, match="2"):
        best_flag("--ckpt_best", "loss")
    assert "invalid choice: 'loss'" in capsys.readouterr().err


def test_the_checkpoint_with_the_lowest_loss_is_kept(tmp_path):
    flags = (
        "--backend cuda --test_step_interval 2 --keep_checkpoints 1 --lr 3e-2 --seed 0 "
        "--ckpt_best lowest_loss --max_steps"
    ).split()
    run = train_tiny_gpu(tmp_path, *flags, "8")
    losses, scores = (
        {record["step"]: record[name] for record in run.evaluations}
        for name in ("val_loss", "val_top1")
    )
    lowest = min(losses, key=losses.__getitem__)
    assert lowest not in (max(scores, key=scores.__getitem__), 8)
    assert {path.name for path in tmp_path.glob("step_*")} == {f"step_{lowest}", "step_8"}
    train_tiny_gpu(tmp_path, *flags, "9")  # a start later it is still kept
    assert {path.name for path in tmp_path.glob("step_*")} == {f"step_{lowest}", "step_9"}


@pytest.mark.parametrize(
    ("train", "more", "flags", "shards"),
    [
        (train_tiny, {"devices": 2}, "", 2),
        (train_tiny_gpu, {"processes": 2}, "", 2),
        long(train_tiny, {"devices": 2}, "--run_without_fsdp", 1),
        long(train_tiny, {}, "--xla_fsdp nested --flatten_parameters", 1),
        long(train_tiny_gpu, {"processes": 2}, "--zero_dp_strategy 0", 1),
    ],
)
def test_sharded_units_in_the_log(train, more, flags, shards, tmp_path):
    result = train(tmp_path, "--max_steps", "1", *flags.split(), **more)
    # A block of width 32: qkv, projection, MLP of 4 times the width, two norms.
    block = 3 * 32 * 33 + 32 * 33 + 2 * 4 * 32 * 32 + 5 * 32 + 2 * 2 * 32
    around = (
        int(re.search(r"model: .*, ([\d,]+) parameters", result.stdout)[1].replace(",", ""))
        - 2 * block
    )
    blocks, root = result.run_file["units"]
    assert (blocks["first"], blocks["last"], blocks["count"]) == ("blocks.0", "blocks.1", 2)
    assert (root["first"], root["count"]) == ("", 1)
    assert (blocks["parameters"], root["parameters"]) == (block, around)
    for unit in (blocks, root):  # parts may have padding
        assert 0 <= unit["on_device"] - unit["parameters"] // shards <= 128
    assert (
        f"sharded units: blocks.0 to blocks.1: {block:,} parameters each, "
        f"{blocks['on_device']:,} on each device, activation checkpointing full" in result.stdout
    )
    assert f"sharded unit: around the blocks: {around:,} parameters, " in result.stdout


def test_a_bar_on_a_terminal_leaves_log_lines_whole(tmp_path):
    """On stderr, with the time left; without a terminal there is none."""
    flags = "--backend cuda --max_steps 6 --test_step_interval 3 --eval_batches 2".split()
    reader, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    words, variables = command_of("run_vit_training.py", *tiny(tmp_path / "seen"), *flags)
    run = subprocess.Popen(
        words, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=terminal, text=True
    )
    os.close(terminal)
    drawn = b""
    with contextlib.suppress(OSError):  # once the program has closed the terminal
        while part := os.read(reader, 1 << 16):
            drawn += part
    os.close(reader)
    printed = run.communicate(timeout=60)[0]
    assert run.returncode == 0, drawn
    bars = re.findall(r"(\d+)/6 \[\d\d:\d\d<(\d\d:\d\d|\?), ", drawn.decode())
    assert bars[0] == ("0", "?")  # no rate while it compiles or warms up
    assert bars[-1] == ("6", "00:00")
    assert "evaluating" in drawn.decode()
    unseen = train_tiny_gpu(tmp_path / "unseen", *flags)
    assert "/6 [" not in unseen.stderr + unseen.stdout
    digits = re.compile(r"[\d.,]+|/\S+")
    shapes = [
        {digits.sub("N", line) for line in text.splitlines() if line.startswith("epoch ")}
        for text in (printed, unseen.stdout)
    ]
    assert shapes[0] == shapes[1]  # whole lines, without a trace of the bar
