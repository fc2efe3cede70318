"""The whole chain on rehearsed pods: launch.xla_dist, lost hosts and slices, the restart."""

import os
import signal
import subprocess

import pytest

from tests.fakes.pod import StandIn
from tests.fakes.rehearsal.slice_ import Slice
from tests.support.cli import ROOT, Result, tiny, train_tiny
from tests.support.curves import assert_same_curves
from tests.support.launching import finish
from tests.support.rehearsed import NO_KERNELS
from tests.support.running import running_with
from training.logs.records import read_events

FOUR_HOSTS = Slice("v5litepod-4", (2, 2, 1), (1, 1, 1))
TWO_SLICES = Slice("v5litepod-2", (2, 1, 1), (2, 1, 1), slices=2)


def lose(pod: StandIn, worker: int) -> None:
    """SIGKILL to the program on a worker."""
    for each in running_with(f"HOME={pod.folder}/worker_{worker}"):
        if each.words[1:2] == ["run_vit_training.py"]:
            os.kill(each.pid, signal.SIGKILL)


def lose_slice(pod: StandIn, number: int) -> None:
    """SIGKILL to all that runs on the only worker of a slice, which is not READY any more."""
    (pod.folder / f"state_pod-{number}").write_text("PREEMPTED")
    for each in running_with(f"HOME={pod.folder}/worker_{number}"):
        os.kill(each.pid, signal.SIGKILL)


def at_step(launched: subprocess.Popen[str], step: int) -> None:
    """Read stdout until this step is logged."""
    assert launched.stdout
    for line in launched.stdout:
        if f" step {step}," in line:
            return
    raise AssertionError(launched.communicate()[1])


@pytest.mark.rehearse
def test_a_lost_host_is_made_up_for(slice_of, pod_of, tmp_path):
    slice_, pod = slice_of(FOUR_HOSTS), pod_of(4)
    pod.variables |= slice_.variables()
    pod.variables["PYTHONPATH"] += f":{ROOT}"
    run, flags = tmp_path / "run", ("--ckpt_step_interval", "5", "--max_steps", "25")
    xla_dist = ("--workdir", ROOT, "--grace", "2", "--max_restarts", "1")
    command = ("run_vit_training.py", *tiny(run), *flags, *NO_KERNELS)
    launched = pod.launch("python3", *command, flags=xla_dist)
    at_step(launched, 12)
    lose(pod, 1)
    code, stdout, stderr = finish(launched)
    assert code == 0, stdout + stderr
    assert "restarting all workers; 0 restart(s) left" in stderr
    assert f"[worker 3] resuming {run}/step_" in stdout
    assert "[worker 3] training completed: step 25" in stdout
    reference = train_tiny(tmp_path / "cpu", *flags, devices=4)
    assert [record["step"] for record in Result(run).records if "loss" in record] == [*range(1, 26)]
    assert_same_curves(Result(run), reference, rel=1e-6)
    assert not slice_.left_running()


@pytest.mark.rehearse
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_slice_is_left_out_and_comes_back(lost, slice_of, pod_of, tmp_path):
    """Two slices, one, two again: the curve is that of an uninterrupted run.

    A pass has as many images a device on one slice. Growing loses no step. The metadata of both
    slices says that there are two, as that of slices created together does.
    """
    slice_, pod, run = slice_of(TWO_SLICES), pod_of(1), tmp_path / "run"
    pod.variables |= slice_.variables()
    pod.variables["PYTHONPATH"] += f":{ROOT}"
    flags = ("--mesh_dcn", "slices", "--micro_batch_size", "4", "--num_epochs", "9")
    flags += ("--max_steps", "120", "--ckpt_step_interval", "10", "--eps", "1e-4", "--lr", "1e-4")
    elastic = "--elastic 1 --elastic_wait 1 --elastic_poll 1 --max_restarts 1 --grace 2".split()
    command = ("python3", "run_vit_training.py", *tiny(run), *flags, *NO_KERNELS)
    launched = pod.launch(*command, flags=("--workdir", ROOT, *elastic), tpu="pod-0,pod-1")
    at_step(launched, 12)
    lose_slice(pod, lost)
    at_step(launched, 25)
    (pod.folder / f"state_pod-{lost}").unlink()
    code, stdout, stderr = finish(launched, timeout=900)
    assert code == 0, stdout + stderr
    assert f"starting on 1 of 2 slices: pod-{1 - lost}" in stderr
    assert "training completed: step 120" in stdout
    events = read_events(run)
    starts = [event for event in events if event["event"] == "start"]
    assert [event["devices"] for event in starts] == [4, 2, 4]
    assert starts[1]["step"] == 10
    stopped = [event["step"] for event in events if event.get("how") == "stopped"]
    assert stopped == [starts[2]["step"]]
    flags = tuple("2" if word == "slices" else word for word in flags)
    reference = train_tiny(tmp_path / "cpu", *flags, devices=4)
    assert_same_curves(Result(run), reference, rel=1e-5)
    assert not slice_.left_running()
