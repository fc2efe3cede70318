"""The errors that end a run early, with their exit codes, and a warning about package versions."""

import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

NO_BATCH = FOLDER_IN_USE = 1
"""The exit code of ``RunFailed`` where a restart may help, as after a crash: the data cannot be
read any more (a disk has gone, say); a lost machine still has the folder."""
NOT_FINITE, NOT_SAVED, BAD_IMAGES = 3, 4, 5
"""Where it does not: a loss or a weight is not finite; no checkpoint could be written; too many
images could not be read."""
SIGNAL = 128
"""Plus a signal's number it is the exit code of a program that this signal has ended."""


class UsageError(Exception):
    """Raised for a wrong argument, file or folder: ends the program with exit code 2 and one line,
    which says what is wrong and what to change."""

    def __init__(self, message: str, *, agreed: bool = False) -> None:
        """Make the error. ``agreed``: all processes raise this one, so only one prints it."""
        super().__init__(message)
        self.agreed = agreed
        self.process: str | None = None
        """The process that raised it, if the others may not have."""


class RunFailed(Exception):
    """Raised by all processes together when training cannot continue, through no mistake in the
    arguments: ends with one line and an exit code of its own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message, exit_code)  # by which it is made again in another process
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])


def not_finite_error(what: str, newest: Path | None) -> RunFailed:
    """Return the error of a run whose numbers are NaN or infinite, as another start's would be.
    ``what``: the first half of the message; ``newest``: the last good checkpoint."""
    return RunFailed(
        f"{what}: the last good checkpoint is {newest or 'none'}; try a lower --lr, more "
        "--warmup_steps or another --precision",
        NOT_FINITE,
    )


class SelfCheckFailed(Exception):
    """Raised by all processes together when a line of ``--self_check`` has failed."""

    exit_code = 1


class StoppedBySignal(Exception):
    """Raised when training ended early, as asked, with a checkpoint."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def is_first_of_torchrun() -> bool:
    """Return True in the one process, of all that torchrun started, that prints for all."""
    return os.environ.get("RANK", "0") == "0"


def prints_here(error: UsageError) -> bool:
    """Return True if this process is to print the error: once for all, if all have it. Before the
    processes have connected that is the first one of each node, by torchrun's LOCAL_RANK."""
    if error.agreed:
        return is_first_of_torchrun()
    # LOCAL_RANK alone is another launcher's.
    is_first = "RANK" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0"
    return error.process is not None or is_first


def installed_version(package: str) -> str | None:
    """Return the version of a package as pip knows it, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def warn_of_others(*written_for: Mapping[str, str]) -> None:
    """Warn on stderr, in one line, of installed packages of another version than ``written_for``,
    which maps packages to versions; "2.9.0+cu128" counts as "2.9.0"."""
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
