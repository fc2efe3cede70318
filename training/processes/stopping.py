"""End a run early: by a signal or failure, in all processes; by a watchdog, if it hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from training.backend import Backend
from training.errors import SIGNAL, RunFailed
from training.processes import exchange

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that stop training with a checkpoint; a closed terminal sends SIGHUP."""
_SAME_SIGNAL_S = 0.5
"""A signal that comes again within these seconds is the same one: ``timeout`` passes on what the
terminal has sent to this program, too."""


class ProcessSignals:
    """Handles SIGTERM, SIGINT and SIGHUP. Until ``listen`` is called, they end the process;
    afterwards, the first one is noted, and a SIGINT after that (Ctrl-C pressed twice) ends it at
    once."""

    def __init__(self) -> None:
        self.noted = 0
        self._noted_at = 0.0
        self._listening = False
        self._notice = b""
        self._before: dict[int, Any] = {}

    def __reduce__(self) -> tuple[Callable, tuple]:
        """Unpickle as the receiving process's own ``process_signals``, and install its handlers in
        the main thread: torch_xla runs nested FSDP in another thread, where Python cannot install
        any."""
        return _install_here, ()

    def install(self) -> None:
        """Install the handlers, except in a thread or for ignored signals."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in STOPS:  # `program &` and nohup ignore them
            if (before := signal.getsignal(number)) is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._handle)

    def listen(self, notice: str) -> None:
        """Note a signal from now on, and write ``notice`` to stderr when one comes."""
        self._listening, self._notice = True, notice.encode()

    def restore(self) -> None:
        self._listening, self.noted = False, 0
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                signal.signal(number, before)
            self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._listening and not self.noted:
            self.noted, self._noted_at = number, time.monotonic()
            with contextlib.suppress(OSError):  # of a closed terminal
                os.write(2, self._notice)  # print() may be in the middle of a line
        elif number == signal.SIGINT:
            if self.noted != number or time.monotonic() - self._noted_at >= _SAME_SIGNAL_S:
                signal.default_int_handler(number, frame)
        elif not self._listening:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


process_signals = ProcessSignals()


def _install_here() -> ProcessSignals:
    process_signals.install()
    return process_signals


def all_reduce_max(value: int) -> Callable[[], int]:
    """Start computing the maximum over all processes, on the hosts; return a function to wait."""
    if exchange.count() == 1:
        return lambda: value
    tensor = torch.tensor([value])  # on the CPU, for gloo, whatever the devices do
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)

    def wait() -> int:
        assert work is not None  # it is for processes outside of the group
        work.wait()
        return int(tensor)

    return wait


_FAILURE = 1000
"""Added to the exit code of a failure while processes agree on the maximum, so that a failure takes
precedence over a signal (its checkpoint may not be written)."""


class StopRequest:
    """Tells all processes the same after each step, whether to stop, as they write a checkpoint
    together. Requests take effect one step later, so that no process waits."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._answer: Callable[[], int] = lambda: 0
        self._asked = 0
        self.exit_code = 0
        """Why training stops, as an exit code (``training/errors.py``): of a failure, or SIGNAL +
        the signal number; 0: training continues."""

    def __enter__(self) -> StopRequest:
        process_signals.install()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # All processes are about to exit; torchrun sends SIGTERM to those that exit after the
        # first.
        if self.exit_code or isinstance(error, RunFailed):
            process_signals.listen("")
            process_signals.noted = process_signals.noted or signal.SIGTERM  # later ones: ignored
        else:
            process_signals.restore()

    def listen(self) -> None:
        """Note signals from now on. Until the first step is compiled and run, they end the
        program."""
        notice = "\nstopping after this step, with a checkpoint; press Ctrl-C to stop at once\n"
        process_signals.listen(notice if self._backend.is_main else "")

    def ask(self, failure: int) -> None:
        """Ask to stop with the exit code of a failure; one process is enough."""
        self._asked = _FAILURE + failure

    def due(self) -> bool:
        """Return True if training stops now; all must call this after each step and evaluated
        batch."""
        mine, reason = max(process_signals.noted, self._asked), 0
        if exchange.count() == 1:
            reason = mine
        elif not self.exit_code:
            reason = self._answer()
            if not reason:
                self._answer = self._backend.all_reduce_max(mine)
        if reason:
            self.exit_code = reason - _FAILURE if reason > _FAILURE else SIGNAL + reason
        return self.exit_code > 0


_BEFORE_FIRST_STEP_S = 600.0
"""The minimum timeout before the first step, in seconds."""
_COMPILATION_S = 3 * 3600.0
"""The minimum timeout of what compiles, in seconds: a large model with unrolled blocks takes an
hour or two."""


class Watchdog:
    """Ends a process that makes no progress, with exit code 1 and the stacks of all threads on
    stderr. Uses a thread of Python's faulthandler, which works even if compiled code holds the
    GIL."""

    def __init__(self, seconds: float) -> None:
        """Allow this many seconds without progress; 0: off."""
        self._seconds = seconds
        self._at_least = 0.0

    def alive(self, *, before_first_step: bool = False) -> None:
        """Restart the countdown after progress; ``before_first_step``: with time for the first
        batch."""
        if self._seconds:
            at_least = _BEFORE_FIRST_STEP_S if before_first_step else self._at_least
            limit = max(self._seconds, at_least)
            faulthandler.dump_traceback_later(limit, exit=True, file=2)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Allow the time that a compilation takes for all progress inside."""
        self._at_least = _COMPILATION_S
        self.alive()
        try:
            yield
        finally:
            self._at_least = 0.0

    def stop(self) -> None:
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()
