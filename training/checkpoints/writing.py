"""Writes one checkpoint, all processes together, in stages after which all know of all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from training.checkpoints.keep import clear, remove
from training.checkpoints.manifest import write_manifest
from training.checkpoints.reader import reason_of
from training.checkpoints.state import write_state
from training.hosts import processes


def write_checkpoint(
    folder: Path,
    content: dict[str, Any],
    *,
    is_main: bool,
    written: Callable[[], None],
    group: dist.ProcessGroup | None = None,
) -> list[str | None]:
    """Write what ``state_content`` gave; return what went wrong in each process, None for nothing.

    All processes call it, with ``group``, through which they talk (None: PyTorch's default one).
    The first one calls ``written`` when the checkpoint is complete; if it cannot be, it removes
    what there is of it, as far as it can.
    """
    parts: dict = {}

    def begin() -> None:
        if is_main:
            clear(folder)

    def write() -> None:
        parts.update(write_state(content, folder, group))

    def complete() -> None:
        if is_main:
            files = {n: (size, sum_) for part in shared for n, (size, sum_) in part.items()}
            write_manifest(folder, files)

    for stage in (begin, write):
        problems = attempt(stage, group)
        if any(problems):
            break
    else:
        shared = processes.gather(parts, group)
        problems = attempt(complete, group)
    if is_main:
        if any(problems):
            with contextlib.suppress(OSError):  # as from what could not be written to either
                remove(folder)  # it takes room that the next one may need
        else:
            written()
    return problems


def attempt(stage: Callable[[], None], group: dist.ProcessGroup | None = None) -> list[str | None]:
    """Run one stage in this process; return what went wrong in each of them."""
    problem = None
    try:
        stage()
    # A full disk shows as OSError, as an error of the zip writer, or wrapped by DCP, whose own
    # error is no Exception.
    except (Exception, dcp.CheckpointException) as error:  # noqa: BLE001
        problem = reason_of(error)
    return processes.gather(problem, group)
