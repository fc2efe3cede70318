"""How a run ends early: by a signal or another reason, all together; by a watchdog, if it hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from training.backend import Backend
from training.errors import SIGNAL, RunFailed
from training.processes import exchange

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that stop training with a checkpoint; a closed terminal sends SIGHUP."""


class ProcessSignals:
    """Decides what SIGTERM, SIGINT and SIGHUP do to this process. Until ``listen`` they end it;
    after it, the first one is noted, and a SIGINT after that (Ctrl-C pressed twice) ends the
    process at once."""

    def __init__(self) -> None:
        self.noted = 0
        self._listening = False
        self._notice = b""
        self._before: dict[int, Any] = {}

    def __reduce__(self) -> tuple[Callable, tuple]:
        """Unpickle as the other process's own ``process_signals``, with its handlers installed by
        its main thread: torch_xla runs nested FSDP in another one, where Python installs none."""
        return _install_here, ()

    def install(self) -> None:
        """Install the handlers, but not in a thread, nor for signals that are ignored."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in STOPS:  # a shell's `program &` and nohup want them ignored
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
            self.noted = number
            with contextlib.suppress(OSError):  # of a closed terminal
                os.write(2, self._notice)  # print() may be in the middle of a line
        elif number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        elif not self._listening:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


process_signals = ProcessSignals()


def _install_here() -> ProcessSignals:
    process_signals.install()
    return process_signals


def largest_of_all(value: int) -> Callable[[], int]:
    """Start to find the largest value of all processes, on the hosts; return what waits for it."""
    if exchange.count() == 1:
        return lambda: value
    tensor = torch.tensor([value])  # on the CPU: gloo's, whatever else the devices do
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)

    def wait() -> int:
        assert work is not None  # it is for processes outside of the group
        work.wait()
        return int(tensor)

    return wait


_FAILURE = 1000
"""Added to a failure's exit code while processes agree, where the largest number counts: a failure
counts for more than a signal (its checkpoint may not be written)."""


class StopRequest:
    """Answers every process alike, after each step, whether to stop: a checkpoint is written by all
    together. What is found out after a step is looked at after the next one, so that none waits."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._answer: Callable[[], int] = lambda: 0
        self._asked = 0
        self.exit_code = 0
        """Why training stops, as an exit code (``training/errors.py``): that of a failure, or
        SIGNAL + the signal's number; 0: it does not stop."""

    def __enter__(self) -> StopRequest:
        process_signals.install()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # All processes end now; torchrun sends SIGTERM to those that end after the first one.
        if self.exit_code or isinstance(error, RunFailed):
            process_signals.listen("")
            process_signals.noted = process_signals.noted or signal.SIGTERM  # later ones: ignored
        else:
            process_signals.restore()

    def listen(self) -> None:
        """Note signals from now on. Before the first step, compiling too, they end the program."""
        notice = "\nstopping after this step, with a checkpoint; press Ctrl-C to stop at once\n"
        process_signals.listen(notice if self._backend.is_main else "")

    def ask(self, failure: int) -> None:
        """Stop with a failure's exit code; it is enough if one process asks for it."""
        self._asked = _FAILURE + failure

    def due(self) -> bool:
        """Return True if training stops now; all call it after each step and evaluated batch."""
        mine, reason = max(process_signals.noted, self._asked), 0
        if exchange.count() == 1:
            reason = mine
        elif not self.exit_code:
            reason = self._answer()
            if not reason:
                self._answer = self._backend.largest_of_all(mine)
        if reason:
            self.exit_code = reason - _FAILURE if reason > _FAILURE else SIGNAL + reason
        return self.exit_code > 0


_BEFORE_FIRST_STEP_S = 600.0
"""The least seconds of silence that are allowed before the first step."""


class Watchdog:
    """Ends a silent process after a time, with code 1 and every thread's stack on stderr. It is a
    thread of Python's faulthandler, which works too where compiled code lets no Python run."""

    def __init__(self, seconds: float) -> None:
        """Allow so many seconds of silence; 0: do nothing."""
        self._seconds = seconds

    def alive(self, *, before_first_step: bool = False) -> None:
        """Restart the countdown, since something was done; ``before_first_step``: with time for the
        first batch."""
        if self._seconds:
            limit = max(self._seconds, _BEFORE_FIRST_STEP_S if before_first_step else 0)
            faulthandler.dump_traceback_later(limit, exit=True, file=2)

    def pause(self) -> None:
        """Stop the countdown until ``alive`` is called: what follows takes as long as it takes."""
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()
