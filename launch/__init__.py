"""Starts the program on many machines: TPU pods, GPU nodes, Slurm, GKE."""

import argparse
import os
import signal
from typing import IO, NoReturn

IN_VAIN = (2, 3, 4, 5)
"""The program's exit codes after which a restart does not help: a mistake, losses that are not
finite, a folder that is full, too many unreadable images."""
CRASH_SECONDS = 3
"""The seconds that the other programs have to end when one has crashed. Most wait for it in
compiled code, and no checkpoint can be written without it; a copy for a peer may still arrive."""
_SIGNAL, _DISCONNECTED = 128, (254, 255)
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Mistake(Exception):
    """Raised for a mistake of the user: one line on stderr, exit code 2."""


class LauncherParser(argparse.ArgumentParser):
    """Raises Mistake, where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise Mistake(message)


def is_crash(code: int) -> bool:
    """Return True if a program that ended with this code did so alone.

    It did not if all ended for the same reason, or if a signal or a lost connection stops it: then
    all write a checkpoint together, however long that takes.
    """
    return code not in (0, *IN_VAIN, *_DISCONNECTED, *(_SIGNAL + number for number in STOPS))


def write_line(text: str, target: IO[str]) -> None:
    """Print a line, and nothing from then on if that fails: a closed terminal stops no training."""
    try:
        print(text, file=target, flush=True)
    except OSError:
        with open(os.devnull, "w") as nowhere:  # or what is left unwritten fails at the exit again
            os.dup2(nowhere.fileno(), target.fileno())
