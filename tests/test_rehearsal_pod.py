"""The whole chain on a rehearsed pod: launch.xla_dist, four hosts, a lost one, the restart."""

import os
import signal
from pathlib import Path

import pytest

from tests.cli import ROOT, Result, train_tiny
from tests.pod_stand_in import StandIn, running_with
from tests.rehearsal.slice_ import Slice
from tests.rehearsed import Rehearsal, tiny
from tests.test_launch_gpu import finish

FOUR_HOSTS = Slice("v5litepod-4", (2, 2, 1), (1, 1, 1))


def lose(pod: StandIn, worker: int) -> None:
    """SIGKILL to the program on a worker."""
    home = f"{pod.folder}/worker_{worker}"
    for path in Path("/proc").glob("[0-9]*"):
        try:
            of_worker = f"HOME={home}".encode() in (path / "environ").read_bytes().split(b"\0")
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if of_worker and words[1:2] == [b"run_vit_training.py"]:
            os.kill(int(path.name), signal.SIGKILL)


@pytest.mark.rehearse
def test_a_lost_host_is_made_up_for(tmp_path):
    (tmp_path / "slice").mkdir()
    slice_, pod = Rehearsal(FOUR_HOSTS, tmp_path / "slice"), StandIn(tmp_path)
    pod.variables |= slice_.variables()
    pod.variables["PYTHONPATH"] += f":{ROOT}"
    run, flags = tmp_path / "run", ("--ckpt_step_interval", "5", "--max_steps", "25")
    xla_dist = ("--workdir", ROOT, "--grace", "2", "--max_restarts", "1")
    launched = pod.launch("python3", "run_vit_training.py", *tiny(run), *flags, flags=xla_dist)
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
    slice_.close()
    assert [record["step"] for record in Result(run).records if "loss" in record] == [*range(1, 26)]
    for name in ("loss", "grad_norm"):
        assert Result(run).column(name) == pytest.approx(reference.column(name), rel=1e-6)
    assert not running_with("REHEARSAL", str(slice_.description))
