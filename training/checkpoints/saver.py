"""Write checkpoints, in all processes together, synchronously or asynchronously."""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from training.checkpoints.format import (
    METADATA,
    TRAINING_FILE,
    Entry,
    reason_of,
    silence_dcp,
    training_tensors,
    write_manifest,
)
from training.checkpoints.inventory import folder_of, step_of
from training.checkpoints.removal import clear, prune, remove
from training.checkpoints.state import not_finite, state_content, write_state
from training.errors import NOT_SAVED, RunFailed, UsageError, not_finite_error
from training.files import in_background, replace_file
from training.processes import exchange

if TYPE_CHECKING:
    from training.backend import Backend
    from training.checkpoints.per_host import HostFolders
    from training.schedule import Position


@dataclass(frozen=True)
class Written:
    """The outcome of writing a checkpoint."""

    problems: list[str | None]
    """The problem of each process; None if it has none."""
    not_finite: str | None = None
    """The name of an entry with NaN or infinite values; nothing is written then."""
    bytes: int = 0
    """The size of all files."""
    seconds: float = 0.0
    """The time until it was complete, including the wait for the slowest process."""


def write_checkpoint(
    folder: Path,
    content: dict[str, Any],
    *,
    is_main: bool,
    written: Callable[[], None],
    store_logs: Callable[[], None],
    group: dist.ProcessGroup | None = None,
    must_be_finite: bool = True,
    hosts: HostFolders | None = None,
) -> Written:
    """Write what ``state_content`` returned, in stages whose outcomes all processes exchange.

    All processes must call it, with their process ``group`` (None: PyTorch's default). The first
    process calls ``store_logs`` before the checkpoint is complete and ``written`` afterwards; it
    removes a checkpoint that cannot be completed. ``must_be_finite``: write nothing if a value is
    not finite. ``hosts``: with a folder on each host's disk; its first process does there what the
    first process of all does otherwise, but for the logs.
    """
    is_first = hosts.is_first if hosts else is_main
    writers = None

    def complete() -> None:
        if is_main:
            store_logs()
        if is_first:
            write_manifest(folder, files, writers)

    files: dict[str, Entry] = {}
    began = time.perf_counter()
    names, problems = attempt(lambda: not_finite(content) if must_be_finite else None, group)
    if bad := next(filter(None, names), None):
        return Written(problems, bad)
    if not any(problems):
        _, problems = attempt(lambda: clear(folder) if is_first else None, group)
    if not any(problems):
        per_host = hosts is not None
        parts, problems = attempt(
            lambda: write_state(content, folder, group, per_host=per_host), group
        )
    if not any(problems):
        files = {name: (size, sum_) for part in parts for name, (size, sum_) in part.items()}
        if hosts:
            writers = {name: hosts.names[rank] for rank, part in enumerate(parts) for name in part}
            problems = _copy_to_hosts(folder, is_main=is_main, is_first=is_first, group=group)
    if not any(problems):
        _, problems = attempt(complete, group)
    seconds = time.perf_counter() - began
    if is_first:
        if any(problems):
            with contextlib.suppress(OSError):  # the storage may refuse this, too
                remove(folder)  # the next one may need the space
        else:
            written()
    return Written(problems, None, sum(size for size, _ in files.values()), seconds)


def _copy_to_hosts(
    folder: Path, *, is_main: bool, is_first: bool, group: dist.ProcessGroup | None
) -> list[str | None]:
    """Copy the small files that every start reads from the first host's folder to those of all
    others; return the problems of all processes."""
    contents: dict[str, bytes] = {}
    names = (TRAINING_FILE, METADATA)

    def read() -> None:
        contents.update({name: (folder / name).read_bytes() for name in names if is_main})

    def write() -> None:
        for name in names if is_first and not is_main else ():
            replace_file(folder / name, contents[name])

    _, problems = attempt(read, group)
    if not any(problems):
        for name in names:
            contents[name] = exchange.broadcast_bytes(contents.get(name, b""), group)
        _, problems = attempt(write, group)
    return problems


