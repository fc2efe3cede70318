"""Lets the processes of a run begin alike, in one folder that is theirs, at the same checkpoint."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data.files import no_link
from training.checkpoints.choose import (
    Candidates,
    Resumable,
    checkpoint_around,
    find_resumable,
    is_restart,
    later_ones,
    set_aside,
)
from training.checkpoints.format import (
    MANIFEST,
    METADATA,
    SavedRun,
    checksum,
    damage,
    read_saved_run,
)
from training.config import CheckpointConfig, RunConfig
from training.errors import UsageError
from training.files import (
    LOCK_FILE,
    FolderLock,
    UrlPath,
    as_url,
    check_own,
    check_same_folder,
    folder_at,
    is_url,
)
from training.logs.bad_images import FILE as BAD_IMAGES_FILE
from training.logs.log_folder import fetch_logs
from training.logs.records import EVENTS_FILE, METRICS_FILE
from training.processes import exchange

if TYPE_CHECKING:
    from training.weights import Weights


@dataclass
class Start:
    """Holds what the processes have agreed on."""

    resume: SavedRun | None
    notes: list[str]
    """The lines to be written to the log."""


def enter_folder(ckpt_dir: Path, lock: FolderLock, *, is_main: bool) -> None:
    """Make the folder this job's alone. Raises UsageError in all processes if it cannot be."""
    token = ""
    with exchange.failing_together():
        if is_main:
            token = lock.acquire(is_restart=is_restart(ckpt_dir))
    token = exchange.gather(token)[0]
    with exchange.failing_together():
        if not is_main:  # whose lock would go with the file's being closed again
            check_same_folder(ckpt_dir, token)


def choose_checkpoint(
    candidates: Candidates, check: Callable[[SavedRun], None], *, verify: bool
) -> Start:
    """Choose, for all processes, the first of the first process's candidates that is whole.

    ``check`` raises UsageError for one that is incompatible with the arguments. Raises UsageError
    in all processes if there are candidates and none is whole.
    """
    mine = [[str(path) for path in candidates.paths], candidates.passed_over, candidates.explicit]
    named, told, explicit = exchange.gather(mine)[0]
    paths, notes = [folder_at(path) for path in named], list(told)
    for path in paths:
        _check_same_checkpoint(path)
        problem = _damage_of(path) if verify else None
        saved: list[SavedRun] = []
        if problem is None:
            with exchange.failing_together():
                saved.append(read_saved_run(path))
                check(saved[0])
            if notes:
                notes = [f"note: {note}, so {path.name} is resumed" for note in notes]
            return Start(saved[0], notes)
        if explicit or path == paths[-1]:
            raise UsageError(
                f"{path} is damaged ({problem}): name another one, or take it as it is with "
                "--no_verify_checkpoint",
                agreed=True,
            )
        notes.append(f"{path} is damaged ({problem})")
    return Start(None, notes)


def check_weights(weights: Weights, *, verify: bool) -> None:
    """Compare a checkpoint's files with its manifest, each process its share of them.

    Without ``verify`` only that all processes see the same. Raises UsageError in all of them.
    """
    if weights.tensors is None and weights.run:
        choose_checkpoint(Candidates([weights.path]), lambda saved: None, verify=verify)
    elif verify:
        weights.check_undamaged()


def _check_same_checkpoint(path: Path) -> None:
    """Raise UsageError in all processes if one sees another checkpoint there than the first."""
    seen = None
    with exchange.failing_together():
        file = path / (MANIFEST if (path / MANIFEST).exists() else METADATA)
        if file.exists():
            seen = checksum(file)
    found = exchange.gather([seen, socket.gethostname()])
    for number, (other, host) in enumerate(found):
        if other != found[0][0]:
            raise UsageError(
                f"{exchange.name(number, host)} does not see the checkpoint {path} that the "
                "first process is about to resume: give a folder that all nodes share",
                agreed=True,
            )


