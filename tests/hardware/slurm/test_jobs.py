"""launch/slurm.sbatch under real Slurm: two nodes, real training, and what ends a job early.

Whatever that was, the job goes on by itself, and its log is that of a run that was never stopped,
to the last bit.
"""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.hardware.slurm.cluster import KILL_WAIT_SECONDS, until
from tests.support.cli import ALL_DIGITS, TINY_MODEL, TINY_RUN
from tests.support.launching import TORCHRUN, start, succeed

pytestmark = pytest.mark.slurm

# A quarter of a minute of training, at least: time for Slurm to act.
RUN = [
    "--data_dir",
    str(ALL_DIGITS),
    "--hflip",
    "0",
    *TINY_MODEL,
    *TINY_RUN,
    *"--batch_size 128 --num_epochs 14 --max_steps 150 --mlp_dropout 0.1 --num_workers 1 "
    "--test_epoch_interval 4 --ckpt_epoch_interval 99".split(),
]
COMPARED = "step epoch loss lr grad_norm val_loss val_top1 val_images".split()
LONGER = "--num_epochs 50 --max_steps 500".split()
STOPPED = r"^training stopped by SIGTERM: step (\d+),"


def trained(folder: Path) -> list[dict]:
    """What a run computed, without the times it took."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{name: record[name] for name in COMPARED if name in record} for record in records]


def reach_step(job, folder: Path, step: int) -> None:
    def reached() -> bool:
        file = folder / "metrics.jsonl"
        return file.exists() and f'"step": {step},' in file.read_text()

    until(reached, 120, f"step {step}", lambda: job.output)


def stopped_at(job) -> list[str]:
    """The steps after which the job was stopped with a checkpoint; and it resumed just there."""
    steps = re.findall(STOPPED, job.output, re.MULTILINE)
    assert re.findall(r"at step (\d+), epoch", job.output) == steps, job.output
    return steps


def torchrun(folder: Path, *flags: str) -> list[dict]:
    """The same number of processes on one machine, without Slurm."""
    succeed(start(TORCHRUN, *RUN, "--ckpt_dir", folder, *flags, NPROC_PER_NODE="2"))
    return trained(folder)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return torchrun(tmp_path_factory.mktemp("uninterrupted"))


@pytest.fixture
def submit(cluster, tmp_path):
    jobs = []

    def submit(options="", *flags):
        folder = tmp_path / "run"
        jobs.append(
            cluster.submit(tmp_path / "output", *RUN, "--ckpt_dir", folder, *flags, options=options)
        )
        return jobs[-1], folder

    yield submit
    for job in jobs:
        job.end()


def test_completes(submit, uninterrupted):
    job, folder = submit()
    job.wait("COMPLETED")
    assert job.field("ExitCode") == "0:0"
    assert job.field("NodeList") == "node[1-2]"
    assert trained(folder) == uninterrupted
    assert job.output.count("training completed: step 150") == 1


@pytest.mark.parametrize("partition", ["normal", "strict"])
def test_preempted(partition, cluster, submit, uninterrupted):
    """`strict` gives no time before it ends the job, but for Slurm's KillWait."""
    job, folder = submit(f"--partition={partition}")
    reach_step(job, folder, 20)
    cluster.run(
        *"sbatch --wait --partition=urgent --nodes=2 --gpus-per-node=8 --output=/dev/null".split(),
        "--wrap=srun true",
    )
    job.wait("COMPLETED")
    assert job.field("Restarts") == "1"
    assert len(stopped_at(job)) == 1
    assert trained(folder) == uninterrupted


