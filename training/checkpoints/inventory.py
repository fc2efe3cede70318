"""Which complete checkpoints there are, in a run's folder and where ``--resume`` names some."""

import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from training.checkpoints import format as checkpoint
from training.checkpoints.config import CheckpointConfig
from training.checkpoints.format import SavedRun
from training.errors import UsageError
from training.files import (
    check_folder_writable,
    check_own,
    folder_at,
    is_on_hub,
    is_unreachable,
    is_url,
    read_object,
)
from training.logs.records import BEST, METRICS_FILE, RUN_FILE, evaluations, read_metrics

# -- a run's folder --------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Spread:
    """Where the files of a checkpoint are, as seen by one process."""

    here: frozenset[str] = frozenset()
    """The files on this process's host."""
    elsewhere: checkpoint.Elsewhere = field(default_factory=dict)
    """The files that only other hosts have."""
    problem: str = ""
    """Why the checkpoint cannot be used, the same in all processes; "" if all files are there."""


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


# -- the inventory ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint, as far as ``inventory`` has looked at it."""

    path: Path
    damage: str = ""
    """What is wrong with it, judging by file names and sizes."""
    unreadable: str = ""
    """Why its description cannot be read."""
    saved: SavedRun | None = None
    """Its description; of several checkpoints, only the newest that can be read is read."""


@dataclass(frozen=True)
class Inventory:
    """What a start finds in the folders that its flags name."""

    is_restart: bool = False
    """Whether this job has started in ``--ckpt_dir`` before and is being restarted."""
    here: tuple[FoundCheckpoint, ...] = ()
    """The complete checkpoints in ``--ckpt_dir``, newest first."""
    named: tuple[FoundCheckpoint, ...] = ()
    """The checkpoint that ``--resume`` or ``--resume_epoch`` names, or those of the run whose
    folder ``--resume`` names, newest first. A restart that has checkpoints looks for none."""
    names_one: bool = True
    """Whether ``named`` is one checkpoint, so that no other may replace it."""
    named_is_here: bool = True
    """Whether ``named`` is in ``--ckpt_dir``."""
    alone: bool = False
    """With ``--ckpt_dir_per_host``: other hosts may have checkpoints, and the evaluations."""
    digests: Mapping[Path, str] = field(default_factory=dict)
    """The digest of each folder that was looked at, from before."""


def digest(folder: Path, what: str = "the folder") -> str:
    """Return a checksum of what an ``inventory`` of a folder depends on: it changes if a checkpoint
    is written, removed or replaced. Raises UsageError naming ``what``."""
    with checkpoint.readable(folder, what):
        manifests = (path / checkpoint.MANIFEST for path in (folder, *step_folders(folder)))
        files = (*manifests, folder / RUN_FILE, folder / METRICS_FILE)
        seen = {str(file): _state_of(file) for file in files}
    return xxhash.xxh3_128(json.dumps(seen).encode()).hexdigest()


