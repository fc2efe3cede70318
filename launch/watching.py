"""Says, while a node waits for others, for whom, and ends the process on a signal or at a limit."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from typing import NoReturn

SAY_SECONDS = 10.0


class Watch:
    """Says what is waited for, and ends the process on a signal or at the limit.

    A thread does it, as the main one may be in compiled code. Python's handler for signals, in C,
    writes to a pipe whatever the main thread does; the default action would do nothing in a
    container, where this is process 1.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self.wait_for("")
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._follow, daemon=True).start()

    def wait_for(self, what: str) -> None:
        """Wait for this from now on, with a limit of its own.

        ``waiting_for`` may then tell it better.
        """
        self._begin = self._said = time.monotonic()
        self.waiting_for = what

    def _note(self, number: int, frame: object) -> None:
        """Do nothing: only what Python's own handler does before this is needed."""

    @property
    def ended(self) -> bool:
        """Tell whether torchrun has started its processes, and put its own handlers in."""
        return signal.getsignal(signal.SIGTERM) != self._note

    def _follow(self) -> None:
        while not self.ended:
            now = time.monotonic()
            if self.waiting_for and now - self._said >= SAY_SECONDS:
                self._said = now
                say(f"waiting for {self.waiting_for}, {now - self._begin:.0f} s so far")
            if self.waiting_for and self._limit and now - self._begin >= self._limit:
                end(
                    1,
                    f"error: {self.waiting_for} did not come within {self._limit:.0f} s "
                    "(JOIN_TIMEOUT): see why, and start all nodes again",
                )
            if select.select([self._reader], [], [], 0.5)[0]:
                number = os.read(self._reader, 1)[0]
                if number in (signal.SIGTERM, signal.SIGINT) and not self.ended:
                    end(128 + number, f"ended by {signal.Signals(number).name}")


def say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"torchrun.sh: {text}\n".encode(errors="replace"))


def end(code: int, text: str) -> NoReturn:
    say(text)
    os._exit(code)
