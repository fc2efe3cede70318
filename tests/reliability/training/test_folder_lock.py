"""One job a folder: the lock, which goes with the process that holds it."""

import errno
import json
import os
import subprocess
import sys

import pytest

from launch import is_crash
from tests.support.checkpoints import HOLD
from tests.support.cli import ROOT
from training.checkpoints.inventory import is_restart
from training.errors import RunFailed, UsageError
from training.files import FolderLock, check_same_folder
from training.start import enter_folder

pytestmark = pytest.mark.fast


@pytest.fixture
def holder(tmp_path):
    """Another process that has the lock."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_the_second_job_is_refused_and_a_killed_one_leaves_no_lock(holder, tmp_path, monkeypatch):
    monkeypatch.setattr("training.files._PATIENCE_S", 0.05)
    lock = FolderLock(tmp_path)
    with pytest.raises(UsageError, match=f"is in use by process {holder.pid} on .*: stop that run"):
        lock.acquire(is_restart=False)
    holder.kill()
    token = FolderLock(tmp_path).acquire(is_restart=False)
    check_same_folder(tmp_path, token)
    assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_what_the_lock_file_says_may_be_anything(holder, tmp_path, monkeypatch):
    monkeypatch.setattr("training.files._PATIENCE_S", 0.02)
    good = {"pid": 1, "host": "here", "since": "today"}
    for content in ("[]", "{}", "3", "\0", '{"pid":' * 500, good | {"pid": [1]}, good):
        text = content if isinstance(content, str) else json.dumps(content | {"host": "\x1b[31m"})
        (tmp_path / ".lock").write_text(text)
        with pytest.raises(UsageError, match=r"is in use by (another job|process .*): stop") as end:
            FolderLock(tmp_path).acquire(is_restart=False)
        assert str(end.value).isprintable()


def enter(folder):
    enter_folder(folder, FolderLock(folder), is_restart=is_restart(folder), is_main=True)


def test_a_restart_may_come_before_a_lost_machine_lets_go(holder, tmp_path, monkeypatch):
    """Its launcher starts the job again, as after a crash."""
    (tmp_path / "run.json").write_text('{"job": "mine"}')
    monkeypatch.setattr("training.files._PATIENCE_S", 0.02)
    monkeypatch.setattr("training.files._RESTART_PATIENCE_S", 0.05)
    for job, error in (("mine", RunFailed), ("another", UsageError)):
        monkeypatch.setenv("RUN_JOB_ID", job)
        with pytest.raises(error, match=f"is in use by process {holder.pid} on ") as raised:
            enter(tmp_path)
        if error is RunFailed:
            assert is_crash(raised.value.exit_code)
    holder.kill()
    monkeypatch.setenv("RUN_JOB_ID", "mine")
    enter(tmp_path)


def test_a_child_does_not_inherit_the_lock(tmp_path, monkeypatch):
    """Else loader processes that outlive a killed run for a moment would keep it."""
    monkeypatch.setattr("training.files._PATIENCE_S", 0.02)
    lock = FolderLock(tmp_path)
    lock.acquire(is_restart=False)
    if (child := os.fork()) == 0:
        try:
            FolderLock(tmp_path).acquire(is_restart=False)
            os._exit(1)
        except UsageError:
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lock.release()


def test_a_file_system_without_locks_refuses_nothing(tmp_path, monkeypatch):
    def lockf(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", lockf)
    FolderLock(tmp_path).acquire(is_restart=False)


def test_another_folder_under_the_same_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("training.files._VISIBLE_WITHIN_S", 0.0)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    token = FolderLock(tmp_path / "a").acquire(is_restart=False)
    FolderLock(tmp_path / "b").acquire(is_restart=False)
    for folder in (tmp_path / "b", tmp_path / "missing"):
        with pytest.raises(UsageError, match="is not the same folder as in the first process"):
            check_same_folder(folder, token)