def test_time_limit(cluster, submit, tmp_path):
    """The script's own --signal. Slurm looks for limits every half a minute."""
    job, folder = submit("", *LONGER)
    reach_step(job, folder, 20)
    cluster.run("scontrol", "update", f"JobId={job.number}", "EndTime=now+90")
    job.wait("PENDING")
    cluster.run("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    job.wait("COMPLETED", seconds=480)
    assert job.field("Restarts") == "1"
    assert "the time limit is near, stopping job" in job.output
    assert len(stopped_at(job)) == 1
    assert trained(folder) == torchrun(tmp_path / "uninterrupted", *LONGER)


def test_killed_rank(submit, uninterrupted):
    """Slurm does not notice: torchrun starts all ranks of both nodes again."""
    job, folder = submit("", "--ckpt_step_interval", "10")
    reach_step(job, folder, 25)
    os.kill(job.rank(1), signal.SIGKILL)
    job.wait("COMPLETED")
    assert job.field("Restarts") == "0"
    assert "step_20 at step 20, epoch 2" in job.output
    assert trained(folder) == uninterrupted


def test_fewer_nodes_and_more(cluster, submit, tmp_path, monkeypatch):
    """It goes on with what is left, in the job, and is requeued when a node is there again."""
    for name, value in {"ELASTIC": 1, "ELASTIC_WAIT": 3, "ELASTIC_POLL": 5}.items():
        monkeypatch.setitem(cluster.variables, name, str(value))
    flags = [*LONGER, "--mlp_dropout", "0"]  # masks depend on the number of processes
    job, folder = submit("--no-kill", "--ckpt_step_interval", "10", *flags)
    reach_step(job, folder, 25)
    cluster.lose_node("node2")
    reach_step(job, folder, 40)
    assert (job.field("JobState"), job.field("NodeList")) == ("RUNNING", "node1")
    cluster.repair_node("node2")
    job.wait("COMPLETED")
    assert (job.field("Restarts"), job.field("NodeList")) == ("1", "node[1-2]")
    assert "step_20 at step 20, epoch 2" in job.output
    (stopped,) = re.findall(STOPPED, job.output, re.MULTILINE)
    assert f"at step {stopped}, epoch" in job.output  # no step was lost
    uninterrupted = torchrun(tmp_path / "uninterrupted", *flags)
    for found, expected in zip(trained(folder), uninterrupted, strict=True):
        # On one node sums are of another order: 500 steps make more of it than 1e-5.
        assert found == pytest.approx(expected, rel=1e-5 if found["step"] <= 30 else 1e-3)


@pytest.mark.parametrize(
    ("lost", "variables", "options"),
    [
        ("node2", {}, ""),
        ("node2", {"ELASTIC": "2", "JOIN_TIMEOUT": "60"}, "--no-kill"),  # too few are left
        ("node1", {"ELASTIC": "1"}, "--no-kill"),  # the batch script was there
    ],
)
def test_requeued_without_a_node(
    lost, variables, options, cluster, submit, uninterrupted, monkeypatch
):
    for name, value in variables.items():
        monkeypatch.setitem(cluster.variables, name, value)
    job, folder = submit(options, "--ckpt_step_interval", "10")
    reach_step(job, folder, 25)
    cluster.lose_node(lost)
    job.wait("PENDING")
    cluster.repair_node(lost)
    job.wait("COMPLETED")
    assert (job.field("Restarts"), job.field("NodeList")) == ("1", "node[1-2]")
    assert "step_20 at step 20, epoch 2" in job.output
    assert trained(folder) == uninterrupted


@pytest.mark.parametrize(("options", "state"), [("", "CANCELLED"), ("--signal=TERM", "FAILED")])
def test_cancelled(options, state, cluster, submit):
    job, folder = submit()
    reach_step(job, folder, 20)
    assert len(job.processes()) > 6  # batch script, srun; torchrun, rank and loader on both nodes
    cluster.run("scancel", *options.split(), job.number)
    job.wait(state)
    until(
        lambda: not job.processes(),
        KILL_WAIT_SECONDS + 30,
        "its processes to end",
        lambda: str(job.processes()),
    )
    (step,) = re.findall(STOPPED, job.output, re.MULTILINE)
    assert (folder / f"step_{step}" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("variables", "flags", "told"),
    [
        ({}, [], "--ckpt_dir is missing"),
        *(
            ({"ELASTIC": wrong}, ["--ckpt_dir", "run"], f"ELASTIC={wrong} must be a whole number")
            for wrong in ("0", "3", "1:2", "-1")
        ),
        ({"ELASTIC": "1", "ELASTIC_POLL": "5s"}, ["--ckpt_dir", "run"], "ELASTIC_POLL=5s must be"),
    ],
)
def test_mistakes(variables, flags, told, cluster, tmp_path, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setitem(cluster.variables, name, value)
    job = cluster.submit(tmp_path / "output", "--fake_data", *flags)
    job.wait("FAILED")
    assert job.field("ExitCode") == "2:0"
    (line,) = job.output.splitlines()
    assert line.startswith(f"slurm.sbatch: error: {told}")


def test_wrong_flag(submit):
    """A line a node, as on one alone something may be wrong; no second attempt."""
    job, folder = submit("", "--batch_size", "127")
    job.wait("FAILED")
    assert job.field("Restarts") == "0"
    said = re.findall(r"^run_vit_training.py: error: (.*)", job.output, re.MULTILINE)
    assert (
        said == ["--batch_size 127 (global) is not a multiple of the 2 devices: use 126 or 128"] * 2
    )
    assert not folder.exists()
