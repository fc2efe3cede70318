"""launch/torchrun.sh stopped and killed, with its processes."""

import os
import signal
import time

import pytest

from tests.support.cli import DIGITS, TINY_MODEL, TINY_RUN, copy_launcher
from tests.support.launching import TORCHRUN, finish, free_port, start, warm
from tests.support.marks import long
from tests.support.running import Running, running_with


@pytest.mark.parametrize("moment", ["start", long("training")])
def test_ranks_end_with_torchrun(moment, tmp_path):
    """Killed, it can tell them nothing; a restart would find them training in its folder."""
    endless = "--num_epochs 9999 --max_steps 99999 --num_workers 1 --test_epoch_interval 9999"
    source = ["--data_dir", DIGITS, "--ckpt_dir", tmp_path, *TINY_MODEL, *TINY_RUN]
    run = start(TORCHRUN, *source, *endless.split(), NPROC_PER_NODE="2", STOPPED_RUN=str(tmp_path))
    mark, metrics = f"STOPPED_RUN={tmp_path}", tmp_path / "metrics.jsonl"

    def left() -> list[Running]:
        """Every process of the run: ranks and their loaders have its folder in their arguments, and
        so does what torchrun has just forked."""
        return [each for each in running_with(mark) if str(tmp_path) in each.words]

    if moment == "training":
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            assert run.poll() is None
            time.sleep(0.1)
        assert len(left()) >= 5  # torchrun, two ranks, a loader of each
    while len(left()) < 3:
        assert run.poll() is None
        time.sleep(0.01)
    run.kill()
    finish(run)
    deadline = time.monotonic() + 60
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left() == []


@pytest.mark.long
@pytest.mark.parametrize("nodes", [1, 2])
def test_checkpoint_may_take_longer_than_torchrun_waits(nodes, tmp_path):
    """It kills its processes 30 s after SIGTERM; a big model may need more, here 33 s."""
    copy_launcher(tmp_path)
    (tmp_path / "run_vit_training.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(33)\n"
        "    pathlib.Path('saved' + os.environ['RANK']).touch()\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "pathlib.Path('started' + os.environ['RANK']).touch()\n"
        "time.sleep(600)\n"
    )
    several = {"NNODES": str(nodes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    runs = [
        start(
            tmp_path / "launch" / "torchrun.sh",
            cwd=tmp_path,
            NPROC_PER_NODE="1",
            **(several | {"NODE_RANK": str(rank)} if nodes > 1 else {}),
        )
        for rank in range(nodes)
    ]
    while len(list(tmp_path.glob("started*"))) < nodes:
        assert runs[0].poll() is None
        time.sleep(0.1)
    for run in runs:
        run.send_signal(signal.SIGTERM)
    for rank, run in enumerate(runs):
        code, _, stderr = finish(run)
        assert code == 143
        assert stderr.endswith("torchrun.sh: ended by SIGTERM\n")
        assert "Traceback" not in stderr
        assert (tmp_path / f"saved{rank}").exists()


@pytest.mark.parametrize(("nohup", "expected"), [(["nohup"], 0), ([], 129)])
def test_a_terminal_is_closed(nohup, expected, tmp_path):
    """Its shell sends SIGHUP to torchrun and to the processes; under nohup both ignore it."""
    copy_launcher(tmp_path)
    (tmp_path / "run_vit_training.py").write_text(
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    pathlib.Path('saved').touch()\n"
        "    sys.exit(129)\n"
        "signal.signal(signal.SIGHUP, save)\n"
        "pathlib.Path('started').touch()\n"
        "while not pathlib.Path('go').exists():\n"
        "    time.sleep(0.1)\n"
    )
    command = ["setsid", *nohup, tmp_path / "launch" / "torchrun.sh"]
    run = start(*command, cwd=tmp_path, NPROC_PER_NODE="1")
    while not (tmp_path / "started").exists():
        assert run.poll() is None
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGHUP)
    if nohup:
        (tmp_path / "go").touch()
    code, _, stderr = finish(run)
    assert code == expected, stderr
    assert (tmp_path / "saved").exists() == (not nohup)
    assert stderr.endswith("torchrun.sh: ended by SIGHUP\n") == (not nohup)


@pytest.mark.parametrize(("code", "starts"), [(1, 2), (2, 1), long(3, 1), long(4, 1)])
def test_only_what_a_restart_may_help_is_restarted(code, starts, tmp_path):
    """A crash is; a mistake, a loss that is not finite and a full folder come again."""
    copy_launcher(tmp_path)
    (tmp_path / "run_vit_training.py").write_text(f"print('started')\nraise SystemExit({code})\n")
    variables = {"NPROC_PER_NODE": "1", "MAX_RESTARTS": "1", **warm(tmp_path)}
    run = start(tmp_path / "launch" / "torchrun.sh", **variables)
    found, stdout, stderr = finish(run)
    assert found == code
    assert stdout.count("started") == starts
    assert ("ChildFailedError" in stderr) == (code == 1)  # torchrun's report
