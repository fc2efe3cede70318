"""The worker's side of ``launch.xla_dist``: runs the program, which never outlives its launcher.

xla_dist sends the source of this file along with the command, so a worker needs only Python 3.8.
The program's lifetime is tied to the connection's stdin: a line is the name of a signal for the
program's process group, and its end, after a lost connection or a dead launcher, stops the program.
Otherwise neither would reach the program: ssh forwards no signals, and sshd keeps programs running
when a connection is lost. Values of environment variables that may be secret come over stdin, too:
other users can read a command line.
"""

from __future__ import annotations  # for Python 3.8

import contextlib
import itertools
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator

JOB = "XLA_DIST_JOB"
"""The environment variable by which the program and all that it starts are found again."""
LOST = 254
"""The exit code of a connection that comes too late. (ssh's own errors end with 255.)"""
WAITS = "waiting for the values of --env"
"""What is said on stderr when a line of stdin is awaited: environment variables, as a JSON object.

They are sent then and not before, because gcloud may give its stdin to other ssh clients first."""


def main(task: dict) -> int:
    # Only the first connection of a run starts the program: after a break, gcloud makes another.
    try:
        is_first = claim(f"{task['job']}-{task['attempt']}")
    except OSError as error:
        say(f"error: {error}")
        return 2
    # What is left of this job, or of all.
    job = None if task["end_all"] else task["job"]
    left = processes(job)
    for number, seconds in ((signal.SIGTERM, task["grace"]), (signal.SIGKILL, 10)):
        deadline = time.monotonic() + seconds
        for process in processes(job):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        while processes(job) and time.monotonic() < deadline:
            time.sleep(0.1)
    if left:
        say(f"stopped {len(left)} process(es) left over from an earlier run")
    if not is_first:
        say("the connection to this worker was lost, and its program was stopped")
        return LOST
    variables, lines, signals = task["env"], stdin_lines(), []
    if task["awaits"]:
        say(WAITS)
        for line in lines:
            if line.startswith(b"{"):
                variables.update(json.loads(line))
                break
            signals.append(line)
        else:
            return LOST
    try:
        program = subprocess.Popen(
            task["command"],
            env={**os.environ, **variables, JOB: task["job"]},
            cwd=os.path.expanduser(task["workdir"]),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        say(f"error: cannot start {task['command'][0]}: {error}")
        return 127
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: send(program.pid, signal.SIGTERM))
    obeying = (program.pid, task["grace"], itertools.chain(signals, lines))
    threading.Thread(target=obey, args=obeying, daemon=True).start()
    assert program.stdout is not None
    assert program.stderr is not None
    pumps = [
        threading.Thread(target=pump, args=(source.fileno(), target), daemon=True)
        for source, target in ((program.stdout, 1), (program.stderr, 2))
    ]
    for thread in pumps:
        thread.start()
    code = program.wait()
    send(program.pid, signal.SIGKILL)  # what it leaves behind would hold the chips
    for thread in pumps:
        thread.join(10)  # unless a process that left the group holds the pipe
    # gcloud takes 255 for a broken connection, and would start the program again.
    return min(code if code >= 0 else 128 - code, LOST)


def claim(name: str) -> bool:
    """Return True for this user's first call with this name on this machine. Raises OSError, also
    if others can write to the folder that is used: they could keep the program from starting."""
    folder = os.path.join(tempfile.gettempdir(), f"xla_dist-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, mode=0o700)
    found = os.lstat(folder)
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users can write to {folder}: remove it")
    try:
        os.mkdir(os.path.join(folder, name))
    except FileExistsError:
        return False
    return True


def processes(job: str | None) -> list[int]:
    """Return this user's processes that xla_dist started here for ``job`` (None: for all)."""
    prefix = f"{JOB}=".encode()
    wanted = None if job is None else prefix + job.encode()
    result = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            for variable in file.read().split(b"\0"):
                if variable == wanted if wanted else variable.startswith(prefix):
                    result.append(int(name))
    return result


def stdin_lines() -> Iterator[bytes]:
    """Yield the lines of stdin. A buffered reader could not be left at exit."""
    rest = b""
    while data := os.read(0, 65536):
        *complete, rest = (rest + data).split(b"\n")
        yield from complete


def obey(group: int, grace: float, signals: Iterable[bytes]) -> None:
    """Send the signals of these names to the program's process group; end it after the last."""
    for name in signals:
        send(group, signal.Signals[name.decode()])
    send(group, signal.SIGTERM)
    time.sleep(grace)
    send(group, signal.SIGKILL)


def pump(source: int, target: int) -> None:
    """Copy output; if nobody reads it any more, drop it: the program must not die of writing."""
    broken = False
    while data := os.read(source, 65536):
        try:
            while data and not broken:
                data = data[os.write(target, data) :]
        except OSError:
            broken = True


def send(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"xla_dist: {text}\n".encode(errors="backslashreplace"))


if __name__ == "__main__":
    os._exit(main(json.loads(sys.argv[1])))  # at once: a thread still waits for stdin
