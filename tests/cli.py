"""Run the real command line and read what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "datasets" / "digits"

TINY_MODEL = (
    "--image_size 16 --patch_size 4 --embed_dim 32 --num_heads 2 --num_blocks 2 --num_classes 10"
).split()
TINY_RUN = (
    "--batch_size 16 --num_epochs 2 --warmup_steps 4 --lr 1e-2 --num_workers 0 "
    "--log_step_interval 1 --max_steps 6"
).split()


@dataclass
class Result:
    """A finished run: what it printed, what it left in --ckpt_dir."""

    stdout: str
    ckpt_dir: Path

    @property
    def records(self) -> list[dict]:
        lines = (self.ckpt_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def steps(self) -> dict[int, dict]:
        return {r["step"]: r for r in self.records if "loss" in r}

    @property
    def evaluations(self) -> list[dict]:
        return [r for r in self.records if "val_loss" in r]

    @property
    def run_file(self) -> dict:
        return json.loads((self.ckpt_dir / "run.json").read_text())

    def column(self, name: str) -> list[float]:
        return [record[name] for _, record in sorted(self.steps.items())]


HIDE_GPUS = True
"""Tests run on the CPU, in as many processes as they like; those in tests/gpu set this."""


def environment() -> dict[str, str]:
    """XLA on the CPU, and quick compilation: the tests' programs run a few steps only."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if HIDE_GPUS else {}
    unset = {"CPU_NUM_DEVICES", "PJRT_DEVICE", "XLA_FLAGS"}
    kept = {key: value for key, value in os.environ.items() if key not in unset}
    return kept | {
        **hidden,
        "PJRT_DEVICE": "CPU",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "OMP_NUM_THREADS": "1",  # as torchrun sets it: the tests share a few cores
    }


def run_program(
    *command: str, processes: int = 1, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """A Python program; by torchrun if in several processes."""
    if processes > 1:
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {processes}"
        command = (*torchrun.split(), *command)
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=timeout, check=False,
    )  # fmt: skip


def train_tiny(ckpt_dir: Path, *flags: str, devices: int = 1) -> Result:
    """Six steps of a two-block model on digits on XLA; must succeed. Later flags win."""
    return _train(ckpt_dir, "--cpu_devices", str(devices), *flags)


def train_tiny_gpu(ckpt_dir: Path, *flags: str, processes: int = 1, program: str = "") -> Result:
    """The same on the GPU backend: under torchrun, with gloo where there is no GPU.

    ``program`` is a module to run in place of run_vit_training.py.
    """
    return _train(ckpt_dir, "--backend", "cuda", *flags, processes=processes, program=program)


def train_in_turn(
    folder: Path, runs: list[str], *, processes: int, form: str = "fsdp2"
) -> dict[str, Result]:
    """Tiny runs with these flags on the GPU backend, in one start of the processes."""
    folders = {flags: folder / str(number) for number, flags in enumerate(runs)}
    commands = [
        ["--backend", "cuda", *_tiny(where), *flags.split()] for flags, where in folders.items()
    ]
    plan = folder / "runs.json"
    plan.write_text(json.dumps(commands))
    done = run_program("-m", "tests.in_turn", form, str(plan), processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    return {flags: Result(done.stdout, where) for flags, where in folders.items()}


def _tiny(ckpt_dir: Path) -> list[str]:
    source = ["--data_dir", str(DIGITS), "--hflip", "0", "--ckpt_dir", str(ckpt_dir)]
    return [*source, *TINY_MODEL, *TINY_RUN]


def _train(ckpt_dir: Path, *flags: str, processes: int = 1, program: str = "") -> Result:
    start = ["-m", program] if program else ["run_vit_training.py"]
    done = run_program(*start, *_tiny(ckpt_dir), *flags, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    return Result(done.stdout, ckpt_dir)
