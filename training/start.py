"""All processes of a run agree on what it starts from (``training/checkpoints/choose.py``)."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from training import files
from training.checkpoints import inventory, removal
from training.checkpoints.choose import AllDamaged, Start, choose_start
from training.checkpoints.inventory import Spread
from training.checkpoints.state import damage_for_all
from training.errors import UsageError
from training.logs.records import RUN_FILE
from training.processes import exchange

if TYPE_CHECKING:
    from collections.abc import Callable

    from training.backend import Backend
    from training.checkpoints.format import SavedRun
    from training.checkpoints.inventory import Inventory
    from training.checkpoints.local_tier import LocalTier
    from training.checkpoints.per_host import HostFolders
    from training.resolve import Run


def hint_for_hosts(planned: Start) -> str:
    """Return what to do if the processes differ because some hosts' folders have no checkpoint that
    settings are taken from; "" if all plan the same. All processes must call this."""
    by_process = exchange.all_gather_object([planned.saved is not None, socket.gethostname()])
    if len({has for has, _ in by_process}) == 1:
        return ""
    process, host = next((n, host) for n, (has, host) in enumerate(by_process) if not has)
    return (
        f"; {exchange.name(process, host)} has no checkpoint in --ckpt_dir to take settings from: "
        "give all flags of the model, the objective and the preprocessing"
    )


def enter_folder(
    ckpt_dir: Path,
    lock: files.FolderLock,
    *,
    is_restart: bool,
    is_main: bool,
    hosts: HostFolders | None = None,
) -> None:
    """Lock the folder, or those of all ``hosts``, for this job. Raises in all processes if that
    fails: RunFailed in a restart whose folder is still in use, perhaps by a lost machine; otherwise
    UsageError."""
    token, is_first = "", hosts.is_first if hosts else is_main
    with exchange.raise_on_all_ranks():
        if is_first:
            token = lock.acquire(is_restart=is_restart)
    token = exchange.all_gather_object(token)[hosts.first if hosts else 0]
    with exchange.raise_on_all_ranks():
        if not is_first:  # closing the file in the first process would release its lock
            files.check_same_folder(ckpt_dir, token)


def confirm_start(
    planned: Start,
    run: Run,
    backend: Backend,
    hosts: HostFolders | None = None,
    open_local: Callable[..., LocalTier] | None = None,
) -> tuple[Start, LocalTier | None]:
    """Return what all processes start from, and the local tier that ``open_local`` opens (with
    ``--local_ckpt_dir``).

    Call this with ``--ckpt_dir`` locked: the previous holder of the lock may have written and
    removed checkpoints since ``planned`` was chosen. If the folders have changed, the first process
    chooses again, and the others read its choice. Raises UsageError in all processes. ``hosts``:
    with a folder on each host's disk; they have exchanged which checkpoints there are.
    """
    checkpoints, start, found = run.config.checkpoints, planned, planned.found
    with exchange.raise_on_all_ranks():
        if backend.is_main and (found.alone or _has_changed(found)):
            start = inventory.retry_while_error_changes(
                lambda: choose_start(inventory.inventory(checkpoints), checkpoints)
            )
    start = _as_first_process(start)
    local = None
    if open_local:
        local = open_local(run, backend.shards, resumes=start.resumes_newest, hosts=hosts)
    start = newest_usable(start, local, hosts, verify=checkpoints.verify_checkpoint)
    with exchange.raise_on_all_ranks():
        if planned.saved and not start.saved:
            raise UsageError(
                f"{planned.saved.path} was removed while this run started: start it again"
            )
    return start, local


def _has_changed(found: Inventory) -> bool:
    return any(inventory.digest(folder) != before for folder, before in found.digests.items())


def _as_first_process(start: Start) -> Start:
    """Return what the first process has chosen; all processes must call this. ``saved`` stays if
    this process has found the same in the folders."""
    mine = start.candidates
    first = exchange.broadcast_object(
        {
            "digests": [*start.found.digests.values()],
            "kind": start.kind,
            "resumes_newest": start.resumes_newest,
            "paths": [str(path) for path in mine.paths],
            "passed_over": mine.passed_over,
            "explicit": mine.explicit,
        }
    )
    is_current = [*start.found.digests.values()] == first["digests"]
    saved = start.saved if is_current else None
    candidates = replace(
        mine,
        paths=tuple(files.folder_at(name) for name in first["paths"]),
        passed_over=tuple(first["passed_over"]),
        explicit=first["explicit"],
        saved=saved,
    )
    return replace(
        start,
        kind=first["kind"],
        saved=saved,
        candidates=candidates,
        resumes_newest=first["resumes_newest"],
    )


_BEFORE_ALL = -1


def newest_usable(
    start: Start, local: LocalTier | None, hosts: HostFolders | None = None, *, verify: bool
) -> Start:
    """Return the start from the first undamaged candidate, or from the newest step of ``local`` if
    that is newer; all processes must call this. ``start`` itself has nothing to resume if it has no
    candidates and ``local`` no step.

    Raises UsageError in all processes if all candidates are damaged and ``local`` has no step.
    """
    candidates, damaged = start.candidates, list(start.candidates.passed_over)
    notes: dict[str, None] = {}  # each once: ``local`` is asked again after a damaged candidate
    incomplete = False
    for path in [*candidates.paths, None]:
        kind, saved, spread = start.kind, None, Spread()
        if local:  # case 1
            # After a restart, any local step is newer than a checkpoint that a flag names.
            step = inventory.step_of(path) if path and not candidates.explicit else _BEFORE_ALL
            saved, more = local.resume(step, verify=verify)
            notes |= dict.fromkeys(more)
            kind = "local" if saved else kind
        if not saved and path:  # cases 2 and 3
            if hosts and not files.is_url(path):
                spread = hosts.find(path)
            saved, problem = _read_for_all(path, spread, hosts, start.saved, verify=verify)
            incomplete |= bool(spread.problem)
            if problem:
                damaged.append(problem)
                if candidates.explicit:
                    break
                continue
        if saved:
            warnings = [f"warning: {text}: resuming {saved.path.name} instead" for text in damaged]
            return replace(
                start,
                kind=kind,
                saved=saved,
                continues_from=path,
                notes=(*notes, *warnings),
                elsewhere=spread.elsewhere,
            )
    if incomplete:
        raise UsageError(f"{damaged[0]}, or use another --ckpt_dir for a new run", agreed=True)
    if candidates.paths:
        raise UsageError(
            f"{damaged[0]}: use another one, or use it unverified with --no_verify_checkpoint",
            agreed=True,
        )
    if damaged:
        raise AllDamaged(damaged, agreed=True)
    return replace(start, saved=None, continues_from=None, notes=(*notes,))


def _read_for_all(
    path: Path,
    spread: Spread,
    hosts: HostFolders | None,
    known: SavedRun | None,
    *,
    verify: bool,
) -> tuple[SavedRun | None, str]:
    """Return what a checkpoint records about its run, or None and what is wrong with it in any
    process. ``spread``: where its files are, if they are on several ``hosts``. ``known``: what was
    read before, perhaps of this checkpoint. All processes must call this."""
    if spread.problem:
        return None, f"{path} is incomplete: {spread.problem}"
    share, of = (hosts.share, spread.here) if hosts and spread.here else (None, None)
    if problem := damage_for_all(path, verify=verify, share=share, of=of):
        return None, f"{path} is damaged ({problem})"
    saved, problem = known, ""
    with exchange.raise_on_all_ranks():
        if not known or known.path != path:
            saved, problem = inventory.read_or_problem(path, spread.elsewhere)
    return saved, next(filter(None, exchange.all_gather_object(problem)), "")


def set_aside_newer_checkpoints(
    start: Start,
    local: LocalTier | None,
    run: Run,
    *,
    is_main: bool,
    hosts: HostFolders | None = None,
) -> list[str]:
    """Move away the checkpoints in ``--ckpt_dir`` that this run does not continue, and remove local
    steps; return a log line if any were moved. Raises UsageError in all processes on failure."""
    if local:
        kept = start.saved.position.step if start.saved and start.kind == "local" else None
        local.forget(kept)
    note, later, number = "", list[Path](), 0
    with exchange.raise_on_all_ranks():
        if hosts.is_first if hosts else is_main:
            later = removal.later_checkpoints(run.ckpt_dir, start.continues_from)
            number = removal.free_number(run.ckpt_dir) if later else 0
    number = max(exchange.all_gather_object(number))  # the same on all hosts
    with exchange.raise_on_all_ranks():
        if later:
            folder = removal.set_aside(run.ckpt_dir, later, number)
            names = ", ".join(path.name for path in later)
            note = (
                f"note: this run continues from an earlier step: moved {names} to {folder}; "
                f"--resume {folder} continues from there"
            )
        if hosts and hosts.is_first and not is_main:  # the first process writes the whole file
            job = {"job": os.environ.get("RUN_JOB_ID")}
            files.replace_file(run.ckpt_dir / RUN_FILE, json.dumps(job) + "\n")
    note = next(filter(None, exchange.all_gather_object(note)), "")
    return [note] if note else []
