"""Runs one piece of work beside training, in a thread that ends with the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Runs a function in a thread of its own, and keeps what it returns or raises.

    The thread is a daemon: a process that fails, or that is told to end at once, does not wait.
    """

    def __init__(self, work: Callable[[], Result]) -> None:
        """Start the thread."""
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - it is raised where the result is wanted
            self._error = error
        finally:
            del self._work  # with the memory that it holds

    def done(self) -> bool:
        """Tell whether the function has ended, without waiting."""
        return not self._thread.is_alive()

    def result(self) -> Result:
        """Wait for the function's end; return what it returned, or raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]
