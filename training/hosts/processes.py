"""Lets the processes of a run tell each other values, and mistakes of one of them, on the hosts.

Uses PyTorch's default process group, which every backend makes where there are several processes.
What is sent is JSON, so nothing that arrives is run.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from training.errors import UsageError


def count() -> int:
    """Return the number of processes of this run that can talk to each other."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process among them, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


@contextlib.contextmanager
def without_greetings() -> Iterator[None]:
    """Silence stdout, on which gloo prints a line for every group that is made (PyTorch 2.9)."""
    sys.stdout.flush()
    stdout = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def new_group() -> dist.ProcessGroup | None:
    """Make a group of all processes for one more thread; None where there is one process.

    All must call it. Collectives of a group meet in the order in which they are called, so two
    threads cannot share one.
    """
    if count() == 1:
        return None
    with without_greetings():
        return dist.new_group(backend="gloo")


def end_group(group: dist.ProcessGroup | None) -> None:
    """Let go of what ``new_group`` gave, when nothing uses it any more."""
    if group is not None:
        dist.destroy_process_group(group)


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the JSON values that all processes give, by rank; all must call it.

    ``group``: what they talk through; None: PyTorch's default group.
    """
    if count() == 1:
        return [value]
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(count())]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(mine)] = mine
    found = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(found, padded, group)
    texts = (bytes(each[: int(size)].tolist()) for each, size in zip(found, sizes, strict=True))
    return [json.loads(text) for text in texts]


def name(number: int | None = None, host: str | None = None) -> str:
    """Return how a message names a process: "process 3 on node1". Without arguments: this one."""
    number = rank() if number is None else number
    return f"process {number} on {host or socket.gethostname()}"


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """Raise in all processes a UsageError that one of them raises inside, or an OSError as one.

    It must not contain a collective call, which the others would wait in.
    """
    problem: UsageError | None = None
    try:
        yield
    except UsageError as error:
        problem = error
    except OSError as error:  # of a disk or a storage: the others are not to wait for this process
        problem = UsageError(f"cannot use {error.filename}: {error.strerror}")
    told = gather([str(problem) if problem else None, socket.gethostname()])
    raise_first([text for text, _ in told], [host for _, host in told])


def raise_first(problems: list[str | None], hosts: list[str] | None = None) -> None:
    """Raise the first of the processes' problems, if any has one. All processes must call it."""
    failed = [number for number, text in enumerate(problems) if text is not None]
    if not failed:
        return
    text = problems[failed[0]]
    if len(failed) < len(problems):
        text = f"{name(failed[0], hosts[failed[0]] if hosts else None)}: {text}"
    raise UsageError(str(text), agreed=True)


def naming_itself(body: Callable[..., None], *args: Any) -> None:
    """Call ``body``, of one process among several; a UsageError of it alone says which one."""
    try:
        body(*args)
    except UsageError as error:
        if not error.agreed and count() > 1:
            error.process = name()
        raise
