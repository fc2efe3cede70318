"""Choose which checkpoints in a run's folder to resume, remove or set aside."""

import contextlib
import functools
import itertools
import os
import re
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from training.checkpoints import format as checkpoint
from training.checkpoints.config import CheckpointConfig
from training.checkpoints.format import SavedRun
from training.errors import UsageError
from training.files import (
    as_url,
    check_folder_writable,
    check_own,
    folder_at,
    is_unreachable,
    is_url,
    read_object,
    remove_tree,
    sync_folder,
)
from training.logs.records import METRICS_FILE, decisive, evaluations, read_metrics, score
from training.processes import exchange
from training.weights.hub import is_on_hub

RUN_FILE = "run.json"
BEST: dict[str, Callable[[dict[str, Any]], float]] = {
    "best": score,
    "lowest_loss": lambda record: -decisive(record, "val_loss"),
}
"""The criteria by which ``--resume`` can choose evaluations; higher is better."""


@dataclass(frozen=True)
class Candidates:
    """The checkpoints that may be resumed, in the order in which to try them."""

    paths: list[Path]
    passed_over: tuple[str, ...] = ()
    """Why newer checkpoints are not resumed, one line each."""
    explicit: bool = True
    """Whether a flag names this checkpoint, so that no other may replace it."""


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


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name: 5 of ``step_5``."""
    return int(path.name.removeprefix("step_"))


def folder_of(ckpt_dir: Path, step: int) -> Path:
    return ckpt_dir / f"step_{step}"


def step_folders(ckpt_dir: Path) -> list[Path]:
    """Return everything in a run's folder that has a checkpoint's name, sorted by step."""
    if not ckpt_dir.is_dir():
        return []
    return sorted(
        (path for path in ckpt_dir.iterdir() if checkpoint.NAME.fullmatch(path.name)), key=step_of
    )


def complete_checkpoints(ckpt_dir: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return [path for path in step_folders(ckpt_dir) if checkpoint.is_complete(path)]


def checkpoint_around(folder: Path) -> Path | None:
    """Return the checkpoint that a folder is, or is inside of at any depth; None if there is none.

    Recognized by DCP's metadata, or by its name in a run's folder, as it may be incomplete.
    """
    outer = folder.resolve()
    while outer.name:
        if (outer / checkpoint.METADATA).is_file():
            return outer
        if checkpoint.NAME.fullmatch(outer.name) and (outer.parent / METRICS_FILE).is_file():
            return outer
        outer = outer.parent
    return None


def is_restart(ckpt_dir: Path) -> bool:
    """Return True if this job has started in this folder before and is being restarted.

    Launchers set a job name that stays the same across restarts; ``run.json`` records it. Raises
    OSError if that file cannot be reached.
    """
    job = os.environ.get("RUN_JOB_ID")
    try:
        return bool(job) and read_object(ckpt_dir / RUN_FILE).get("job") == job
    except (OSError, ValueError) as error:
        if is_unreachable(error):
            raise
        return False


def check_folders(checkpoints: CheckpointConfig) -> None:
    """Raise UsageError for a ``--ckpt_dir`` or ``--local_ckpt_dir`` that a run cannot use."""
    folder = folder_at(checkpoints.ckpt_dir)
    try:
        if outer := checkpoint_around(folder):
            raise UsageError(
                f"--ckpt_dir {folder} is inside the checkpoint {outer.name}: use the run's "
                f"folder, {outer.parent}, or another one"
            )
        check_folder_writable(folder)
        if is_url(folder) and checkpoints.ckpt_dir_per_host:
            raise UsageError(
                f"--ckpt_dir_per_host is for folders on the hosts' disks: drop it, all hosts can "
                f"read and write --ckpt_dir {folder}"
            )
        if not is_url(folder) and folder.exists():
            check_own(folder, shared=checkpoints.allow_other_owners)
    except OSError as error:
        raise UsageError(f"cannot read --ckpt_dir {folder}: {error.strerror}") from None
    if (local := checkpoints.local_ckpt_dir) is None:
        return
    if is_url(folder_at(local)):
        raise UsageError(
            f"--local_ckpt_dir {local} is a URL: use a folder on the local disk of each host"
        )
    if Path(local).resolve() == Path(folder).resolve():
        raise UsageError(
            f"--local_ckpt_dir {local} is the same folder as --ckpt_dir: use another one"
        )
    check_folder_writable(Path(local), "--local_ckpt_dir")
    if Path(local).exists():
        check_own(Path(local), "--local_ckpt_dir")


def find_checkpoint(
    checkpoints: CheckpointConfig, *, alone: bool = False
) -> tuple[SavedRun | None, Candidates]:
    """Return the checkpoint that the flags name (cases 2 and 3 of ``training/start.py``), and those
    that may replace it. ``alone``: with ``--ckpt_dir_per_host``, this host does not know yet what
    is on the others.

    If all are damaged but steps of ``--local_ckpt_dir`` may be resumed, return only the reasons: a
    local step may still be found.
    """
    folder = folder_at(checkpoints.ckpt_dir)
    try:
        return find_readable(
            lambda: named_candidates(
                folder,
                checkpoints.resume,
                checkpoints.resume_epoch,
                per_host=checkpoints.ckpt_dir_per_host,
                alone=alone and checkpoints.ckpt_dir_per_host,
            )
        )
    except AllDamaged as error:
        if checkpoints.local_ckpt_dir is None or not resumes_newest(checkpoints):
            raise
        return None, Candidates([], error.passed_over, explicit=False)


def resumes_newest(checkpoints: CheckpointConfig) -> bool:
    """Return True if the newest step of the run should be resumed, wherever it is saved."""
    is_auto = checkpoints.resume == "auto" and not checkpoints.resume_epoch
    return is_auto or is_restart(folder_at(checkpoints.ckpt_dir))


def named_candidates(
    ckpt_dir: Path,
    resume: str,
    resume_epoch: int,
    *,
    per_host: bool = False,
    alone: bool = False,
) -> Candidates:
    """Return the checkpoints that ``--resume`` and ``--resume_epoch`` select; none for a new run.

    Checks only names and sizes; the content is checked when one is resumed. ``per_host``: other
    hosts may have files that are missing here. ``alone``: so may they have checkpoints, and the
    evaluations. Raises UsageError.
    """
    quick_problem = functools.partial(checkpoint.quick_problem, per_host=per_host)
    with checkpoint.readable(ckpt_dir, "--ckpt_dir"):
        existing = complete_checkpoints(ckpt_dir)
        if existing and is_restart(ckpt_dir):
            resume, resume_epoch = "auto", 0  # do not lose what the job has done since
        if alone and not existing and (resume_epoch or resume in ("auto", *BEST)):
            return Candidates([])
        if resume_epoch:
            for path in reversed(existing):
                if quick_problem(path) is None and (saved := read_or_problem(path)[0]):
                    position = saved.position
                    if (position.epoch, position.images_in_epoch) == (resume_epoch, 0):
                        return Candidates([path])
            raise UsageError(
                f"--resume_epoch {resume_epoch}: {ckpt_dir} has no checkpoint from the end of "
                "that epoch"
            )
        if resume == "none":
            if existing:
                raise UsageError(
                    f"--resume none, but {ckpt_dir} contains {existing[-1].name} of an earlier "
                    "run: choose another --ckpt_dir, or remove its step_* folders"
                )
            return Candidates([])
        if resume == "auto":
            return _newest_first(existing, quick_problem)
        if resume in BEST:
            by_step = evaluations(read_metrics(ckpt_dir))
            evaluated = [path for path in existing if step_of(path) in by_step]
            if not evaluated and alone:
                return _newest_first(existing, quick_problem)
            if not evaluated:
                raise UsageError(f"--resume {resume}: {ckpt_dir} has no evaluated checkpoint")
            best = max(evaluated, key=lambda path: BEST[resume](by_step[step_of(path)]))
            return _only(best, quick_problem)
    path = folder_at(resume)
    with checkpoint.readable(path):
        if not path.is_dir():
            if path.is_file() or is_on_hub(resume):
                raise UsageError(
                    f"--resume {resume} contains only weights: use --init_from instead"
                )
            raise UsageError(f"--resume {resume}: no such checkpoint folder")
        return candidates_in(path, quick_problem)


QuickProblem = Callable[[Path], str | None]


def candidates_in(path: Path, quick_problem: QuickProblem = checkpoint.quick_problem) -> Candidates:
    """Return the checkpoint ``path``, or those of the run whose --ckpt_dir it is, newest first.

    Raises UsageError if it is neither.
    """
    inside = complete_checkpoints(path)
    return _newest_first(inside, quick_problem) if inside else _only(path, quick_problem)


def _newest_first(existing: list[Path], quick_problem: QuickProblem) -> Candidates:
    problems = {path: quick_problem(path) for path in reversed(existing)}
    good = [path for path, problem in problems.items() if problem is None]
    newest = step_of(good[0]) if good else -1
    passed_over = tuple(
        f"{path} is damaged ({problem})"
        for path, problem in problems.items()
        if problem and step_of(path) >= newest
    )
    if existing and not good:
        raise AllDamaged(passed_over)
    return Candidates(good, passed_over, explicit=False)


def _only(path: Path, quick_problem: QuickProblem) -> Candidates:
    """Return ``path`` as the only candidate. Raises UsageError unless it is a complete checkpoint
    whose files have the right sizes."""
    if not checkpoint.is_complete(path):
        started = any(
            file.name == checkpoint.METADATA or file.name.endswith(".distcp")
            for file in path.iterdir()
        )
        if started and (path / checkpoint.METADATA).is_file():
            raise UsageError(
                f"{path} has no {checkpoint.MANIFEST}: its save was interrupted, or another "
                f"program such as torch_to_dcp wrote it: for its weights, use --init_from {path}"
            )
        if not started and not step_folders(path):
            neither = f"{path} is neither a checkpoint nor a run's folder with a checkpoint"
            if other := _newest_of_another_program(path):
                neither += f": name one of its DCP folders, such as {other}"
            raise UsageError(neither)
        raise UsageError(f"checkpoint {path} is incomplete")
    if problem := quick_problem(path):
        raise UsageError(f"cannot read the checkpoint {path}: {problem}")
    return Candidates([path])


def _newest_of_another_program(folder: Path) -> Path | None:
    """Return the last of the DCP folders ``step_<n>...`` in a folder, as NVIDIA's ViT recipe names
    them ``step_<n>_loss_<x>``; None if there is none."""
    steps = {path: match for path in folder.iterdir() if (match := _STEP.match(path.name))}
    found = [path for path in steps if (path / checkpoint.METADATA).is_file()]
    return max(found, key=lambda path: int(steps[path][1]), default=None)


_STEP = re.compile(r"step_(\d+)")


def find_readable(find: Callable[[], Candidates]) -> tuple[SavedRun | None, Candidates]:
    """Return the first candidate of ``find`` whose description can be read, and the remaining
    candidates.

    A run that is still training may remove the candidates meanwhile: they are looked for again as
    long as the error changes. Raises UsageError if there are candidates and none can be read, or if
    one cannot be reached.
    """
    before = ""
    while True:
        try:
            return _first_readable(find())
        except checkpoint.Unreachable:
            raise
        except UsageError as error:
            if str(error) == before:
                raise
            before = str(error)


def _first_readable(candidates: Candidates) -> tuple[SavedRun | None, Candidates]:
    passed_over = list(candidates.passed_over)
    for number, path in enumerate(candidates.paths):
        saved, problem = read_or_problem(path)
        if saved:
            left = candidates.paths[number:]
            return saved, replace(candidates, paths=left, passed_over=tuple(passed_over))
        passed_over.append(problem)
    if candidates.paths:
        raise UsageError(passed_over[-1]) if candidates.explicit else AllDamaged(passed_over)
    return None, candidates


def read_or_problem(
    path: Path, elsewhere: checkpoint.Elsewhere | None = None
) -> tuple[SavedRun | None, str]:
    """Return what a checkpoint records about its run, or None and why it cannot be read. Raises
    Unreachable if it may be undamaged: no older one must be resumed instead."""
    try:
        return checkpoint.read_saved_run(path, elsewhere), ""
    except checkpoint.Unreachable:
        raise
    except UsageError as error:
        return None, str(error)


def damage_for_all(
    path: Path,
    *,
    verify: bool,
    share: tuple[int, int] | None = None,
    of: Collection[str] | None = None,
) -> str | None:
    """Return what is wrong with a checkpoint's files, None if nothing; the same in all processes.

    With ``verify``, compare the files with the manifest; each process checks its share: by default
    of all files and processes, else of the files ``of``, as a number and a count. Raises UsageError
    in all processes if two of them do not see the same checkpoint. All processes must call it.
    """
    part, parts = share or (exchange.rank(), exchange.count())
    seen = None
    with exchange.raise_on_all_ranks():
        has_manifest = (path / checkpoint.MANIFEST).exists()
        file = path / (checkpoint.MANIFEST if has_manifest else checkpoint.METADATA)
        if file.exists():
            seen = checkpoint.checksum(file)
    hosts = exchange.all_gather_object([seen, socket.gethostname()])
    for number, (other, host) in enumerate(hosts):
        if other != hosts[0][0]:
            raise UsageError(
                f"{exchange.name(number, host)} does not see the checkpoint {path} that the first "
                "process is about to resume: use a folder that all nodes share",
                agreed=True,
            )
    problem = None
    with exchange.raise_on_all_ranks():
        try:
            if verify:
                problem = checkpoint.damage(path, part, parts, of=of)
        except ValueError as error:
            problem = str(error)
    return next((text for text in exchange.all_gather_object(problem) if text is not None), None)


# -- removing and moving checkpoints ---------------------------------------------------------------


def clear(folder: Path) -> None:
    """Make an empty folder for a checkpoint; remove what an interrupted one left. Raises OSError.

    Files that a bucket refuses to remove stay: they are overwritten, or not listed in the manifest.
    """
    if folder.exists() or (not is_url(folder) and folder.is_symlink()):
        try:
            remove(folder)
        except OSError:
            if not is_url(folder) or checkpoint.is_complete(folder):
                raise
    folder.mkdir(parents=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint, complete or not; its manifest first, so that it never looks complete.

    For a symbolic link, remove only the link: the target may belong to another run. A file with a
    checkpoint's name is not the program's: rename it. Raises OSError if anything is left.
    """
    if not is_url(folder):
        if folder.is_symlink():
            folder.unlink(missing_ok=True)
            return
        if checkpoint.NAME.fullmatch(folder.name) and folder.exists() and not folder.is_dir():
            folder.rename(folder.with_name(f"{folder.name}.set_aside"))
            return
    with contextlib.suppress(IsADirectoryError):
        (folder / checkpoint.MANIFEST).unlink(missing_ok=True)
    remove_tree(folder)


