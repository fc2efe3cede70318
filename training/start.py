"""Decide what a training run starts from.

``plan_start`` decides in each process before any device starts, and ``confirm_start`` makes all
processes agree once they are connected. The first of these cases that applies is used:

1. "local": resume from ``--local_ckpt_dir``, if it has a complete step that is newer than the
   newest undamaged checkpoint of case 2. Only for ``--resume auto``, or after a restart. Finding
   out takes all hosts, so only ``confirm_start`` decides it, and the configuration never comes from
   such a step: model and preprocessing are those of case 2, or of the flags.
2. "here": resume from ``--ckpt_dir``: after a restart from its newest checkpoint, whatever
   ``--resume`` names; otherwise as ``--resume`` (auto, best, lowest_loss) or ``--resume_epoch``
   says.
3. "elsewhere": resume from ``--resume FOLDER``.
4. "weights": start from trained weights, ``--init_from``. Only if there is nothing to resume, so
   that running the same command again continues the run.
5. "new": start from new weights.

A restart is made by the launcher, with the same RUN_JOB_ID; a command that is run again is a new
job.
"""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from data.source import DataSource
from training import files
from training.backend import Backend
from training.checkpoints import choose
from training.checkpoints.compatible import (
    changes_since,
    check_continues,
    check_same_training,
    other_order,
)
from training.checkpoints.config import CheckpointConfig
from training.checkpoints.format import Elsewhere, SavedRun
from training.checkpoints.local_tier import LocalTier
from training.checkpoints.per_host import HostFolders, Spread
from training.config import RunConfig
from training.errors import UsageError
from training.flags import with_values
from training.processes import exchange
from training.resolve import Run, take_over, trained_model
from training.schedule import Position
from training.weights.describe import settings_of, take_over_described
from training.weights.find import commits, find, pretrained
from training.weights.source import Source


@dataclass(frozen=True)
class Start:
    """What a training run starts from: one of the cases above."""

    kind: Literal["local", "here", "elsewhere", "weights", "new"]
    saved: SavedRun | None = None
    """What is resumed (cases 1 to 3); for a "local" step, this process's part."""
    weights: Source | None = None
    """The weights of ``--init_from`` (case 4), found but not read."""
    continues_from: Path | None = None
    """The checkpoint that the run continues: later ones in ``--ckpt_dir`` are not its own. It is
    older than a "local" step."""
    notes: tuple[str, ...] = ()
    """Lines for the log."""
    elsewhere: Elsewhere = field(default_factory=dict)
    """The files of ``saved`` that are on other hosts, with ``--ckpt_dir_per_host``."""

    def position(self, run: Run, data: DataSource, epoch_steps: int) -> Position:
        """Return the position in the data where training starts, in batches of this run's size.

        ``epoch_steps``: the number of batches per epoch in this run. A step is an update, counted
        over the whole run. With a different batch size the run continues at the same position in
        the data, and so in the schedule.
        """
        if not self.saved:
            return Position()
        at, batch_size = self.saved.position, run.config.data.batch_size
        epoch, batches = at.epoch, at.images_in_epoch // batch_size
        if other_order(self.saved, run, data):  # with --restart_epoch; refused without it
            batches = 0
        if batches >= epoch_steps:
            epoch, batches = epoch + 1, 0
        return Position(at.step, epoch, batches * batch_size)


# -- before any device starts ----------------------------------------------------------------------


