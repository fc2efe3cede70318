"""Runs the workers of a pod as local ssh client processes: output, signals, exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from launch import CRASH_SECONDS, STOPS, is_crash, pod_worker, write_line

_LONGEST_LINE = 65536
"""The characters after which output without a line end is divided."""
_BAR_SECONDS = 10.0
"""The seconds between shown states of a progress bar, which end with \\r."""
GRACE_SECONDS = 120.0
"""The seconds that programs have to end by themselves, with a checkpoint perhaps."""
AS_ASKED = 128 + signal.SIGTERM
"""The exit code of a program that has written a checkpoint and ended because it was asked to."""
_SAME_SIGNAL_SECONDS = 0.5
"""A signal that comes again within these seconds is the same one: ``timeout`` passes on what the
terminal has sent to this program, too."""
_CLIENT_SECONDS = 15.0
"""The seconds that a client has to report that its program was killed; then it is disconnected."""


class Worker:
    """An ssh client to be run. Its stdin is held open: the far end stops the program when it
    closes."""

    client: subprocess.Popen[bytes]

    def __init__(
        self, index: int, place: str, command: Sequence[str], values: Mapping[str, str]
    ) -> None:
        """``index``: the worker's number over all slices. ``place``: which worker of which slice
        it is, as " (worker 0 of vit-1)"; "" if there is one slice. ``values``: the environment
        variables that the far end asks for."""
        self.index, self.name, self._command = index, f"worker {index}{place}", command
        self._values: Mapping[str, str] | None = values

    def start(self, pod: Pod) -> None:
        # In a session of its own: Ctrl-C would end the client, and tell the program nothing.
        self.client = subprocess.Popen(
            self._command,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        log = pod.open_log(self.index)
        threading.Thread(target=self._follow, args=(pod, log), daemon=True).start()

    def _follow(self, pod: Pod, log: IO[bytes]) -> None:
        def copy(source: IO[bytes], target: IO[str]) -> None:
            text = io.TextIOWrapper(source, "utf-8", "surrogateescape", newline="")
            shown = -_BAR_SECONDS
            while line := text.readline(_LONGEST_LINE):
                if line.endswith("\r"):
                    if not line.strip() or time.monotonic() - shown < _BAR_SECONDS:
                        continue
                    shown = time.monotonic()
                if self._values and line.rstrip().endswith(pod_worker.WAITS):
                    self._write(json.dumps(self._values))
                    self._values = None  # the program may print such a line
                    continue
                content = line.rstrip("\r\n").encode(errors="surrogateescape")
                with contextlib.suppress(OSError):  # a full disk here stops no training there
                    log.write(content + b"\n")
                pod.write(f"[worker {self.index}] {content.decode(errors='replace')}", target)

        assert self.client.stdout is not None
        assert self.client.stderr is not None
        with log:
            pairs = ((self.client.stdout, sys.stdout), (self.client.stderr, sys.stderr))
            readers = [threading.Thread(target=copy, args=streams) for streams in pairs]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
        code = self.client.wait()
        pod.events.put((self, code if code >= 0 else 128 - code))

    def send(self, number: int) -> None:
        """Send the program a signal, over the connection or as soon as there is one."""
        self._write(signal.Signals(number).name)

    def _write(self, line: str) -> None:
        assert self.client.stdin
        with contextlib.suppress(BrokenPipeError):
            os.write(self.client.stdin.fileno(), f"{line}\n".encode())


@dataclass(frozen=True)
class _Answer:
    """What ``ask`` of ``Pod.meanwhile`` has returned."""

    value: Any


@dataclass(frozen=True)
class Ending:
    """The wish that the programs of an attempt, if it still runs, write a checkpoint and end, to be
    started again otherwise."""

    attempt: int
    why: str


class Pod:
    """Runs all workers: ``run`` starts them, and returns when none is left."""

    def __init__(self, log_dir: Path, grace: float | None) -> None:
        """``grace``: the seconds between SIGTERM and SIGKILL; None: ``GRACE_SECONDS``, or after a
        crash ``CRASH_SECONDS``."""
        self.log_dir, self._grace = log_dir, grace
        self.events: queue.SimpleQueue[tuple[Worker, int] | int | _Answer | Ending]
        self.events = queue.SimpleQueue()
        """The ends of workers with their exit codes, signals to this process, and what its threads
        say: any may put one here."""
        self.stopped_by = 0
        """The signal to this process that has stopped the workers: they must not be restarted."""
        self.asked_to_end = False
        """Whether the programs of the newest ``run`` were asked to end by an ``Ending``."""
        self.failed_at = 0.0
        """When a worker of the newest ``run`` failed, or all were asked to end, in seconds since
        1970."""
        self._lacks_logs = False
        self._writing = threading.Lock()
        self._running: set[Worker] = set()
        self._deadline: tuple[float, int] | None = None
        """When to send SIGKILL; with 0 instead of the signal: when to disconnect."""
        for number in STOPS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, lambda number, frame: self.events.put(number))

    def open_log(self, index: int) -> IO[bytes]:
        """Open a worker's log or, if that cannot be written any more, /dev/null."""
        path = self.log_dir / f"worker_{index}.log"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW  # a link may lead anywhere
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            return open(os.open(path, flags, 0o666), "ab", buffering=0)
        except OSError as error:
            if not self._lacks_logs:
                self.say(
                    f"warning: cannot write logs to {self.log_dir} ({error.strerror}), "
                    "continuing without logs"
                )
            self._lacks_logs = True
            return open(os.devnull, "ab", buffering=0)

    def write(self, text: str, target: IO[str]) -> None:
        with self._writing:
            write_line(text, target)

    def say(self, text: str) -> None:
        self.write(f"xla_dist: {text}", sys.stderr)

    def meanwhile(self, ask: Callable[[], Any]) -> Any:
        """Return what ``ask`` returns, from a thread; None as soon as a signal comes."""
        threading.Thread(target=lambda: self.events.put(_Answer(ask())), daemon=True).start()
        while not isinstance(event := self.events.get(), _Answer):
            if isinstance(event, int):
                self.stopped_by = event
                return None
        return event.value

    def run(self, workers: Sequence[Worker], attempt: int) -> int:
        """Run the workers; return 0, or the exit code of the first one that failed.

        ``AS_ASKED`` if none has, and an ``Ending`` has ended them.
        """
        self._deadline, self.asked_to_end, self._running = None, False, set(workers)
        for worker in workers:
            worker.start(self)
        failed = ended_as_asked = 0
        stopped_at = 0.0
        while self._running:
            left: float | None = None
            if self._deadline:
                left = max(0.0, self._deadline[0] - time.monotonic())
            try:
                event = self.events.get(timeout=left)
            except queue.Empty:
                self._kill()
                continue
            if isinstance(event, _Answer):
                continue  # nobody waits for it any more
            if isinstance(event, Ending):
                if event.attempt == attempt and not (failed or self.stopped_by):
                    self.say(event.why)
                    self.asked_to_end, self.failed_at = True, time.time()
                    self._send(signal.SIGTERM)
                continue
            if isinstance(event, int):  # a signal
                if self.stopped_by and time.monotonic() - stopped_at < _SAME_SIGNAL_SECONDS:
                    continue
                if self.stopped_by and event == signal.SIGINT:
                    self.say("second Ctrl-C: killing the programs on the workers")
                    self._kill()
                    continue
                if not self.stopped_by:
                    self.stopped_by, stopped_at = event, time.monotonic()
                    self.say(
                        f"forwarded {signal.Signals(event).name} to {len(self._running)} "
                        "worker(s), which may save a checkpoint before they exit; press Ctrl-C "
                        "(again) to kill them"
                    )
                self._send(signal.SIGINT if event == signal.SIGINT else signal.SIGTERM)
                continue
            worker, code = event
            self._running.remove(worker)
            if code == AS_ASKED and self.asked_to_end:
                ended_as_asked = code
            elif code and not failed:
                failed, self.failed_at = code, time.time()
                if not self.stopped_by:
                    log = self.log_dir / f"worker_{worker.index}.log"
                    ending = f"; stopping the other {len(self._running)}" if self._running else ""
                    self.say(f"{worker.name} failed with exit code {code}, see {log}{ending}")
                    self._send(signal.SIGTERM)
                    grace = CRASH_SECONDS if is_crash(code) else GRACE_SECONDS
                    if self._grace is not None:
                        grace = self._grace
                    self._deadline = time.monotonic() + grace, signal.SIGKILL
        return failed or ended_as_asked

    def _send(self, number: int) -> None:
        for worker in self._running:
            worker.send(number)

    def _kill(self) -> None:
        """Kill the programs; disconnect the workers that do not report the end of theirs."""
        if self._deadline and self._deadline[1] == 0:
            for worker in self._running:
                self.say(f"{worker.name} does not respond, disconnecting")
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.client.pid, signal.SIGKILL)
            self._deadline = None
            return
        self._send(signal.SIGKILL)
        self._deadline = time.monotonic() + _CLIENT_SECONDS, 0
