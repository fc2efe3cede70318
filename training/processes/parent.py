"""End a process: together with its parent, however that ends; or at once."""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, which started it, has ended. Otherwise the
    ranks of a killed torchrun would keep training in the folder that a restart uses."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has already ended
        os.kill(os.getpid(), signal.SIGKILL)


def forward_torchrun_signals() -> None:
    """Have this process end together with torchrun, if torchrun started it according to the
    environment. TORCHRUN_PID, set by launch/torchrun.sh, shows whether torchrun has already
    ended."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    if torchrun := os.environ.get("TORCHRUN_PID"):
        try:
            state = Path("/proc", torchrun, "stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:
            state = b"X"
        if state in b"ZX":  # it has ended
            os.kill(os.getpid(), signal.SIGKILL)
    end_with(parent)


def end_at_once(exit_code: int) -> NoReturn:
    """End this process after its exit handlers, without waiting for other threads as Python does,
    such as one that reads from a device that no longer responds."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader has left
            stream.flush()
    os._exit(exit_code)