def plan_start(config: RunConfig) -> tuple[RunConfig, Start]:
    """Return what this process would start from (cases 2 to 5), and the configuration with its
    model, objective and preprocessing, except where flags are set.

    Raises UsageError for an invalid run folder, for a checkpoint or weights that cannot be read,
    and for flags that contradict their model.
    """
    choose.check_folders(config.checkpoints)
    saved, _ = choose.find_checkpoint(config.checkpoints, alone=True)
    if saved:
        config = take_over(config, settings_of(saved, config.data), saved.path)
        config = with_values(config, commits(config, saved))
        check_same_training(saved, trained_model(config), config)
        return config, _resumed(saved, config.checkpoints)
    config = with_values(config, pretrained(config))
    config = with_values(config, commits(config, None))
    if init_from := config.checkpoints.init_from:
        config, weights = take_over_described(
            config, find(init_from, "--init_from"), keeps_head=False
        )
        return with_values(config, {"init_from": weights.name}), Start("weights", weights=weights)
    return config, Start("new")


def _resumed(
    saved: SavedRun,
    checkpoints: CheckpointConfig,
    continues_from: Path | None = None,
    notes: tuple[str, ...] = (),
) -> Start:
    if saved.is_part:
        return Start("local", saved, continues_from=continues_from, notes=notes)
    is_here = saved.path.parent.resolve() == files.folder_at(checkpoints.ckpt_dir).resolve()
    return Start("here" if is_here else "elsewhere", saved, continues_from=saved.path, notes=notes)


# -- on the devices' hosts: all processes agree ----------------------------------------------------


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
    ckpt_dir: Path, lock: files.FolderLock, *, is_main: bool, hosts: HostFolders | None = None
) -> None:
    """Lock the folder, or those of all ``hosts``, for this job. Raises in all processes if that
    fails: RunFailed in a restart whose folder is still in use, perhaps by a lost machine; otherwise
    UsageError."""
    token, is_first = "", hosts.is_first if hosts else is_main
    with exchange.raise_on_all_ranks():
        if is_first:
            token = lock.acquire(is_restart=choose.is_restart(ckpt_dir))
    token = exchange.all_gather_object(token)[hosts.first if hosts else 0]
    with exchange.raise_on_all_ranks():
        if not is_first:  # closing the file in the first process would release its lock
            files.check_same_folder(ckpt_dir, token)


def confirm_start(
    planned: Start,
    run: Run,
    data: DataSource,
    backend: Backend,
    hosts: HostFolders | None = None,
) -> tuple[Start, LocalTier | None]:
    """Return what all processes start from, and the local tier with ``--local_ckpt_dir``.

    Up to here, each process decided for itself. Call this with ``--ckpt_dir`` locked: the previous
    holder of the lock may have written and removed checkpoints. The first process names the
    candidates; all processes check them, and use the first undamaged one (cases 2 and 3) or a newer
    local step (case 1). Raises UsageError in all processes. ``hosts``: with a folder on each host's
    disk; they have exchanged which checkpoints there are.
    """
    checkpoints, candidates = run.config.checkpoints, choose.Candidates([])
    resumes_newest = False
    with exchange.raise_on_all_ranks():
        if backend.is_main:
            _, candidates = choose.find_checkpoint(checkpoints)
            resumes_newest = choose.resumes_newest(checkpoints)
    names = [str(path) for path in candidates.paths]
    names, passed_over, explicit, resumes_newest = exchange.broadcast_object(
        [names, candidates.passed_over, candidates.explicit, resumes_newest]
    )
    candidates = choose.Candidates([files.folder_at(name) for name in names], passed_over, explicit)
    local = None
    if checkpoints.local_ckpt_dir is not None:
        local = LocalTier(run, backend.shards, resumes=resumes_newest, hosts=hosts)
    start = _first_undamaged(
        candidates, lambda saved: check_continues(saved, run, data), local, checkpoints, hosts
    )
    with exchange.raise_on_all_ranks():
        if planned.saved and not start.saved:
            raise UsageError(
                f"{planned.saved.path} was removed while this run started: start it again"
            )
    notes = list(start.notes)
    if local:
        notes.append(local.description)
    if start.saved:
        if checkpoints.init_from:
            ignored = f"--init_from {checkpoints.init_from}"
            notes.append(f"note: ignoring {ignored}: resuming this run")
        notes += changes_since(start.saved, run, data)
    elif planned.kind == "weights":
        start = replace(start, kind="weights")
    return replace(start, notes=tuple(notes)), local


