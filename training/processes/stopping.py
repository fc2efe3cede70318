"""Ends a process that hangs, as when another one has died in a collective operation."""

from __future__ import annotations

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
from training.errors import RunFailed
from training.processes import exchange

# ------------------------------------------------------------------------------------------------
# Stops training by a signal: between two steps, all processes after the same one.


_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ProcessSignals:
    """Decides what SIGTERM and SIGINT do to this process.

    Until ``listen`` they end it, as they would without this. After it, the first one is noted;
    a SIGINT after that (Ctrl-C pressed twice) ends the process at once.
    """

    def __init__(self) -> None:
        self.noted = 0
        self._listening = False
        self._notice = b""
        self._before: dict[int, Any] = {}

    def __reduce__(self) -> tuple[Callable, tuple]:
        """Let a copy in another process stand for that one's ``process_signals``, installed.

        torch_xla runs nested FSDP in a thread of each process, and Python lets no other thread
        than the main one install handlers. The main one unpickles what the thread is given.
        """
        return _install_here, ()

    def install(self) -> None:
        """Install the handlers, but not in a thread, nor for signals that are ignored."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:  # a shell's `program &` and nohup want them ignored
            if (before := signal.getsignal(number)) is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._handle)

    def listen(self, notice: str) -> None:
        """Note a signal from now on, and write ``notice`` to stderr when one comes."""
        self._listening, self._notice = True, notice.encode()

    def ignore_from_now_on(self) -> None:
        self._listening, self._notice, self.noted = True, b"", self.noted or signal.SIGTERM

    def restore(self) -> None:
        self._listening, self.noted = False, 0
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                signal.signal(number, before)
            self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._listening and not self.noted:
            self.noted = number
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
    """Begin to find the largest value of all processes, on the hosts; return what waits for it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return lambda: value
    tensor = torch.tensor([value])  # on the CPU: gloo's, whatever else the devices do
    work = dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True)

    def wait() -> int:
        assert work is not None  # it is for processes outside of the group
        work.wait()
        return int(tensor)

    return wait


NO_BATCH, BAD_IMAGES, NOT_FINITE, NOT_SAVED = 1000, 1001, 1002, 1003
"""The numbers of what else than a signal can stop training; all signals' are smaller. Of several
the largest counts."""


class StopRequest:
    """Answers every process alike, after each step, whether to stop.

    A signal may reach only some processes, or each at another step, but a checkpoint is written
    by all together. What is found out after a step is therefore looked at after the next one: by
    then all hosts have long sent it, and none waits.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._found: Callable[[], int] = lambda: 0
        self._asked = 0
        self.number = 0
        """The signal that stops training, or one of the numbers above; 0: none."""

    def __enter__(self) -> StopRequest:
        process_signals.install()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # All processes end now; torchrun sends SIGTERM to those that end after the first one.
        if self.number or isinstance(error, RunFailed):
            process_signals.ignore_from_now_on()
        else:
            process_signals.restore()

    def first_step_done(self) -> None:
        """Heed signals from now on; before, compiling too, they end the program."""
        notice = "\nstopping after this step, with a checkpoint; Ctrl-C (again): at once\n"
        process_signals.listen(notice if self._backend.is_main else "")

    def ask(self, number: int) -> None:
        """Stop for another reason than a signal; one process that asks is enough."""
        self._asked = number

    def due(self) -> bool:
        """Tell whether to stop now; all call it after each step and each batch evaluated."""
        mine = max(process_signals.noted, self._asked)
        if exchange.count() == 1:
            self.number = mine
        elif not self.number:
            self.number = self._found()
            if not self.number:
                self._found = self._backend.largest_of_all(mine)
        return self.number > 0


# ------------------------------------------------------------------------------------------------


_STARTING_S = 600.0
"""The least seconds of silence that are allowed before the first step."""


class Watchdog:
    """Ends a silent process after a time, with code 1 and every thread's stack on stderr.

    It is a thread of Python's faulthandler, outside of the interpreter: it works too where compiled
    code waits and lets no Python run. Launchers restart on code 1.
    """

    def __init__(self, seconds: float) -> None:
        """Take the seconds of silence that are allowed; 0: do nothing."""
        self._seconds = seconds

    def alive(self) -> None:
        """Count anew, since something was done."""
        if self._seconds:
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=2)

    def starting(self) -> None:
        """Count anew, with patience for what comes before the first step: the first batch, for
        which loader processes and file systems wake up."""
        if self._seconds:
            limit = max(self._seconds, _STARTING_S)
            faulthandler.dump_traceback_later(limit, exit=True, file=2)

    def rest(self) -> None:
        """Stop counting until ``alive`` is called: what follows takes as long as it takes."""
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()
