"""Remove checkpoints from a run's folder, and set them aside."""

import contextlib
import itertools
from collections.abc import Collection
from pathlib import Path

from training.checkpoints import format as checkpoint
from training.checkpoints.inventory import complete_checkpoints, step_folders, step_of
from training.errors import UsageError
from training.files import as_url, is_url, remove_tree, sync_folder
from training.logs.records import METRICS_FILE


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
