"""Writes checkpoints in the middle of a run: all processes together, and never half of one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

from training import processes
from training.backend import Backend
from training.checkpoints.choose import folder_of
from training.checkpoints.content import Position, training_tensors
from training.checkpoints.keep import clear, prune, remove
from training.checkpoints.manifest import entries, write_manifest
from training.checkpoints.reader import METADATA, reason_of
from training.checkpoints.state import save_state
from training.errors import NOT_SAVED, RunFailed


@dataclass
class CheckpointSaver:
    """Saves the state of a backend; says what could not be saved, and ends a run that never can."""

    ckpt_dir: Path
    backend: Backend
    say: Callable[[str], None]
    arguments: dict[str, Any]
    classes: list[str] | None
    keep: int
    max_failed: int
    newest: Path | None = None
    """The newest checkpoint of the run, written or resumed."""
    spared: Path | None = None
    """The checkpoint that is not to be removed, however old: the best one."""
    _failed: int = field(default=0, init=False)

    def save(self, position: Position, *, must: bool = False) -> None:
        """Write a checkpoint, unless there is a complete one of this step.

        If it cannot be written, the older ones stay and training can go on. Raises RunFailed after
        ``max_failed`` failures in a row, and with ``must`` after one.
        """
        folder = folder_of(self.ckpt_dir, position.step)
        if folder == self.newest:
            return
        problems = [p for p in self._write(folder, position) if p is not None]
        if not problems:
            self.newest, self._failed = folder, 0
            self.say(f"checkpoint: {folder}")
            return
        self._failed += 1
        text = (
            f"{folder.name} could not be written to {self.ckpt_dir} ({problems[0]}{self._room()})"
        )
        if must or self._failed >= self.max_failed:
            times = "" if self._failed == 1 else f", {self._failed} have failed in a row"
            last = f"the newest checkpoint is {self.newest}" if self.newest else "there is none"
            raise RunFailed(f"checkpoint {text}{times}: {last}", NOT_SAVED)
        self.say(
            f"checkpoint {text}: training goes on, {self._failed} of --max_failed_saves "
            f"{self.max_failed} failed in a row"
        )

    def _room(self) -> str:
        """Return how much the disk has left, as PyTorch's zip writer does not say."""
        try:
            return f"; {shutil.disk_usage(self.ckpt_dir).free / 1e6:,.1f} MB are free there"
        except OSError:
            return ""

    def _write(self, folder: Path, position: Position) -> list[str | None]:
        """Write in stages after which all know of all; return what went wrong in each process."""
        problems: list[str | None] = []
        tensors = training_tensors(position, self.arguments, self.classes)
        parts: dict = {}

        def begin() -> None:
            if self.backend.is_main:
                clear(folder)

        def write() -> None:
            save_state(self.backend, folder, tensors)

        def sum_up() -> None:
            mine = f"__{processes.rank()}_"
            names = [path.name for path in folder.iterdir() if path.name.startswith(mine)]
            parts.update(entries(folder, names))

        def complete() -> None:
            if self.backend.is_main:
                files = {n: (size, sum_) for part in shared for n, (size, sum_) in part.items()}
                write_manifest(folder, files | entries(folder, [METADATA]))

        for stage in (begin, write, sum_up):
            problems = _attempt(stage)
            if any(problems):
                break
        else:
            shared = processes.gather(parts)
            problems = _attempt(complete)
        if self.backend.is_main:
            if any(problems):
                remove(folder)  # it takes room that the next one may need
            else:
                self._prune(folder)
        return problems

    def tidy(self) -> None:
        """Remove what is left of a start that was killed after it had written ``newest``."""
        if self.newest and self.backend.is_main:
            self._prune(self.newest)

    def _prune(self, newest: Path) -> None:
        prune(self.ckpt_dir, self.keep, [newest, *([self.spared] if self.spared else [])])


def _attempt(stage: Callable[[], None]) -> list[str | None]:
    """Run one stage in this process; return what went wrong in each of them."""
    problem = None
    try:
        stage()
    # A full disk shows as OSError, as an error of the zip writer, or wrapped by DCP, whose own
    # error is no Exception.
    except (Exception, dcp.CheckpointException) as error:  # noqa: BLE001
        problem = reason_of(error)
    return processes.gather(problem)
