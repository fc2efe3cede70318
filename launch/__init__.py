"""Launchers for many machines: TPU pods, GPU nodes, Slurm, GKE."""

import argparse
import os
import signal
from typing import IO, NoReturn

NON_RETRYABLE = (2, 3, 4, 5)
"""Exit codes of the program after which a restart does not help: usage error, losses that are not
finite, checkpoint folder full, too many unreadable images."""
CRASH_SECONDS = 3
"""Seconds that the other programs have to end after one crashed. Most of them are blocked in a
collective and cannot save a checkpoint without it; a copy to a peer may still arrive."""
_SIGNAL, _DISCONNECTED = 128, (254, 255)
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class UsageError(Exception):
    """Raised for a usage error: one line on stderr, exit code 2."""


class Failed(Exception):
    """Raised for a failure that is no usage error: one line on stderr, exit code 1."""


class LauncherParser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def is_crash(code: int) -> bool:
    """Return True if a program that ended with this exit code crashed on its own.

    It did not if all programs end for the same reason, or if a signal or a lost connection stopped
    it: then all of them save a checkpoint together, however long that takes.
    """
    return code not in (0, *NON_RETRYABLE, *_DISCONNECTED, *(_SIGNAL + number for number in STOPS))


def write_line(text: str, target: IO[str]) -> None:
    """Print a line, with the characters escaped that the stream's encoding lacks; after a failure
    print nothing more, so that a closed terminal stops no training."""
    encoding = getattr(target, "encoding", None) or "utf-8"
    try:
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        print(text, file=target, flush=True)
    except OSError:
        with open(os.devnull, "wb") as nowhere:  # or what is left unwritten fails at the exit again
            os.dup2(nowhere.fileno(), target.fileno())