def _state_of(file: Path) -> str | int | None:
    """Return the checksum of a file, or the size of one that only grows; None if there is none.
    Raises OSError if it cannot be reached."""
    try:
        return file.stat().st_size if file.name == METRICS_FILE else checkpoint.checksum(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        if is_unreachable(error):
            raise
        return None


def inventory(checkpoints: CheckpointConfig, *, alone: bool = False) -> Inventory:
    """Return what there is in ``--ckpt_dir``, and which checkpoints ``--resume`` names.

    Checks names and sizes, and reads the description of the checkpoint that is newest or named; its
    content is checked when it is resumed. ``alone``: this host does not know yet which checkpoints
    others have. Raises UsageError for what cannot be read, and if ``--resume`` names no checkpoint.
    """
    folder, resume = folder_at(checkpoints.ckpt_dir), checkpoints.resume
    look = functools.partial(examine, per_host=checkpoints.ckpt_dir_per_host)
    with checkpoint.readable(folder, "--ckpt_dir"):
        digests = {folder: digest(folder, "--ckpt_dir")}
        existing = complete_checkpoints(folder)[::-1]
        found = Inventory(is_restart(folder), look(existing), alone=alone, digests=digests)
        if found.is_restart and found.here:  # the newest is resumed, whatever --resume names
            return found
        if checkpoints.resume_epoch:
            ends = (each for path in existing for each in look([path]))
            return replace(found, named=_at_end_of(checkpoints.resume_epoch, ends))
        if resume in BEST:
            return replace(found, named=look(_best(folder, existing, BEST[resume])))
    if resume in ("auto", "none"):
        return found
    path = folder_at(resume)
    with checkpoint.readable(path):
        if not path.is_dir():
            if path.is_file() or is_on_hub(resume):
                raise UsageError(
                    f"--resume {resume} contains only weights: use --init_from instead"
                )
            raise UsageError(f"--resume {resume}: no such checkpoint folder")
        digests[path] = digest(path)
        paths, names_one = checkpoints_at(path)
        return replace(
            found,
            named=look(paths),
            names_one=names_one,
            named_is_here=paths[0].parent.resolve() == folder.resolve(),
        )


def _at_end_of(epoch: int, found: Iterable[FoundCheckpoint]) -> tuple[FoundCheckpoint, ...]:
    """Return the first checkpoint that was saved after the last step of an epoch, if there is
    one."""
    for each in found:
        at = each.saved and each.saved.position
        if at and (at.epoch, at.images_in_epoch) == (epoch, 0):
            return (each,)
    return ()


def _best(
    folder: Path, existing: Sequence[Path], criterion: Callable[[dict[str, Any]], float]
) -> list[Path]:
    """Return the evaluated checkpoint with the highest score, the oldest of equally good ones, if
    there is one. ``existing``: newest first."""
    by_step = evaluations(read_metrics(folder))
    scores = {
        path: criterion(by_step[step_of(path)])
        for path in reversed(existing)
        if step_of(path) in by_step
    }
    best = max(scores, key=lambda path: scores[path], default=None)
    return [best] if best and scores[best] > -math.inf else []


def examine(paths: Iterable[Path], *, per_host: bool = False) -> tuple[FoundCheckpoint, ...]:
    """Judge complete checkpoints by names and sizes, and read descriptions until one can be read.
    ``per_host``: other hosts may have files that are missing here."""
    found: list[FoundCheckpoint] = []
    for path in paths:
        one = FoundCheckpoint(path, checkpoint.quick_problem(path, per_host=per_host) or "")
        if not one.damage and not any(each.saved for each in found):
            saved, unreadable = read_or_problem(path)
            one = replace(one, saved=saved, unreadable=unreadable)
        found.append(one)
    return tuple(found)


def checkpoints_at(path: Path) -> tuple[list[Path], bool]:
    """Return the complete checkpoints of the run whose folder ``path`` is, newest first, or
    ``path``, which is a complete checkpoint itself, and whether that is so. Raises UsageError if it
    is neither."""
    if inside := complete_checkpoints(path):
        return inside[::-1], False
    if checkpoint.is_complete(path):
        return [path], True
    started = any(
        file.name == checkpoint.METADATA or file.name.endswith(".distcp") for file in path.iterdir()
    )
    if started and (path / checkpoint.METADATA).is_file():
        raise UsageError(
            f"{path} has no {checkpoint.MANIFEST}: its save was interrupted, or another program "
            f"such as torch_to_dcp wrote it: for its weights, use --init_from {path}"
        )
    if not started and not step_folders(path):
        neither = f"{path} is neither a checkpoint nor a run's folder with a checkpoint"
        if other := _newest_of_another_program(path):
            neither += f": name one of its DCP folders, such as {other}"
        raise UsageError(neither)
    raise UsageError(f"checkpoint {path} is incomplete")


def _newest_of_another_program(folder: Path) -> Path | None:
    """Return the last of the DCP folders ``step_<n>...`` in a folder, as NVIDIA's ViT recipe names
    them ``step_<n>_loss_<x>``; None if there is none."""
    steps = {path: match for path in folder.iterdir() if (match := _STEP.match(path.name))}
    found = [path for path in steps if (path / checkpoint.METADATA).is_file()]
    return max(found, key=lambda path: int(steps[path][1]), default=None)


_STEP = re.compile(r"step_(\d+)")


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


T = TypeVar("T")


def retry_while_error_changes(look: Callable[[], T]) -> T:
    """Return what ``look`` returns. If it raises UsageError, look again as long as the error
    changes: a run that is still training may have removed checkpoints meanwhile. Raises UsageError;
    at once if a checkpoint cannot be reached."""
    before = ""
    while True:
        try:
            return look()
        except checkpoint.Unreachable:
            raise
        except UsageError as error:
            if str(error) == before:
                raise
            before = str(error)
