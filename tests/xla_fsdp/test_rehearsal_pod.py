"""The whole chain on a rehearsed pod: launch.xla_dist, four hosts, a lost one, the restart."""

import os
import signal

import pytest

from tests.cli import ROOT, Result, tiny, train_tiny
from tests.launch.test_launch_gpu import finish
from tests.rehearsal.slice_ import Slice
from tests.rehearsed import NO_KERNELS
from tests.running import running_with
from tests.stand_ins.pod_stand_in import StandIn
from tests.xla_fsdp.test_sharding import assert_same_curves

FOUR_HOSTS = Slice("v5litepod-4", (2, 2, 1), (1, 1, 1))


def lose(pod: StandIn, worker: int) -> None:
    """SIGKILL to the program on a worker."""
    for each in running_with(f"HOME={pod.folder}/worker_{worker}"):
        if each.words[1:2] == ["run_vit_training.py"]:
            os.kill(each.pid, signal.SIGKILL)


@pytest.mark.rehearse
def test_a_lost_host_is_made_up_for(slice_of, tmp_path):
    slice_, pod = slice_of(FOUR_HOSTS), StandIn(tmp_path)
    pod.variables |= slice_.variables()
    pod.variables["PYTHONPATH"] += f":{ROOT}"
    run, flags = tmp_path / "run", ("--ckpt_step_interval", "5", "--max_steps", "25")
    xla_dist = ("--workdir", ROOT, "--grace", "2", "--max_restarts", "1")
    command = ("run_vit_training.py", *tiny(run), *flags, *NO_KERNELS)
    launched = pod.launch("python3", *command, flags=xla_dist)
    assert launched.stdout
    for line in launched.stdout:
        if " step 12," in line:
            break
    lose(pod, 1)
    code, stdout, stderr = finish(launched)
    assert code == 0, stdout + stderr
    assert "starting all workers again; 0 restart(s) left" in stderr
    assert f"[worker 3] resuming {run}/step_" in stdout
    assert "[worker 3] training completed: step 25" in stdout
    reference = train_tiny(tmp_path / "cpu", *flags, devices=4)
    assert [record["step"] for record in Result(run).records if "loss" in record] == [*range(1, 26)]
    assert_same_curves(Result(run), reference, rel=1e-6)
    assert not slice_.left_running()
