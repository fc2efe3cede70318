"""The logs of a run whose ``--ckpt_dir`` is a URL: written to a local folder, copied to the URL."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from data.files import DataFolderError, cache_folder
from training.errors import UsageError
from training.files import in_background, is_url, replace_file

EVERY_S = 30.0
"""The seconds between copies: a bucket has no files that grow, so each copy is a whole file."""
_NOT_COPIED = {".lock", "profile"}


def log_folder(ckpt_dir: Path) -> Path:
    """Return where a run's logs are written: in ``ckpt_dir``, or in a local folder for a URL's.

    It is the same for each start on a machine, so that a second one there finds it locked. Raises
    UsageError without a place for it.
    """
    if not is_url(ckpt_dir):
        return ckpt_dir
    number = hashlib.sha256(str(ckpt_dir).encode()).hexdigest()[:16]
    try:
        return cache_folder() / number / ckpt_dir.name
    except DataFolderError as error:
        raise UsageError(str(error)) from None


def fetch_logs(folder: Path, url: Path, names: tuple[str, ...]) -> None:
    """Replace the local folder's logs by these files of the URL, as far as they are there.

    Raises OSError.
    """
    for path in _files(folder):
        path.unlink()
    for name in names:
        if (url / name).exists():
            replace_file(folder / name, (url / name).read_bytes())


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name not in _NOT_COPIED and path.suffix != ".tmp":
            yield from [path] if path.is_file() else _files(path)


class LogUploads:
    """Copies the changed files of a local folder of logs to a URL, in a thread of its own.

    No failure ends a run: it is logged once, and the copy tried again.
    """

    def __init__(self, folder: Path, url: Path, say: Callable[[str], None]) -> None:
        self._folder, self._url, self._say = folder, url, say
        self._copied: dict[Path, tuple[int, int]] = {}
        self._started = float("-inf")
        self._running: Future[str | None] | None = None
        self._failing = False

    def begin(self, *, after_s: float = 0.0) -> None:
        """Start to copy, unless a copy is running, or the last one started less than ``after_s``
        seconds ago; returns at once."""
        is_running = self._running is not None and not self._running.done()
        if is_running or time.monotonic() - self._started < after_s:
            return
        self._finish()
        self._started = time.monotonic()
        self._running = in_background(self._copy)

    def close(self) -> None:
        """Copy what is left, and wait for that."""
        self._finish()
        self._running = in_background(self._copy)
        self._finish()

    def _copy(self) -> str | None:
        """Copy all files that have changed; return what went wrong."""
        try:
            for path in _files(self._folder):
                found = path.stat()
                state = (found.st_mtime_ns, found.st_size)
                if self._copied.get(path) != state:
                    target = self._url
                    for part in path.relative_to(self._folder).parts[:-1]:
                        target = target / part
                    target.mkdir()
                    (target / path.name).write_bytes(path.read_bytes())
                    self._copied[path] = state
        except OSError as error:
            return error.strerror or str(error)
        return None

    def _finish(self) -> None:
        """Wait for a running copy, and log if copies fail from now on, or work again."""
        if self._running is None:
            return
        problem = self._running.result()
        self._running = None
        if problem and not self._failing:
            self._say(
                f"warning: logs cannot be copied to {self._url} ({problem}); they are in "
                f"{self._folder}, training continues"
            )
        elif self._failing and not problem:
            self._say(f"note: logs are copied to {self._url} again")
        self._failing = problem is not None