def attempt(
    stage: Callable[[], Any], group: dist.ProcessGroup | None = None
) -> tuple[list[Any], list[str | None]]:
    """Run a stage in this process; return the results of all processes (JSON), and their problems,
    None if they have none."""
    done, problem = None, None
    try:
        done = stage()
    # A full disk raises OSError, an error of the zip writer, or either wrapped by DCP, whose
    # exception is not a subclass of Exception.
    except (Exception, dcp.CheckpointException) as error:  # noqa: BLE001
        # DCP raises the exceptions of some processes in all of them.
        failed = error.failures if isinstance(error, dcp.CheckpointException) else ()
        is_of_others = bool(failed) and exchange.rank() not in failed
        problem = None if is_of_others else reason_of(error)
    outcomes = exchange.all_gather_object([done, problem], group)
    return [done for done, _ in outcomes], [problem for _, problem in outcomes]


@dataclass
class CheckpointSaver:
    """Saves checkpoints of a run, reports failures, and ends the run if they persist.

    With ``asynchronous``, a thread writes a copy of the state while training continues. One
    checkpoint is written at a time; in all processes, the next one waits for it.
    """

    ckpt_dir: Path
    backend: Backend
    say: Callable[[str], None]
    arguments: dict[str, Any]
    classes: list[str] | None
    keep: int
    max_failed: int
    newest: Path | None = None
    """The newest checkpoint of the run, written or resumed."""
    asynchronous: bool = False
    protected: Path | None = None
    """The checkpoint that is never removed: the best one."""
    order: dict[str, Any] | None = None
    """What determines the order of the training images; see ``SavedRun``."""
    store_logs: Callable[[], None] = lambda: None
    """Stores the run's records durably, so that they always contain the steps of every
    checkpoint."""
    hosts: HostFolders | None = None
    """With ``--ckpt_dir_per_host``: the folders of all hosts."""
    _failed: int = field(default=0, init=False)
    _ends_with: RunFailed | None = field(default=None, init=False)
    """Why the run cannot continue."""
    _being_written: tuple[Path, Future[Written]] | None = field(default=None, init=False)
    figures: list[dict[str, float]] = field(default_factory=list, init=False)
    """The ``step``, ``bytes`` and ``write_s`` (seconds of writing) of each completed checkpoint."""
    _group: dist.ProcessGroup | None = field(default=None, init=False)
    """For the thread: the collectives of a group must be called in the same order everywhere."""
    _not_removed: str | None = field(default=None, init=False)
    """A warning, if old checkpoints could not be removed in the last attempt."""

    def __enter__(self) -> Self:
        silence_dcp()
        if self.asynchronous and exchange.count() > 1:
            with exchange.silence_gloo():
                self._group = dist.new_group(backend="gloo")
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the checkpoint being written, unless this process may have failed alone."""
        together = error is None or isinstance(error, RunFailed)
        together |= isinstance(error, UsageError) and error.agreed
        if self._being_written and not together:
            return  # the others may never answer; the thread ends with the process
        self._settle()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def save(self, position: Position, *, must: bool = False) -> bool:
        """Write a checkpoint, unless there is a complete one of this step; return True if it was
        written or is being written. With ``must``, it is complete on return. Raises RunFailed if a
        value is not finite, and after ``max_failed`` consecutive failures (with ``must``: one)."""
        self.finish()
        folder = folder_of(self.ckpt_dir, position.step)
        if folder == self.newest:
            return False
        content: dict[str, Any] = {}
        in_thread = self.asynchronous and not must
        _, problems = attempt(lambda: content.update(self.content(position, copy=in_thread)))
        if any(problems):
            self._count(folder, Written(problems), must=must)
        else:
            write = functools.partial(
                write_checkpoint,
                folder,
                content,
                is_main=self.backend.is_main,
                written=functools.partial(self._prune, folder, self.protected),
                store_logs=self.store_logs,
                group=self._group if in_thread else None,
                hosts=self.hosts,
            )
            if in_thread:
                self._being_written = folder, in_background(write)
            else:
                self._count(folder, write(), must=must)
        if self._ends_with:
            raise self._ends_with
        return self._being_written is not None or folder == self.newest

    def content(self, position: Position, *, copy: bool) -> dict[str, Any]:
        """Return ``state_content`` for the run's state and ``position``."""
        tensors = training_tensors(position, self.arguments, self.classes, self.order)
        return state_content(self.backend, tensors, copy=copy)

    def finish(self) -> None:
        """Wait for the checkpoint being written, if any. Raises like ``save``."""
        self._settle()
        if self._ends_with:
            raise self._ends_with

    def failed_too_often(self) -> bool:
        """Return True if the run cannot continue, as far as this process knows. Never waits: the
        other processes may learn of it a step later."""
        if self._being_written and self._being_written[1].done():
            self._settle()
        return self._ends_with is not None

    def _settle(self) -> None:
        if self._being_written:
            folder, writing = self._being_written
            self._being_written = None
            self._count(folder, writing.result())

    def _count(self, folder: Path, done: Written, *, must: bool = False) -> None:
        """Report the outcome of a checkpoint, and note if the run cannot continue."""
        if done.not_finite:  # later ones will not be finite either
            what = f"{done.not_finite} is not finite after step {step_of(folder)}"
            self._ends_with = not_finite_error(f"{what}, so this step is not saved", self.newest)
            return
        process, problem = next(
            ((rank, each) for rank, each in enumerate(done.problems) if each), (0, None)
        )
        if problem is None:
            self.newest, self._failed = folder, 0
            self.figures.append(
                {"step": step_of(folder), "bytes": done.bytes, "write_s": done.seconds}
            )
            size = f"{done.bytes / 2**20:,.2f} MiB"
            self.say(f"checkpoint: {folder} ({size}, written in {done.seconds:.2f} s)")
            if self._not_removed:
                self.say(self._not_removed)
            return
        self._failed += 1
        room = ""  # PyTorch's zip writer does not say that the disk is full
        if self.hosts:
            problem = f"{self.hosts.names[process]}: {problem}"
        else:
            with contextlib.suppress(OSError, TypeError):  # TypeError: of a URL
                room = f"; {shutil.disk_usage(self.ckpt_dir).free / 1e6:,.1f} MB free"
        text = f"{folder.name} could not be written to {self.ckpt_dir} ({problem}{room})"
        if must or self._failed >= self.max_failed:
            times = "" if self._failed == 1 else f", {self._failed} saves in a row have failed"
            last = f"the newest checkpoint is {self.newest}" if self.newest else "there is none"
            self._ends_with = RunFailed(f"checkpoint {text}{times}: {last}", NOT_SAVED)
            return
        self.say(
            f"warning: checkpoint {text}: training continues, {self._failed} of --max_failed_saves "
            f"{self.max_failed} failed in a row"
        )

    def tidy(self) -> None:
        """Finish the cleanup of a start that was killed after it had written ``newest``."""
        is_first = self.hosts.is_first if self.hosts else self.backend.is_main
        if self.newest and is_first:
            self._prune(self.newest, self.protected)
            if self._not_removed:
                self.say(self._not_removed)

    def _prune(self, newest: Path, protected: Path | None) -> None:
        """Remove old checkpoints. A warning is logged later, as this may run in another thread."""
        self._not_removed = None
        try:
            prune(self.ckpt_dir, self.keep, [newest, *([protected] if protected else [])])
        except OSError as error:
            self._not_removed = (
                f"warning: an old checkpoint cannot be removed ({reason_of(error)}): training "
                "continues, and the next checkpoint tries again"
            )
