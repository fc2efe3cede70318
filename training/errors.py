"""Errors that end a run early, with their exit codes; and a warning about package versions."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from data.files import DataFolderError, printable

NO_BATCH = FOLDER_IN_USE = 1
"""Exit codes of ``RunFailed`` if a restart may help, as after a crash: the data can no longer be
read (e.g. a disk is gone), or a lost machine still holds the folder's lock."""
NOT_FINITE, NOT_SAVED, BAD_IMAGES = 3, 4, 5
"""Exit codes if a restart does not help: a loss or weight is not finite, no checkpoint could be
written, or too many images could not be read."""
SIGNAL = 128
"""Added to a signal number, the exit code of a program ended by that signal."""


class UsageError(Exception):
    """Raised for an invalid argument, file or folder: ends the program with exit code 2 and one
    line that says what is wrong and what to change."""

    def __init__(self, message: str, *, agreed: bool = False) -> None:
        """Create the error. ``agreed``: all processes raise it, so only one prints it."""
        # Names in files may hold escape sequences, which a terminal would obey.
        super().__init__(printable(message))
        self.agreed = agreed
        self.process: str | None = None
        """The process that raised it, if others may not have."""


@contextlib.contextmanager
def data_errors_as_usage_errors() -> Iterator[None]:
    """Turn a DataFolderError that is raised inside into a UsageError."""
    try:
        yield
    except DataFolderError as error:
        raise UsageError(str(error)) from None


class RunFailed(Exception):
    """Raised by all processes together when training cannot continue although the arguments are
    valid: ends with one line and its own exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        # Both, so that it can be unpickled in another process.
        super().__init__(printable(message), exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])


def not_finite_error(what: str, newest: Path | None) -> RunFailed:
    """Return the error of a run with NaN or infinite values, which a restart would repeat.
    ``what``: the first half of the message; ``newest``: the last good checkpoint."""
    return RunFailed(
        f"{what}: the last good checkpoint is {newest or 'none'}; try a lower --lr, more "
        "--warmup_steps or another --precision",
        NOT_FINITE,
    )


class SelfCheckFailed(Exception):
    """Raised by all processes together when a check of ``--self_check`` failed."""

    exit_code = 1


class StoppedBySignal(Exception):
    """Raised when training ended early on a signal, with a checkpoint."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def is_first_of_torchrun() -> bool:
    """Return True in the one process started by torchrun that prints for all."""
    return os.environ.get("RANK", "0") == "0"


def prints_here(error: UsageError) -> bool:
    """Return True if this process should print the error: only one does if all have it. Before the
    processes are connected, the first one of each node prints it, by torchrun's LOCAL_RANK."""
    if error.agreed:
        return is_first_of_torchrun()
    # LOCAL_RANK alone is set by another launcher.
    is_first = "RANK" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0"
    return error.process is not None or is_first


def installed_version(package: str) -> str | None:
    """Return the installed version of a package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def warn_of_others(*written_for: Mapping[str, str]) -> None:
    """Warn on stderr, in one line, about installed packages whose version differs from
    ``written_for`` (package to version); "2.9.0+cu128" counts as "2.9.0"."""
    others = [
        f"{package} is {installed}, not {expected}"
        for versions in written_for
        for package, expected in versions.items()
        if (installed := installed_version(package)) is not None
        and installed.partition("+")[0] != expected
    ]
    if others:
        print(
            f"run_vit_training.py: warning: untested versions: {', '.join(others)}; this program "
            "calls private functions of these packages, which may explain unexpected errors",
            file=sys.stderr,
            flush=True,
        )
