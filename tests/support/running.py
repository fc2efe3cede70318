"""Which processes of this machine belong to a test, whoever has started them."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Running:
    pid: int
    words: list[str]
    """Of its command."""
    variables: set[str]
    """Of the environment that it was started with, NAME=VALUE."""


def running_with(*variables: str) -> Iterator[Running]:
    """The processes that were started with at least one of these, NAME=VALUE."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            found, words = (
                os.fsdecode((path / name).read_bytes()).split("\0")
                for name in ("environ", "cmdline")
            )
            if not set(variables).isdisjoint(found):
                yield Running(int(path.name), words, set(found))