_BEFORE_ALL = -1


def _first_undamaged(
    candidates: choose.Candidates,
    check: Callable[[SavedRun], None],
    local: LocalTier | None,
    checkpoints: CheckpointConfig,
    hosts: HostFolders | None = None,
) -> Start:
    """Return the start from the newest undamaged candidate, or from the newest step of ``local`` if
    that is newer; a new start if there is nothing to resume.

    ``check`` raises UsageError for what does not fit the run. Raises UsageError in all processes if
    all candidates are damaged and ``local`` has no step.
    """
    verify, damaged = checkpoints.verify_checkpoint, list(candidates.passed_over)
    notes: dict[str, None] = {}  # each once: ``local`` is asked again after a damaged candidate
    incomplete = False
    for path in [*candidates.paths, None]:
        # After a restart, any local step is newer than a checkpoint that a flag names.
        step = choose.step_of(path) if path and not candidates.explicit else _BEFORE_ALL
        saved, spread = None, Spread()
        if local:  # case 1
            saved, more = local.resume(step, verify=verify)
            notes |= dict.fromkeys(more)
        if not saved and path:  # cases 2 and 3
            if hosts and not files.is_url(path):
                spread = hosts.find(path)
            saved, problem = _read_for_all(path, spread, hosts, verify=verify)
            incomplete |= bool(spread.problem)
            if problem:
                damaged.append(problem)
                if candidates.explicit:
                    break
                continue
        if saved:
            with exchange.raise_on_all_ranks():
                check(saved)
            warnings = [f"warning: {text}: resuming {saved.path.name} instead" for text in damaged]
            start = _resumed(saved, checkpoints, path, (*notes, *warnings))
            return replace(start, elsewhere=spread.elsewhere)
    if incomplete:
        raise UsageError(f"{damaged[0]}, or use another --ckpt_dir for a new run", agreed=True)
    if candidates.paths:
        raise UsageError(
            f"{damaged[0]}: use another one, or use it unverified with --no_verify_checkpoint",
            agreed=True,
        )
    if damaged:
        raise choose.AllDamaged(damaged, agreed=True)
    return Start("new", notes=(*notes,))


def _read_for_all(
    path: Path, spread: Spread, hosts: HostFolders | None, *, verify: bool
) -> tuple[SavedRun | None, str]:
    """Return what a checkpoint records about its run, or None and what is wrong with it in any
    process. ``spread``: where its files are, if they are on several ``hosts``. All processes must
    call this."""
    if spread.problem:
        return None, f"{path} is incomplete: {spread.problem}"
    share, of = (hosts.share, spread.here) if hosts and spread.here else (None, None)
    if problem := choose.damage_for_all(path, verify=verify, share=share, of=of):
        return None, f"{path} is damaged ({problem})"
    with exchange.raise_on_all_ranks():
        saved, problem = choose.read_or_problem(path, spread.elsewhere)
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
            later = choose.later_checkpoints(run.ckpt_dir, start.continues_from)
            number = choose.free_number(run.ckpt_dir) if later else 0
    number = max(exchange.all_gather_object(number))  # the same on all hosts
    with exchange.raise_on_all_ranks():
        if later:
            folder = choose.set_aside(run.ckpt_dir, later, number)
            names = ", ".join(path.name for path in later)
            note = (
                f"note: this run continues from an earlier step: moved {names} to {folder}; "
                f"--resume {folder} continues from there"
            )
        if hosts and hosts.is_first and not is_main:  # the first process writes the whole file
            job = {"job": os.environ.get("RUN_JOB_ID")}
            files.replace_file(run.ckpt_dir / choose.RUN_FILE, json.dumps(job) + "\n")
    note = next(filter(None, exchange.all_gather_object(note)), "")
    return [note] if note else []
