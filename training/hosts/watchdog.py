"""Ends a process that hangs, as when another one has died in a collective operation."""

from __future__ import annotations

import faulthandler

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
