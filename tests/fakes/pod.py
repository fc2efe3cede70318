"""A pod whose workers are processes of this machine, behind tests/fakes/gcloud.py."""

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cli import ROOT, environment
from tests.support.launching import finish, script
from tests.support.running import running_with

REMOTE = ROOT / "tests" / "fakes" / "remote_program.py"


class StandIn:
    """A pod of four, and xla_dist in front of it."""

    def __init__(self, folder: Path, workers: int = 4) -> None:
        self.folder, self.logs, self.cwd = folder, folder / "logs", folder / "cwd"
        self.cwd.mkdir()
        (folder / "workers").write_text(str(workers))
        bin_dir = folder / "bin"
        bin_dir.mkdir()
        # Without packages (-S) it starts in two thirds of the time: it is called up to 100 times.
        stand_in = shlex.join([sys.executable, "-S", str(ROOT / "tests" / "fakes" / "gcloud.py")])
        script(bin_dir / "gcloud", f'exec {stand_in} "$@"')
        # Not a shim of pyenv, which would put its own folder before this one.
        script(bin_dir / "python3", f'exec {shlex.quote(sys.executable)} "$@"')
        self.variables = environment() | {
            "PATH": f"{bin_dir}:{os.environ['PATH']}",
            "STAND_IN": str(folder),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "PYTHONPATH": str(ROOT),
            "PIP_NO_INDEX": "1",
        }

    def start(
        self, *words: object, program: str = "launch.xla_dist", **variables: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", program, *map(str, words)],
            cwd=self.cwd,
            text=True,
            env=self.variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def launch(
        self, *command: object, flags: tuple = (), tpu: str = "pod", **more: str
    ) -> subprocess.Popen[str]:
        return self.start(f"--tpu={tpu}", "--log_dir", self.logs, *flags, "--", *command, **more)

    def run(self, *command: object, flags: tuple = (), tpu: str = "pod") -> tuple[int, str, str]:
        return finish(self.launch(*command, flags=flags, tpu=tpu))

    def calls(self) -> list[list[str]]:
        lines = (self.folder / "calls").read_text().splitlines()
        return [call for call in map(json.loads, lines) if "ssh" in call]

    def left_running(self) -> list[str]:
        """Commands of the processes that came from a worker's login, wherever they are now."""
        homes = [f"HOME={self.folder}/worker_{i}" for i in range(4)]
        return [" ".join(each.words) for each in running_with(*homes)]

    def received(self) -> dict[int, str]:
        """By worker, the signals that remote_program.py noted."""
        paths = {i: self.folder / f"worker_{i}" / "received" for i in range(4)}
        return {i: path.read_text() for i, path in paths.items() if path.exists()}

    def lose(self, number: int) -> None:
        """Slice ``number`` is gone, and with it the connections to its workers.

        The launcher may end one before it is killed here: it sees the end of another.
        """
        (self.folder / f"state_pod-{number}").write_text("PREEMPTED")
        workers = int((self.folder / "workers").read_text())
        for worker in range(number * workers, (number + 1) * workers):
            client = int((self.folder / f"worker_{worker}" / "client").read_text())
            with contextlib.suppress(ProcessLookupError):
                os.kill(client, signal.SIGKILL)

    def wait_until_gone(self) -> None:
        wait_until(lambda: not self.left_running())


@contextlib.contextmanager
def workers_here(*, alone: bool = False) -> Iterator[None]:
    """Workers of a pod run on this machine inside; with ``alone`` those of no other pod do.

    Whoever ends all that xla_dist has started needs that: all workers are of one machine and one
    user here, and tests run in several processes.
    """
    checkout = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(checkout, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
    finally:
        os.close(checkout)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120  # of a hang, not of slowness
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def read_until(process: subprocess.Popen[str], word: str, times: int) -> None:
    """Read stdout until ``word`` came so often."""
    assert process.stdout
    while times:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        times -= word in line


def gcloud_accepts(command: list[str], folder: Path) -> None:
    """Its parser takes the flags: with no account it fails later, with another code than 2."""
    if not shutil.which("gcloud"):
        pytest.skip("no gcloud is installed here")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=240,
        env=environment() | {"CLOUDSDK_CONFIG": str(folder), "CLOUDSDK_CORE_PROJECT": "none"},
    )
    assert done.returncode == 1, done.stderr
    assert "active account" in done.stderr