def prune(ckpt_dir: Path, keep: int, protected: Collection[Path]) -> None:
    """Remove all checkpoints but the ``keep`` newest (0: remove none) and those in ``protected``.

    Also removes incomplete ones, if a newer one is complete. Raises OSError if one cannot be
    removed, after removing the others.
    """
    if not keep:
        return
    complete = complete_checkpoints(ckpt_dir)
    stays = set(complete[-keep:]) | set(protected)
    newest = step_of(complete[-1]) if complete else -1
    errors = []
    for path in step_folders(ckpt_dir):
        if path not in stays and step_of(path) <= newest:
            try:
                remove(path)
            except OSError as error:
                errors.append(error)
    if errors:
        raise errors[0]


def later_checkpoints(ckpt_dir: Path, start: Path | None) -> list[Path]:
    """Return a folder's complete checkpoints that a run resumed from ``start`` does not continue.

    If ``start`` is None or in another folder, return all of them.
    """
    complete = complete_checkpoints(ckpt_dir)
    if start is None or start.parent.resolve() != ckpt_dir.resolve():
        return complete
    is_named = checkpoint.NAME.fullmatch(start.name)  # not so a copy that the user has named
    step = step_of(start) if is_named else checkpoint.read_saved_run(start).position.step
    return [path for path in complete if step_of(path) > step]


