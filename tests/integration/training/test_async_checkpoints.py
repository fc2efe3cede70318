"""Checkpoints that are written asynchronously: what they hold, and what may go wrong meanwhile."""

import re
import subprocess
import sys
import time

import pytest
import torch

from tests.support.checkpoints import assert_same_bits, left
from tests.support.cli import ROOT, Result, environment, tiny, train_tiny, train_tiny_gpu
from tests.support.marks import long
from tests.support.short_runs import QUICK, program
from training.checkpoints.format import damage
from training.checkpoints.state import Chunk, ShardedTensor, bytes_of
from training.processes.exchange import MinutesInterval

DISTURBED = "tests.fakes.disturbed_saves"
NOT_BESIDE = "--no_async_checkpoint"


@pytest.mark.long
@pytest.mark.parametrize(
    ("train", "flags", "how"),
    [
        (train_tiny, "", {"devices": 2}),
        (train_tiny, "--xla_fsdp nested --no-scan_blocks", {}),
        (train_tiny_gpu, "--precision bf16 --grad_accum_steps 2", {}),
        (train_tiny_gpu, "--run_without_fsdp --ckpt_best --test_step_interval 4", {}),
        (train_tiny_gpu, "--fsdp megatron --grad_ckpt none", {"processes": 2}),
    ],
    ids=["spmd", "nested", "fsdp2", "without fsdp", "megatron"],
)
def test_training_changes_nothing_of_what_is_being_written(
    train, flags, how, tmp_path, monkeypatch
):
    flags = [*flags.split(), *"--max_steps 12 --ckpt_step_interval 3 --mlp_dropout 0.1".split()]
    monkeypatch.setenv("SAVES", "slow 3 -1 1")
    beside = train(tmp_path / "beside", *flags, program=DISTURBED, **how)
    monkeypatch.setenv("SAVES", "slow 99 -1 0")
    waiting = train(tmp_path / "waiting", *flags, NOT_BESIDE, program=DISTURBED, **how)
    lines = beside.stdout.splitlines()
    said = next(n for n, line in enumerate(lines) if "/step_3 (" in line)
    assert any(re.match(r"epoch \d step 4,", line) for line in lines[:said])  # it was overtaken
    assert left(beside.ckpt_dir) == left(waiting.ckpt_dir)
    for step in left(beside.ckpt_dir):
        assert_same_bits(beside.ckpt_dir / f"step_{step}", waiting.ckpt_dir / f"step_{step}")
    assert beside.column("loss") == waiting.column("loss")
    assert beside.evaluations == waiting.evaluations


def test_a_stop_finishes_what_is_being_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SAVES", "slow 5 -1 2")
    monkeypatch.setenv("PROGRAM", "tests.fakes.signal_at_step")
    monkeypatch.setenv("SIGNAL_AT", "0 6 SIGTERM")
    stopped = program(tmp_path, "--ckpt_step_interval", 5, module=DISTURBED)
    assert stopped.returncode == 143, stopped.stderr
    assert re.findall(r"checkpoint: .*/(step_\d+) \(", stopped.stdout) == ["step_5", "step_6"]
    assert left(tmp_path) == [5, 6]
    assert damage(tmp_path / "step_5") is damage(tmp_path / "step_6") is None


@pytest.mark.parametrize("processes", [1, long(2)])
def test_a_disk_that_is_full_for_one_process_ends_all(processes, tmp_path, monkeypatch):
    monkeypatch.setenv("SAVES", f"full 4 {processes - 1} 0.5")
    flags = "--ckpt_step_interval 2 --max_failed_saves 2 --max_steps 99999 --num_epochs 9999"
    failed = program(tmp_path, *flags.split(), module=DISTURBED, processes=processes)
    if processes == 1:
        assert failed.returncode == 4, failed.stderr
    else:
        assert "exitcode  : 4 " in failed.stderr
    assert failed.stdout.count("training continues, 1 of --max_failed_saves 2 failed in a row") == 1
    assert "step_4 could not be written" in failed.stdout
    assert (
        failed.stderr.count(f"2 saves in a row have failed: the newest checkpoint is {tmp_path}")
        == 1
    )
    assert left(tmp_path) == [2]


