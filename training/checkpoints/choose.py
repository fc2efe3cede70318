"""Choose what a training run starts from: pure functions of an ``Inventory``.

The first of these cases that applies is used:

1. "local": resume from ``--local_ckpt_dir``, if it has a complete step that is newer than the
   newest undamaged checkpoint of case 2. Only for ``--resume auto``, or after a restart. Finding
   out takes all hosts (``training/start.py``), and the configuration never comes from such a step:
   model and preprocessing are those of case 2, or of the flags.
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

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from training.checkpoints.config import CheckpointConfig
from training.checkpoints.format import Elsewhere, SavedRun
from training.checkpoints.inventory import FoundCheckpoint, Inventory, checkpoints_at, examine
from training.errors import UsageError
from training.files import folder_at

# -- which checkpoints -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidates:
    """The checkpoints that may be resumed, in the order in which to try them."""

    paths: tuple[Path, ...] = ()
    passed_over: tuple[str, ...] = ()
    """Why newer checkpoints are not resumed, one line each."""
    explicit: bool = False
    """Whether a flag names this checkpoint, so that no other may replace it."""
    saved: SavedRun | None = None
    """The description of the first."""


class AllDamaged(UsageError):
    """Raised if a run has checkpoints but none of them can be read."""

    def __init__(self, passed_over: Sequence[str], *, agreed: bool = False) -> None:
        """``passed_over``: what is wrong with each checkpoint, newest first."""
        super().__init__(
            f"{passed_over[0]}, and so are all older checkpoints: use --resume with another one, "
            "or another --ckpt_dir to start a new run",
            agreed=agreed,
        )
        self.passed_over = tuple(passed_over)


def choose(found: Inventory, checkpoints: CheckpointConfig) -> Candidates:
    """Return the checkpoints that ``--resume`` and ``--resume_epoch`` select; none for a new run.

    A pure function. Raises UsageError if the flags select none, or only damaged ones.
    """
    resume, epoch = checkpoints.resume, checkpoints.resume_epoch
    if found.is_restart and found.here:  # do not lose what the job has done since
        return _newest_first(found.here)
    if resume == "auto" and not epoch:
        return _newest_first(found.here)
    if found.named:
        return _only(found.named[0]) if found.names_one else _newest_first(found.named)
    folder = folder_at(checkpoints.ckpt_dir)
    if resume == "none" and not epoch:
        if found.here:
            raise UsageError(
                f"--resume none, but {folder} contains {found.here[0].path.name} of an earlier "
                "run: choose another --ckpt_dir, or remove its step_* folders"
            )
        return Candidates()
    if found.alone and not found.here:
        return Candidates()
    if epoch:
        raise UsageError(
            f"--resume_epoch {epoch}: {folder} has no checkpoint from the end of that epoch"
        )
    if found.alone:  # another host has the evaluations
        return _newest_first(found.here)
    raise UsageError(f"--resume {resume}: {folder} has no evaluated checkpoint")


def candidates_in(path: Path) -> Candidates:
    """Return the checkpoint ``path``, or those of the run whose --ckpt_dir it is, newest first.

    Raises UsageError if it is neither, or if there are only damaged ones.
    """
    paths, names_one = checkpoints_at(path)
    found = examine(paths)
    return _only(found[0]) if names_one else _newest_first(found)


def _newest_first(found: Sequence[FoundCheckpoint]) -> Candidates:
    problems = [
        f"{each.path} is damaged ({each.damage})" if each.damage else each.unreadable
        for each in found
    ]
    usable = [each for each, problem in zip(found, problems, strict=True) if not problem]
    if found and not usable:
        raise AllDamaged(problems)
    return Candidates(
        tuple(each.path for each in usable),
        passed_over=tuple(itertools.takewhile(bool, problems)),
        saved=usable[0].saved if usable else None,
    )


def _only(one: FoundCheckpoint) -> Candidates:
    if one.damage:
        raise UsageError(f"cannot read the checkpoint {one.path}: {one.damage}")
    if one.unreadable:
        raise UsageError(one.unreadable)
    return Candidates((one.path,), explicit=True, saved=one.saved)


# -- which start -----------------------------------------------------------------------------------

StartKind = Literal["local", "here", "elsewhere", "weights", "new"]


@dataclass(frozen=True)
class Start:
    """What a training run starts from: one of the cases above."""

    kind: StartKind
    saved: SavedRun | None = None
    """What is resumed (cases 1 to 3); for a "local" step, this process's part."""
    found: Inventory = field(default_factory=Inventory)
    """What it was chosen from."""
    candidates: Candidates = field(default_factory=Candidates)
    """The checkpoint that was chosen, and those that replace it if it is damaged."""
    resumes_newest: bool = False
    """Whether the newest step of the run is resumed, wherever it is saved."""
    continues_from: Path | None = None
    """The checkpoint that the run continues: later ones in ``--ckpt_dir`` are not its own. It is
    older than a "local" step."""
    notes: tuple[str, ...] = ()
    """Lines for the log."""
    elsewhere: Elsewhere = field(default_factory=dict)
    """The files of ``saved`` that are on other hosts, with ``--ckpt_dir_per_host``."""


def choose_start(found: Inventory, checkpoints: CheckpointConfig) -> Start:
    """Return what to start from (cases 2 to 5), by what was found. A pure function.

    Raises UsageError if flags select no checkpoint, or only damaged ones; in the latter case not if
    a step of ``--local_ckpt_dir`` may be resumed.
    """
    is_auto = checkpoints.resume == "auto" and not checkpoints.resume_epoch
    resumes_newest = is_auto or found.is_restart
    try:
        candidates = choose(found, checkpoints)
    except AllDamaged as error:
        if checkpoints.local_ckpt_dir is None or not resumes_newest:
            raise
        candidates = Candidates(passed_over=error.passed_over)
    kind: StartKind = "new"
    if candidates.paths:
        kind = "here" if found.named_is_here else "elsewhere"
    elif checkpoints.init_from or checkpoints.pretrained:
        kind = "weights"
    return Start(
        kind,
        candidates.saved,
        found=found,
        candidates=candidates,
        resumes_newest=resumes_newest,
        continues_from=candidates.paths[0] if candidates.paths else None,
    )
