"""A run's folder, on a disk or at a URL (gs://, s3://, ...): paths, lock and logs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pwd
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, TypeVar, cast

from data import files
from data.files import DataFolderError, cache_folder, no_link
from training.errors import FOLDER_IN_USE, RunFailed, UsageError

# -- paths -----------------------------------------------------------------------------------------


def folder_at(text: str) -> Path:
    """Return the folder that a flag names: a local path, or a ``UrlPath`` with the same interface.
    Raises UsageError for an unknown kind of URL, or one whose package is not installed."""
    text = text.removeprefix("file://")
    protocol, separator, rest = text.partition("://")
    if not separator:
        return Path(text)
    if problem := files.problem_of_url(text):
        raise UsageError(f"{text}: {problem}")
    if not rest.strip("/"):
        raise UsageError(f"{text} names no folder: use a URL such as {protocol}://bucket/run")
    return cast(Path, UrlPath(text.rstrip("/")))


@dataclass(frozen=True, order=True)
class UrlPath:
    """A file or folder at a URL, with the pathlib methods that runs use, via fsspec.

    Methods raise OSError, whatever the storage raises: a storage that does not answer must not look
    like an empty one, or a new run would overwrite an existing one. In a bucket, a folder exists as
    long as it has a file, and a file exists, complete, once it is closed.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> UrlPath:
        return UrlPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> UrlPath:
        return UrlPath(self.url.rpartition("/")[0])

    @contextlib.contextmanager
    def storage(self) -> Iterator[tuple[Any, str]]:
        """Yield fsspec's file system and the path in it; turn exceptions into OSError."""
        with _os_errors(self.url):
            # Cached listings would hide what other processes have written.
            yield files.open_storage(self.url, use_listings_cache=False)

    def _kind(self) -> str | None:
        """Return "file", "directory", or None if there is neither."""
        # fsspec's ``exists`` and ``isfile`` return False if a storage does not answer.
        try:
            with self.storage() as (storage, path):
                return storage.info(path)["type"]
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        return self._kind() is not None

    def is_dir(self) -> bool:
        return self._kind() == "directory"

    def is_file(self) -> bool:
        return self._kind() == "file"

    def iterdir(self) -> Iterator[UrlPath]:
        with self.storage() as (storage, path):
            paths = storage.ls(path, detail=False)
        names = {path.rstrip("/").rpartition("/")[2] for path in paths} - {"", self.name}
        return iter(sorted(self / name for name in names))

    def stat(self) -> SimpleNamespace:
        """Return only the size in bytes, as ``st_size``."""
        with self.storage() as (storage, path):
            return SimpleNamespace(st_size=storage.size(path))

    def mkdir(self, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Create the folder if the storage has folders. Raises OSError if the bucket is missing."""
        with self.storage() as (storage, path):
            if bucket := files.missing_bucket(storage, path):
                raise FileNotFoundError(errno.ENOENT, f"there is no bucket {bucket}")
            storage.makedirs(path, exist_ok=True)

    @contextlib.contextmanager
    def open(self, mode: str = "rb") -> Iterator[IO[bytes]]:
        """Open the file; other errors in the body, e.g. for damaged content, pass through."""
        with self.storage() as (storage, path):
            file = storage.open(path, mode)
        try:
            yield cast(IO[bytes], _Stream(file, self.url))
        finally:
            with self.storage():
                file.close()

    def read_bytes(self) -> bytes:
        with self.storage() as (storage, path):
            return storage.cat_file(path)

    def write_bytes(self, content: bytes) -> None:
        with self.storage() as (storage, path):
            storage.pipe_file(path, content)

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        self.write_bytes(text.encode(encoding))

    def unlink(self, *, missing_ok: bool = False) -> None:
        with self.storage() as (storage, path):
            if not missing_ok or self.exists():
                storage.rm_file(path)

    def copy(self, target: UrlPath) -> None:
        """Copy a file within its storage."""
        with self.storage() as (storage, path), target.storage() as (_, to):
            storage.cp_file(path, to)

    def check_writable(self, *, removable: bool = False) -> None:
        """Write an empty file to the folder, and remove it if that is permitted. Raises OSError if
        writing, replacing or, with ``removable``, removing fails."""
        probe = self / ".write_test"
        for _ in range(2):  # Google Cloud Storage requires the permission to delete for replacing
            probe.write_bytes(b"")
        try:
            probe.unlink(missing_ok=True)  # another process may have done it
        except OSError:
            if removable:
                raise

    def resolve(self) -> UrlPath:
        return self


@dataclass(eq=False)
class _Stream:
    """An open file of a storage, whose methods raise OSError, whatever the storage raises."""

    _file: Any
    _url: str

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._file, name)
        return _os_errors(self._url)(attribute) if callable(attribute) else attribute


@contextlib.contextmanager
def _os_errors(url: str) -> Iterator[None]:
    """Turn exceptions in the body into an OSError with number, text and file name, like pathlib's;
    never EIO, with which disks report a damaged file."""
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None) or errno.EREMOTEIO
        if isinstance(error, FileNotFoundError):
            number = errno.ENOENT
        elif isinstance(error, PermissionError):
            number = errno.EACCES
        elif number == errno.EIO:
            number = errno.EREMOTEIO
        text = getattr(error, "strerror", None) or files.reason_of(error)
        raise OSError(number, text, url) from error


def is_unreachable(error: BaseException) -> bool:
    """Return True if an error says nothing about the file itself, which may be undamaged: the
    storage did not answer, or a permission is missing. False if the file is missing or damaged."""
    about_the_file = (
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ELOOP, errno.ENAMETOOLONG),
        errno.ENXIO,  # ``regular``: it is a pipe, a socket or a device
    )
    return isinstance(error, OSError) and error.errno not in about_the_file


def as_url(path: Path) -> UrlPath | None:
    """Return a path of ``folder_at`` with its real type if it is at a URL, else None."""
    return cast(Any, path) if is_url(path) else None


def is_url(path: Path) -> bool:
    """Return True if a path of ``folder_at`` is at a URL."""
    return isinstance(path, UrlPath)


HUB_PREFIX = "hf-hub:"


def is_on_hub(name: str) -> bool:
    """Return True if a flag's value names weights on the Hugging Face Hub."""
    return name.startswith(HUB_PREFIX)


def remove_tree(folder: Path) -> None:
    """Remove a folder and its content, local or at a URL. Raises OSError if anything is left, after
    removing what can be removed."""
    if url := as_url(folder):
        with contextlib.suppress(FileNotFoundError), url.storage() as (storage, path):
            storage.rm(path, recursive=True)
            # s3fs 2026.9 removes what it can, and does not report the rest.
            if left := storage.find(path):
                raise PermissionError(f"{len(left)} of its files could not be removed")
        return
    errors: list[OSError] = []
    shutil.rmtree(folder, onerror=lambda _, path, caught: errors.append(cast(OSError, caught[1])))
    for error in errors:
        if not isinstance(error, FileNotFoundError):
            raise error


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a small file atomically. Raises OSError."""
    content = content.encode() if isinstance(content, str) else content
    if is_url(path):  # files at URLs appear when they are closed
        path.write_bytes(content)
        return
    files.replace_file(path, content)
    sync_folder(path.parent)


def open_regular(path: Path) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Open a file for reading. Raises OSError, also for a pipe or device, which could block."""
    return path.open("rb") if is_url(path) else open(path, "rb", opener=files.regular)


def read_whole(path: Path, limit: files.SizeLimit = files.TEXT) -> bytes:
    """Return the content of a file. Raises OSError, or ValueError if it is larger than
    ``limit``."""
    if is_url(path):
        limit.check(path.stat().st_size, path.name)
        return path.read_bytes()
    with open_regular(path) as file:
        limit.check(os.fstat(file.fileno()).st_size, path.name)
        return file.read()


def random_word(path: Path) -> str:
    """Return the random word in a file, which the first process that calls this creates. Raises
    OSError."""
    # Create the final file atomically: another process of this host may read it.
    with contextlib.suppress(FileExistsError):
        new_file = path.with_name(f"{path.name}_{secrets.token_hex(8)}")
        new_file.write_text(secrets.token_hex(8), encoding="utf-8")
        try:
            os.link(new_file, path)
        finally:
            new_file.unlink()
    return path.read_text(encoding="utf-8", errors="replace")


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises OSError, or ValueError if it contains none."""
    return files.parse_object(read_whole(path))


def sync_folder(path: Path) -> None:
    """Sync a folder's entries to disk, if the file system supports that."""
    if is_url(path):
        return
    with contextlib.suppress(OSError):  # network file systems may not support it for folders
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -- the lock of a run's folder --------------------------------------------------------------------

LOCK_FILE = ".lock"
_HELD = {errno.EACCES, errno.EAGAIN}
_PATIENCE_S, _RESTART_PATIENCE_S = 3.0, 120.0
"""The seconds to wait for a job that is just ending, and in a restart: an NFS server may hold the
lock of a crashed node for a lease (90 s by default)."""
_VISIBLE_WITHIN_S = 30.0
"""The seconds within which a network file system shows a new file on all hosts."""


class FolderLock(contextlib.AbstractContextManager["FolderLock"]):
    """Locks a folder for one job, in its first process, until that process ends for any reason.

    This is a POSIX record lock, which also works over NFS. It is released when the process closes
    any descriptor of the file, so nothing else in the process may open it.
    """

    def __init__(self, ckpt_dir: Path, *, inside: Path | None = None, shared: bool = False) -> None:
        """``inside``: the local folder to lock instead of a URL, which has no locks; a copy of the
        lock file is written to the URL. ``shared``: the folder may be another user's."""
        self._folder, self._place, self._shared = ckpt_dir, inside or ckpt_dir, shared
        self._file: int | None = None

    def acquire(self, *, is_restart: bool) -> str:
        """Lock the folder; return a token that is written to the lock file. Raises UsageError if
        the folder is another user's or another job holds the lock (in a restart: RunFailed)."""
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            check_own(self._place, shared=self._shared)
            self._file = no_link(self._place / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise UsageError(
                f"cannot write to --ckpt_dir {self._place}: {error.strerror}"
            ) from None
        deadline = time.monotonic() + (_RESTART_PATIENCE_S if is_restart else _PATIENCE_S)
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in _HELD:  # a file system without locks
                    break
            if time.monotonic() > deadline:
                holder = "another job"
                with contextlib.suppress(ValueError, KeyError):
                    job = files.parse_object(os.pread(self._file, 4096, 0))
                    holder = f"process {job['pid']} on {job['host']}, since {job['since']}"
                    holder = files.printable(holder)
                self.release()
                problem = (
                    f"--ckpt_dir {self._folder} is in use by {holder}: stop that run first, or "
                    "choose another folder"
                )
                raise RunFailed(problem, FOLDER_IN_USE) if is_restart else UsageError(problem)
            time.sleep(0.2)
        token = secrets.token_hex(8)
        job = {"host": socket.gethostname(), "pid": os.getpid(), "token": token}
        content = json.dumps(job | {"since": time.strftime("%Y-%m-%d %H:%M:%S")})
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, content.encode(), 0)
        os.fsync(self._file)
        if self._place != self._folder:
            (self._folder / LOCK_FILE).write_text(content, encoding="utf-8")
        return token

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __exit__(self, *error: object) -> None:
        self.release()


def check_own(folder: Path, flag: str = "--ckpt_dir", *, shared: bool = False) -> None:
    """Raise UsageError if a folder or an entry of it is owned by another user (except root), unless
    ``shared``: a forged checkpoint in it would be resumed. Raises OSError."""
    if shared:
        return
    with tempfile.TemporaryFile(dir=folder) as probe:
        trusted = {0, os.geteuid(), os.fstat(probe.fileno()).st_uid}
    owners = [(folder, folder.stat().st_uid)]
    owners += [(path, path.lstat().st_uid) for path in (folder, *sorted(folder.iterdir()))]
    for path, owner in owners:
        if owner in trusted:
            continue
        try:
            user = pwd.getpwuid(owner).pw_name
        except KeyError:
            user = f"user {owner}"
        allow = ", or allow this one with --allow_other_owners"
        raise UsageError(
            f"{flag} {folder}: {path} is owned by {user}: use a folder of your "
            f"own{allow if flag == '--ckpt_dir' else ''}"
        )


def check_folder_writable(folder: Path, flag: str = "--ckpt_dir") -> None:
    """Raise UsageError if the folder that ``flag`` names is not writable; leave no files behind."""
    if url := as_url(folder):
        try:
            url.mkdir()
            url.check_writable()
        except OSError as error:
            raise UsageError(f"cannot write to {flag} {folder}: {error.strerror}") from None
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
        where = f": {error.filename}" if error.filename else ""
        raise UsageError(f"cannot write to {flag} {folder}: {error.strerror}{where}") from None


def check_same_folder(ckpt_dir: Path, token: str) -> None:
    """Raise UsageError if this process does not see the lock file of the first process."""
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if read_object(ckpt_dir / LOCK_FILE)["token"] == token:
                return
        if time.monotonic() > deadline:
            raise UsageError(
                f"--ckpt_dir {ckpt_dir} is not the same folder as in the first process: use a "
                "folder that all nodes share, or add --ckpt_dir_per_host if each has its own"
            )
        time.sleep(0.2)


# -- work in a thread ------------------------------------------------------------------------------

Result = TypeVar("Result")


def in_background(work: Callable[[], Result]) -> Future[Result]:
    """Run a function in a daemon thread, so that a failing process does not wait for it."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - ``result`` raises it
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


# -- the logs of a run whose --ckpt_dir is a URL: written to a local folder, copied to the URL -----


_EVERY_S = 30.0
"""Seconds between copies. Files in a bucket cannot grow, so each copy writes whole files."""
_NOT_COPIED = {LOCK_FILE, "profile"}


def log_folder(ckpt_dir: Path) -> Path:
    """Return the folder for a run's logs: ``ckpt_dir``, or if that is a URL a local folder, the
    same for each start on a machine. Raises UsageError if none can be found."""
    if not is_url(ckpt_dir):
        return ckpt_dir
    number = hashlib.sha256(files.without_secrets(str(ckpt_dir)).encode()).hexdigest()[:16]
    try:
        return cache_folder() / number / ckpt_dir.name
    except DataFolderError as error:
        raise UsageError(str(error)) from None


def fetch_logs(folder: Path, url: Path, names: tuple[str, ...]) -> None:
    """Replace the logs in the local folder with the files of these names at the URL, if they exist.
    Raises OSError."""
    for path, copy in _copies(folder, url):
        # An earlier start that was killed may not have copied the end of a file.
        content = path.read_bytes()
        copied = copy.read_bytes() if copy.exists() else content
        if content.startswith(copied) and content != copied:
            copy.write_bytes(content)
        path.unlink()
    for name in names:
        if (url / name).exists():
            replace_file(folder / name, (url / name).read_bytes())


def _copies(folder: Path, url: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each log file in a local folder, and its copy's path."""
    for path in sorted(folder.iterdir()):
        if path.name not in _NOT_COPIED and path.suffix != ".tmp":
            copy = url / path.name
            yield from [(path, copy)] if path.is_file() else _copies(path, copy)


class LogUploads:
    """Copies the changed files of a local folder of logs to a URL, in a background thread.

    A failure never ends a run: it is logged once, and the copy is retried.
    """

    def __init__(self, folder: Path, url: Path, say: Callable[[str], None]) -> None:
        self._folder, self._url, self._say = folder, url, say
        self._copied: dict[Path, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._started = float("-inf")
        self._running: Future[None] | None = None
        self._failing = False

    def begin(self, *, soon: bool = True) -> None:
        """Start copying, unless a copy is running; return at once. Without ``soon``, do not start
        within ``_EVERY_S`` seconds of the last copy."""
        is_recent = not soon and time.monotonic() - self._started < _EVERY_S
        if not is_recent and (self._running is None or self._running.done()):
            self._started = time.monotonic()
            self._running = in_background(self.copy)

    def copy(self) -> None:
        """Copy all changed files, after a running copy has ended. Any thread may call this."""
        problem = None
        with self._lock:
            try:
                for path, copy in _copies(self._folder, self._url):
                    state = path.stat().st_mtime_ns, path.stat().st_size
                    if self._copied.get(path) != state:
                        copy.parent.mkdir()
                        copy.write_bytes(path.read_bytes())
                        self._copied[path] = state
            except OSError as error:
                problem = error.strerror or str(error)
            if problem and not self._failing:
                self._say(
                    f"warning: logs cannot be copied to {self._url} ({problem}); training "
                    f"continues, logs are in {self._folder}"
                )
            elif self._failing and not problem:
                self._say(f"note: copying logs to {self._url} again")
            self._failing = problem is not None
