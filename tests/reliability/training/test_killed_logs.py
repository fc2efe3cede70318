"""The log of a run that was killed: no checkpoint has a step that the log lacks, or has twice."""

import random
import signal
import time

import pytest

from tests.reliability.faults.program import (
    SETUPS,
    STEPS,
    difference,
    last_step,
    last_step_printed,
    running,
)
from tests.support.cli import Result
from training.checkpoints.format import is_complete
from training.checkpoints.inventory import step_folders, step_of

KILLS = 8
DINO = (
    "--objective dino --class_token --dino_prototypes 16 --ibot_prototypes 16 "
    "--dino_head_hidden 16 --dino_head_bottleneck 8 --local_crops 2 --local_crop_size 8 "
    "--knn_every 7"
).split()


def _kill(program, rng, run, disk, parts):
    """Kill all processes at a random moment, mostly as a part of some step is complete."""
    wanted = min(STEPS - 2, last_step(run) + rng.randrange(1, 8))
    part, delay = rng.choice([*range(parts), None]), rng.uniform(0, 0.05)

    def reached():
        if part is None:
            return last_step_printed(program.output()) >= wanted
        steps = map(step_of, filter(is_complete, step_folders(disk / f"part_{part}")))
        return max(steps, default=0) >= wanted

    program.wait_until(lambda: last_step_printed(program.output()) > 0)
    program.members()  # known, they are killed at once
    assert program.wait_until(reached, 0.0005), program.output()
    time.sleep(0 if part is not None else delay)
    program.signal(signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("objective", [[], DINO], ids=["classify", "dino"])
@pytest.mark.parametrize("backend", ["xla", "fsdp2"])
def test_killed_again_and_again(backend, objective, tmp_path):
    setup, rng = SETUPS[backend], random.Random(f"{backend} {objective}")
    whole, run, disk = tmp_path / "whole", tmp_path / "run", tmp_path / "disk"
    flags = [*objective, "--local_ckpt_dir", str(disk), "--local_ckpt_step_interval", "1"]
    with running(setup.command(whole, *objective), tmp_path / "whole.log") as program:
        assert program.wait()
        assert program.root.returncode == 0, program.output()
    for number in range(KILLS):
        with running(setup.command(run, *flags), tmp_path / f"{number}.log") as program:
            _kill(program, rng, run, disk, setup.processes)
    with running(setup.command(run, *flags), tmp_path / "last.log") as program:
        assert program.wait()
        assert program.root.returncode == 0, program.output()
    assert difference(run, whole) is None
    assert {r["step"] for r in Result(run).records} == {*range(1, STEPS + 1)}