def free_number(ckpt_dir: Path) -> int:
    """Return the smallest number for which there is no folder of checkpoints set aside."""
    return next(n for n in itertools.count(1) if not (ckpt_dir / f"set_aside_{n}").exists())


def set_aside(ckpt_dir: Path, paths: Collection[Path], number: int | None = None) -> Path:
    """Move checkpoints into a new subfolder, with a copy of the metrics; return that folder.

    It can be resumed like any run's folder. ``number``: in its name; None: the smallest free one.
    Raises UsageError on failure.
    """
    folder = ckpt_dir / f"set_aside_{number or free_number(ckpt_dir)}"
    try:
        if url := as_url(ckpt_dir):
            url.check_writable(removable=True)  # otherwise each start would leave a copy there
        folder.mkdir()
        if (ckpt_dir / METRICS_FILE).exists():
            (folder / METRICS_FILE).write_bytes((ckpt_dir / METRICS_FILE).read_bytes())
        for path in paths:
            from_url, to_url = as_url(path), as_url(folder / path.name)
            if not from_url or not to_url:
                path.rename(folder / path.name)
                continue
            # A bucket cannot rename: the checkpoint is copied, its manifest last.
            to_url.mkdir()
            for file in sorted(
                from_url.iterdir(), key=lambda each: each.name == checkpoint.MANIFEST
            ):
                file.copy(to_url / file.name)
            remove(path)
    except OSError as error:
        raise UsageError(
            f"cannot set the later checkpoints of {ckpt_dir} aside ({error.strerror}): move them "
            "away, or choose another --ckpt_dir"
        ) from None
    sync_folder(folder)
    sync_folder(ckpt_dir)
    return folder
