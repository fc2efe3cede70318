"""Several processes of one run: they begin alike, in one folder that is theirs, or not at all."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.integration.launch.test_launch_gpu import free_port
from tests.support.checkpoints import left
from tests.support.cli import (
    DIGITS,
    ROOT,
    TINY_MODEL,
    TINY_RUN,
    WARM_PYTHON,
    environment,
    warm_python,
)
from tests.support.short_runs import ENDLESS, QUICK, program, start


def processes(*each, timeout=120, grace=20, prefix=(), last_root=ROOT):
    """Processes of one run, each with flags and a folder of its own: (flags, folder).

    As torchrun does, ends the others ``grace`` seconds after one has failed. ``prefix`` are words
    of a command that starts the last one, whose program is that of ``last_root``.
    """
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": str(len(each)),
        "WARM_PYTHON": warm_python(),
        "LOCAL_RANK": "0",
    }
    plain = (sys.executable, ROOT / WARM_PYTHON)
    started = [
        subprocess.Popen(
            [
                *(prefix if prefix and rank + 1 == len(each) else plain),
                (last_root if rank + 1 == len(each) else ROOT) / "run_vit_training.py",
                *["--data_dir", DIGITS, *TINY_MODEL, *TINY_RUN, *QUICK, "--backend", "cuda"],
                *flags,
            ],
            cwd=folder,
            env=environment() | common | {"RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, (flags, folder) in enumerate(each)
    ]
    deadline = time.monotonic() + timeout
    while any(p.poll() is None for p in started) and time.monotonic() < deadline:
        if any(p.poll() for p in started):
            deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.1)
    done = []
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        stdout, stderr = process.communicate()
        done.append(subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr))
    return done


def lines_of(done):
    return [
        line.removeprefix("run_vit_training.py: error: ")
        for each in done
        for line in each.stderr.splitlines()
        if line.startswith("run_vit_training.py: error: ")
    ]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--seed 7", "differ in --seed: 0 for process 0 on "),
        ("--data_dir {renamed}", "differ in the class folders: "),
        ("--data_dir {swapped}", "differ in the names or order of the files in train/: "),
    ],
)
def test_processes_that_differ_all_end(flags, told, tmp_path):
    renamed, swapped = (tmp_path / name / "digits" for name in ("renamed", "swapped"))
    for folder in (renamed, swapped):
        shutil.copytree(DIGITS, folder)
    for split in ("train", "val"):
        (renamed / split / "9").rename(renamed / split / "nine")
    image = next((swapped / "train" / "3").iterdir())
    image.rename(image.with_name("zzz.png"))
    other = flags.format(renamed=renamed, swapped=swapped).split()
    # The same name for the data in all processes: what is in it differs.
    if "--data_dir" in other:
        (tmp_path / "first").mkdir()
        (tmp_path / "first" / "digits").symlink_to(DIGITS)
        other, where = ["--data_dir", "digits"], os.path.dirname(other[1])
        each = ((other, tmp_path / "first"), (other, where))
    else:
        each = (([], tmp_path), (other, tmp_path))
    ckpt_dir = ["--ckpt_dir", str(tmp_path / "run"), "--max_steps", "2"]
    done = processes(*(([*flags, *ckpt_dir], folder) for flags, folder in each))
    assert [each.returncode for each in done] == [2, 2]
    (line,) = lines_of(done)
    assert told in line
    assert "process 1 on " in line
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_node_with_other_code(tmp_path):
    """As where one of the nodes has not pulled: its program is another one."""
    other = tmp_path / "program"
    for path in ROOT.glob("*.py"):
        other.mkdir(exist_ok=True)
        shutil.copy(path, other)
    for folder in (p for p in ROOT.iterdir() if (p / "__init__.py").exists()):
        shutil.copytree(folder, other / folder.name)
    with (other / "models" / "__init__.py").open("a") as file:
        file.write("# one line more\n")
    flags = ["--ckpt_dir", str(tmp_path / "run"), "--max_steps", "2"]
    done = processes((flags, tmp_path), (flags, tmp_path), prefix=[sys.executable], last_root=other)
    assert [each.returncode for each in done] == [2, 2]
    (line,) = lines_of(done)
    assert "differ in the program's code, by checksum: " in line
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_folders_that_nodes_do_not_share(tmp_path, monkeypatch):
    """The same relative name in two folders, as on disks of two nodes."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    flags = ["--ckpt_dir", "run", "--max_steps", "2"]
    done = processes((flags, tmp_path / "a"), (flags, tmp_path / "b"))
    assert [each.returncode for each in done] == [2, 2]
    (line,) = lines_of(done)
    assert line.startswith("process 1 on ")
    assert "is not the same folder as in the first process: use a folder that all" in line
    assert not list(tmp_path.rglob("step_*"))


@pytest.mark.long
def test_a_node_that_sees_other_checkpoints(run):
    """One folder, but for the newest checkpoint: on the second node another disk lies over it."""
    hide = 'mount -t tmpfs none "$1" && shift && exec "$@"'
    if subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("no right to mount anything")
    prefix = ["unshare", "-m", "sh", "-c", hide, "sh", str(run / "step_10"), sys.executable]
    flags = ["--ckpt_dir", str(run), "--max_steps", "12"]
    done = processes((flags, run), (flags, run), prefix=prefix)
    assert [each.returncode for each in done] == [2, 2]
    (line,) = lines_of(done)
    assert f"does not see the checkpoint {run}/step_10 that the first process is about" in line
    assert left(run) == [5, 10]


def test_a_mistake_on_one_process_alone_is_told(tmp_path):
    done = processes(([], tmp_path), (["--data_dir", "/does/not/exist"], tmp_path), grace=1)
    assert done[1].returncode == 2
    assert "/does/not/exist/train does not exist" in done[1].stderr


@pytest.mark.long
def test_sigkill_of_one_job_leaves_the_folder_free(run):
    first = start(run, *ENDLESS, "--num_workers", "2")
    metrics, before = run / "metrics.jsonl", len((run / "metrics.jsonl").read_text())
    while len(metrics.read_text()) <= before:
        assert first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert program(run, "--max_steps", "12").returncode == 0