@pytest.mark.long
def test_killed_while_writing(trained, tmp_path, monkeypatch):
    flags = "--ckpt_step_interval 5 --test_epoch_interval 1 --max_steps 13".split()
    whole = program(tmp_path / "whole", *flags)
    assert whole.returncode == 0, whole.stderr
    run = tmp_path / "run"
    monkeypatch.setenv("SAVES", "slow 10 -1 600")
    command = [sys.executable, "-m", DISTURBED, *tiny(run), *QUICK, "--backend", "cuda", *flags]
    # Without the one at the epoch's end, which would wait for that of step 10.
    command += ["--ckpt_epoch_interval", "9"]
    killed = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    try:
        metrics = run / "metrics.jsonl"
        while not metrics.exists() or "val_loss" not in metrics.read_text():
            assert killed.poll() is None
            time.sleep(0.05)
    finally:
        killed.kill()
        killed.wait()
    assert (run / "step_10").exists()
    resumed = program(run, *flags)
    assert f"resuming {run}/step_5 at step 5" in resumed.stdout
    assert Result(run).column("loss") == Result(tmp_path / "whole").column("loss")
    assert Result(run).evaluations == Result(tmp_path / "whole").evaluations
    assert [each["step"] for each in Result(run).evaluations] == [11, 13]


def test_a_write_that_hangs_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("SAVES", "slow 2 -1 3600")
    flags = "--ckpt_step_interval 2 --max_steps 20 --step_timeout_s 2".split()
    hung = program(tmp_path, *flags, module=DISTURBED)
    assert hung.returncode == 1
    assert "Timeout (0:00:02)!" in hung.stderr


def test_ctrl_c_twice_waits_for_no_write(tmp_path, monkeypatch):
    monkeypatch.setenv("SAVES", "slow 2 -1 3600")
    monkeypatch.setenv("PROGRAM", "tests.fakes.signal_at_step")
    monkeypatch.setenv("SIGNAL_AT", "0 3 SIGINT LATER SIGINT")
    ended = program(tmp_path, "--ckpt_step_interval", 2, module=DISTURBED)
    assert ended.returncode == 130
    assert ended.stderr.endswith("run_vit_training.py: interrupted\n")


@pytest.mark.long
def test_processes_save_after_the_same_step_by_the_clock(tmp_path):
    flags = "--num_epochs 99 --max_steps 30 --ckpt_minutes_interval 0.005 --ckpt_epoch_interval 99"
    done = train_tiny_gpu(tmp_path, *QUICK, *flags.split(), processes=2)
    steps = left(done.ckpt_dir)
    assert len(steps) > 2
    assert steps[-1] == 30
    for step in steps:
        assert damage(tmp_path / f"step_{step}") is None


# -- by the clock ---------------------------------------------------------------------


class OneHost:
    """A backend, as far as intervals know one."""

    is_main = True


@pytest.mark.parametrize(
    ("minutes", "at", "over"), [(0, 1e9, False), (1, 59.9, False), (1, 60, True)]
)
def test_minutes(minutes, at, over, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("training.processes.exchange.time.monotonic", lambda: now[0])
    interval = MinutesInterval(OneHost(), minutes)
    assert not interval.over()
    now[0] += at
    assert interval.over() is over
    interval.restart()
    assert not interval.over()


def test_bytes_of_a_state():
    parts = ShardedTensor([8, 4], torch.bfloat16, [Chunk((0, 0), torch.zeros(2, 4)) for _ in "ab"])
    assert bytes_of({"a": {"b": torch.zeros(3), "c": parts}}) == 3 * 4 + 2 * 8 * 4
