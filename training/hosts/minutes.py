"""Tells, after each step, whether an interval of minutes is over: to all processes alike."""

from __future__ import annotations

import time
from collections.abc import Callable

from training.backend import Backend
from training.hosts import processes


class MinutesInterval:
    """Measures minutes by the first process's clock, and lets no process wait for the answer.

    As with a request to stop, what the first process finds after a step is looked at after the next
    one, when it has long been sent.
    """

    def __init__(self, backend: Backend, minutes: float) -> None:
        """Begin the first interval; ``minutes`` 0: it is never over."""
        self._backend, self._seconds = backend, 60 * minutes
        self._found: Callable[[], int] = lambda: 0
        self._since = time.monotonic()

    def begin(self) -> None:
        """Begin anew; all processes call it after the same step."""
        self._found()  # so that nothing is under way
        self._found = lambda: 0
        self._since = time.monotonic()

    def over(self) -> bool:
        """Tell whether the interval is over; all processes call it after each step."""
        if not self._seconds:
            return False
        here = self._backend.is_main and time.monotonic() - self._since >= self._seconds
        if processes.count() == 1:
            return here
        found, self._found = self._found(), self._backend.largest_of_all(int(here))
        return bool(found)
