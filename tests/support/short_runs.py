"""Runs of a few steps on the GPU backend, in one process: it starts at once."""

import subprocess

from tests.support.cli import ROOT, command_of, run_program, tiny, train_tiny_gpu

# Eleven steps an epoch, of 4 tokens an image; an evaluation has one batch.
QUICK = "--patch_size 8 --batch_size 128 --num_epochs 3 --ckpt_epoch_interval 1".split()
ENDLESS = "--num_epochs 99999 --max_steps 99999 --test_epoch_interval 9999".split()


def program(ckpt_dir, *flags, module="", **how):
    """The program on digits, which may fail: the finished process."""
    start = ["-m", module] if module else ["run_vit_training.py"]
    flags = (*tiny(ckpt_dir), *QUICK, "--backend", "cuda", *map(str, flags))
    return run_program(*start, *flags, **how)


def start(ckpt_dir, *flags, warm=False):
    """The program on digits in a process of its own, still running: what it says can be read."""
    command = ["run_vit_training.py", *tiny(ckpt_dir), *QUICK, "--backend", "cuda", *flags]
    words, variables = command_of(*command, warm=warm)
    return subprocess.Popen(
        words, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def mistake(done):
    """The one line of a mistake."""
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("run_vit_training.py")]
    assert "Traceback" not in done.stderr, done.stderr
    return line.removeprefix("run_vit_training.py: error: ")


def train_ten_steps(folder):
    """A finished run with checkpoints of steps 5 and 10."""
    return train_tiny_gpu(folder, *QUICK, "--max_steps", "10", "--ckpt_step_interval", "5")