def _damage_of(path: Path) -> str | None:
    """Return what is wrong with the checkpoint; each process looks at its share of the files.

    Raises UsageError in all of them if one cannot reach it.
    """
    problem = None
    with exchange.failing_together():
        try:
            problem = damage(path, exchange.rank(), exchange.count())
        except ValueError as error:
            problem = str(error)
    return next((p for p in exchange.gather(problem) if p is not None), None)


def leave_later_ones(ckpt_dir: Path, resume: SavedRun | None, *, is_main: bool) -> list[str]:
    """Set aside what the folder holds beyond the resumed checkpoint; return lines for the log.

    Raises UsageError in all processes if that is not possible.
    """
    notes: list[str] = []
    with exchange.failing_together():
        if is_main and (later := later_ones(ckpt_dir, resume.path if resume else None)):
            aside = set_aside(ckpt_dir, later)
            names = ", ".join(path.name for path in later)
            notes.append(
                f"note: this run goes back: {names} set aside in {aside}, where --resume {aside} "
                "finds them"
            )
    return exchange.gather(notes)[0]


def take_logs(folder: Path, url: Path, *, is_main: bool) -> list[str]:
    """Bring the logs of a URL to the local folder they go on in; return lines for the log.

    Raises UsageError in all processes if that is not possible.
    """
    with exchange.failing_together():
        if is_main:
            try:
                fetch_logs(folder, url, (METRICS_FILE, EVENTS_FILE, BAD_IMAGES_FILE))
            except OSError as error:
                raise UsageError(f"cannot read the logs of {url}: {error.strerror}") from None
    return [
        f"note: {url} has no locks: a second job on another host is not noticed; logs are copied "
        f"there from {folder}"
    ]


def find_resumed(config: RunConfig) -> tuple[RunConfig, Resumable]:
    """Return what a training goes on from, and the configuration with the model of that.

    Raises UsageError for a folder that cannot be a run's, and for flags that contradict the model.
    """
    check_run_folder(config.checkpoints)
    resumable = find_resumable(config.checkpoints)
    if resumable.saved is None:
        return config, resumable
    from training.validation import with_resumed_model  # with timm

    return with_resumed_model(config, resumable.saved), resumable


def check_run_folder(config: CheckpointConfig) -> None:
    """Raise UsageError if no run can be kept in ``--ckpt_dir``; leave nothing there."""
    folder = folder_at(config.ckpt_dir)
    try:
        if outer := checkpoint_around(folder):
            raise UsageError(
                f"--ckpt_dir {folder} is inside of the checkpoint {outer.name}: give the run's "
                f"folder, {outer.parent}, or another one"
            )
        check_folder_writable(folder)
        if not is_url(folder) and folder.exists():
            check_own(folder, shared=config.shared_ckpt_dir)
    except OSError as error:
        raise UsageError(f"cannot read --ckpt_dir {folder}: {error.strerror}") from None


def check_folder_writable(folder: Path, flag: str = "--ckpt_dir") -> None:
    """Raise UsageError if nothing can be written to what ``flag`` names; leave nothing there."""
    import tempfile

    if url := as_url(folder):
        _check_url_writable(url)
        return
    if folder.is_file():
        raise UsageError(f"{flag} {folder} is a file, not a folder")
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        if not existing.is_dir():
            raise NotADirectoryError(0, "Not a directory", str(existing))
        with tempfile.TemporaryFile(dir=existing):
            pass
        for path in [*sorted(folder.glob("*.json*")), folder / LOCK_FILE]:
            if os.path.lexists(path):
                os.close(no_link(path, os.O_WRONLY))
    except OSError as error:
        raise UsageError(
            f"cannot write to {flag} {folder}: {error.strerror}"
            + (f": {error.filename}" if error.filename else "")
        ) from None


def _check_url_writable(folder: UrlPath) -> None:
    try:
        folder.mkdir()
        folder.check_writable()
    except OSError as error:
        raise UsageError(f"cannot write to --ckpt_dir {folder}: {error.strerror}") from None
