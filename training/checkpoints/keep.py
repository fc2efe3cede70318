"""Keeps a run's checkpoints in order: makes room, removes old ones, sets others aside."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from training.checkpoints.choose import complete_checkpoints, step_folders, step_of
from training.checkpoints.manifest import MANIFEST, is_complete
from training.errors import UsageError
from training.logs.metrics import METRICS_FILE
from training.url_path import as_url, is_url, remove_tree, sync_folder

_ASIDE = "set_aside_"


def clear(folder: Path) -> None:
    """Make a folder for a checkpoint, empty of what an interrupted one left. Raises OSError.

    Files that a bucket does not let go stay: those of the same name are written over, and the
    manifest names no others.
    """
    if folder.exists():
        try:
            remove(folder)
        except OSError:
            if not is_url(folder) or is_complete(folder):
                raise
    folder.mkdir(parents=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint, or what there is of one; from the first moment on it counts as none.

    Of a link to one only the link: what it leads to may be another run's. Raises OSError if
    anything of it is left.
    """
    if not is_url(folder) and folder.is_symlink():
        folder.unlink(missing_ok=True)
        return
    (folder / MANIFEST).unlink(missing_ok=True)
    remove_tree(folder)


def prune(ckpt_dir: Path, keep: int, spared: Collection[Path]) -> None:
    """Remove the oldest checkpoints beyond the ``keep`` newest (0: none), but for the spared.

    What an interrupted save has left goes with them, where a newer one is complete. Raises OSError
    if one cannot be removed, after it has removed the others.
    """
    if not keep:
        return
    complete = complete_checkpoints(ckpt_dir)
    kept = set(complete[-keep:]) | set(spared)
    newest = step_of(complete[-1]) if complete else -1
    errors = []
    for path in step_folders(ckpt_dir):
        if path not in kept and step_of(path) <= newest:
            try:
                remove(path)
            except OSError as error:
                errors.append(error)
    if errors:
        raise errors[0]


def _move(path: Path, target: Path) -> None:
    """Move a checkpoint; a bucket cannot rename, so there its manifest comes last."""
    from_url, to_url = as_url(path), as_url(target)
    if not from_url or not to_url:
        path.rename(target)
        return
    to_url.mkdir()
    for file in sorted(from_url.iterdir(), key=lambda each: each.name == MANIFEST):
        file.copy(to_url / file.name)
    remove(path)


def later_ones(ckpt_dir: Path, start: Path | None) -> list[Path]:
    """Return a folder's complete checkpoints that a run that begins at ``start`` does not continue.

    If ``start`` is in another folder, or is nothing, these are all of them.
    """
    complete = [path for path in step_folders(ckpt_dir) if is_complete(path)]
    if start is None or start.parent.resolve() != ckpt_dir.resolve():
        return complete
    return [path for path in complete if step_of(path) > step_of(start)]


def set_aside(ckpt_dir: Path, paths: Collection[Path]) -> Path:
    """Move checkpoints into a new folder beside, with a copy of the metrics; return the folder.

    It can be resumed as any run's folder. Raises UsageError if that is not possible.
    """
    number = 1
    while (ckpt_dir / f"{_ASIDE}{number}").exists():
        number += 1
    folder = ckpt_dir / f"{_ASIDE}{number}"
    try:
        if url := as_url(ckpt_dir):
            url.check_writable(removable=True)  # else a copy would stay there at each start
        folder.mkdir()
        if (ckpt_dir / METRICS_FILE).exists():
            (folder / METRICS_FILE).write_bytes((ckpt_dir / METRICS_FILE).read_bytes())
        for path in paths:
            _move(path, folder / path.name)
    except OSError as error:
        raise UsageError(
            f"cannot set the later checkpoints of {ckpt_dir} aside ({error.strerror}): move them "
            "away, or choose another --ckpt_dir"
        ) from None
    sync_folder(folder)
    sync_folder(ckpt_dir)
    return folder
