"""Handle stdout and stderr that nobody reads: a pipe to ``head``, a closed terminal, a full disk;
and those whose encoding lacks a character, as of a file name.

Only affects the standard streams: a broken pipe to a loader process is an error.
"""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from training.errors import SIGNAL


def open_closed_streams() -> None:
    """Open /dev/null in place of closed standard streams (``>&-``): otherwise the next opened files
    would get their descriptors, and the output of compiled code."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the end
            setattr(sys, name, stream)


class _StandardStream(io.FileIO):
    """A standard stream that is replaced by /dev/null as soon as a write fails."""

    def __init__(self, number: int, lost: Callable[[OSError], None]) -> None:
        """``lost`` is called with the error."""
        super().__init__(number, "w", closefd=False)
        self._lost = lost

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())
            self._lost(error)
            return len(data)


@contextlib.contextmanager
def _replaced(name: str, lost: Callable[[OSError], None]) -> Iterator[None]:
    before, number = getattr(sys, name), None
    with contextlib.suppress(OSError):  # a test's or a notebook's is no file
        number = before.fileno() if isinstance(before, io.TextIOWrapper) else None
    if number is None:
        yield
        return
    before.flush()
    raw = _StandardStream(number, lost)
    stream = io.TextIOWrapper(
        raw if before.write_through else io.BufferedWriter(raw),  # python -u
        encoding=before.encoding,
        errors="backslashreplace",  # as of every stderr
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
    setattr(sys, name, stream)
    try:
        yield
    finally:
        try:
            stream.flush()
        finally:
            setattr(sys, name, before)


@contextlib.contextmanager
def drop_unread_output(program: str) -> Iterator[None]:
    """Drop output that cannot be written, for work that is worth doing without a reader."""

    def warn(error: OSError) -> None:
        reason = f"stdout cannot be written ({error.strerror}): dropping its output"
        print(f"{program}: warning: {reason}", file=sys.stderr, flush=True)

    with _replaced("stderr", lambda error: None), _replaced("stdout", warn):
        yield


@contextlib.contextmanager
def exit_quietly_on_broken_pipe(program: str) -> Iterator[None]:
    """Exit without a traceback if stdout cannot be written, e.g. when piped to ``head``; with the
    exit code of SIGPIPE, or with one line and 2 on a full disk. Drop what stderr cannot take."""

    def leave(error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            sys.exit(SIGNAL + signal.SIGPIPE)
        print(f"{program}: error: stdout: {error.strerror}", file=sys.stderr)
        sys.exit(2)

    with _replaced("stderr", lambda error: None), _replaced("stdout", leave):
        yield
