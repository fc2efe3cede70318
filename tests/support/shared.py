"""What the workers of pytest share: made by the first one that asks, when it is asked for."""

import fcntl
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")


def begin() -> None:
    """Share from here on with the processes that this one starts."""
    if "SHARED_BY_TESTS" not in os.environ:
        os.environ["SHARED_BY_TESTS"] = tempfile.mkdtemp()
        os.environ["SHARED_UNTIL_END_OF"] = str(os.getpid())


def end() -> None:
    """Remove what is shared, in the process that has begun it."""
    if os.environ["SHARED_UNTIL_END_OF"] == str(os.getpid()):
        shutil.rmtree(os.environ["SHARED_BY_TESTS"], ignore_errors=True)


def made_once(name: str, make: Callable[[Path], Made]) -> Made:
    """What ``make`` returns, given a folder of its own; it may not be changed."""
    place = Path(os.environ["SHARED_BY_TESTS"], name)
    place.mkdir(exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = place / "made"
        if not made.exists():
            made.write_bytes(pickle.dumps(make(Path(tempfile.mkdtemp(dir=place)))))
        return pickle.loads(made.read_bytes())
