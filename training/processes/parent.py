"""How a process ends: with the one that started it, however that ends; at once."""

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
    """Have the system kill this process when ``parent``, which started it, has ended: the ranks of
    a torchrun that was killed would train on, in the folder that a restart uses."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before the system was told
        os.kill(os.getpid(), signal.SIGKILL)


def forward_torchrun_signals() -> None:
    """Have this process end with torchrun, if torchrun has started it, as its environment says:
    TORCHRUN_PID, which launch/torchrun.sh sets, shows if torchrun has ended already."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    if torchrun := os.environ.get("TORCHRUN_PID"):
        try:
            state = Path("/proc", torchrun, "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = "X"
        if state in "ZX":  # it has ended
            os.kill(os.getpid(), signal.SIGKILL)
    end_with(parent)


def end_at_once(exit_code: int) -> NoReturn:
    """End this process without what Python does after its exit handlers: it waits for every thread,
    also for one that reads from a device that no longer answers."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # who read it has left
            stream.flush()
    os._exit(exit_code)
