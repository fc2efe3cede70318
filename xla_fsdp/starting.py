"""Prints what the TPU runtime waits for while it starts: for all hosts of the slice.

It waits in compiled code that holds Python's lock. So another process prints (this file, run as a
program), and signals have their default action meanwhile: no handler would run.
"""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

FIRST_SECONDS, EVERY_SECONDS = 30.0, 60.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SIGACTION_BYTES = 256  # more than the C library's struct has


class StartWatch:
    """Prints between ``begin`` and ``end``, and lets signals end the process meanwhile."""

    def __init__(self) -> None:
        self._printer: subprocess.Popen[bytes] | None = None
        self._before: dict[int, ctypes.Array[ctypes.c_char]] = {}

    def __reduce__(self) -> tuple[Callable, tuple]:
        """Unpickle as the other process's own watch, started there: torch_xla unpickles a nested
        run's arguments in its processes, and then starts their runtimes."""
        return _begin_here, ()

    def begin(self, group: int) -> None:
        """Start; of the processes of a host with the same ``group``, one prints."""
        from xla_fsdp.torch_xla_private import host_tpu

        waited_for = "it starts when this program runs on all hosts of the slice"
        try:
            hosts, this = host_tpu().get_worker_ips(), host_tpu().worker_id()
        except Exception:  # noqa: BLE001 - whatever the metadata server answers: only a message
            hosts, this = [], 0
        if len(hosts) == 1:
            waited_for = "another program may hold the chips"
        elif hosts:
            last = len(hosts) - 1
            waited_for = (
                f"it starts when this program runs on all {len(hosts)} hosts of the slice, of "
                f"which this is {this} (0: {hosts[0]}, ... {last}: {hosts[-1]}); the log of one "
                "that is missing says why"
            )
        words = [str(group), waited_for, str(FIRST_SECONDS), str(EVERY_SECONDS)]
        self._printer = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *words], stdin=subprocess.PIPE
        )
        libc = ctypes.CDLL(None)
        for number in _SIGNALS:  # not by Python, which lets only the main thread do it
            if signal.getsignal(number) is not signal.SIG_IGN:
                before = self._before[number] = ctypes.create_string_buffer(_SIGACTION_BYTES)
                libc.sigaction(number, None, before)
                default = ctypes.create_string_buffer(_SIGACTION_BYTES)  # zeros: SIG_DFL
                libc.sigaction(number, default, None)

    def end(self) -> None:
        """End; does nothing if nothing was started."""
        libc = ctypes.CDLL(None)
        while self._before:
            number, before = self._before.popitem()
            libc.sigaction(number, before, None)
        if self._printer:
            assert self._printer.stdin
            self._printer.stdin.close()
            self._printer.wait()
            self._printer = None


watch = StartWatch()


def _begin_here() -> StartWatch:
    watch.begin(os.getppid())
    return watch


def report(group: str, waited_for: str, first: str, every: str) -> None:
    """Print on stderr now and then what the runtime waits for, until stdin ends.

    stdin is open as long as the other process waits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    begin, pause = time.monotonic(), float(first)
    with socket.socket(socket.AF_UNIX) as one_of_the_group:
        try:
            one_of_the_group.bind(f"\0vit-fsdp-starting-{group}")
        except OSError:
            return
        while not select.select([0], [], [], pause)[0]:
            seconds = time.monotonic() - begin
            print(
                f"waiting for the TPU runtime, {seconds:.0f} s so far: {waited_for}",
                file=sys.stderr,
                flush=True,
            )
            pause = float(every)


if __name__ == "__main__":
    report(*sys.argv[1:])
