"""A compilation ends with the program that asked for it, whatever ends that."""

import signal
import subprocess
import sys
import time

import pytest

from tests.support.cli import ROOT, environment
from tests.support.running import running_with

STEP = "--tpu_topology v5e:2x2 --model vit_large_patch16_224 --batch_size 256"


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [("--compile_only", signal.SIGKILL, -9), ("--plan --plan_dir {folder}", signal.SIGTERM, 143)],
)
def test_nothing_compiles_on_when_the_program_is_stopped(command, number, code, tmp_path):
    mark = f"COMPILES_FOR={tmp_path}"
    words = command.format(folder=tmp_path).split()
    run = subprocess.Popen(
        [sys.executable, "run_vit_training.py", *words, *STEP.split()],
        cwd=ROOT,
        env=environment() | dict([mark.split("=")]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def compilers():
        return [each for each in running_with(mark) if any("spawn_main" in w for w in each.words)]

    while not compilers():
        assert run.poll() is None
        time.sleep(0.1)
    run.send_signal(number)
    assert run.wait(60) == code
    deadline = time.monotonic() + 60
    while list(running_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [each.words for each in running_with(mark)] == []
