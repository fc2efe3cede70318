"""Folders on URLs (gs://, s3://, ...), by fsspec, with those methods of pathlib that runs use.

And what is done with a file or a folder on a URL and on a disk, but not alike.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

from data import own_files
from training.errors import UsageError

_LOCAL = "file://"
_SEPARATOR = "://"


def folder_at(text: str) -> Path:
    """Return the folder that a flag names: a local one, or a ``UrlPath``, which is used like one.

    Raises UsageError for a kind of URL that is not known, or whose package is not installed.
    """
    if text.startswith(_LOCAL):
        return Path(text.removeprefix(_LOCAL))
    protocol, separator, rest = text.partition(_SEPARATOR)
    if not separator:
        return Path(text)
    from data.storage import problem_of_url  # with fsspec: a folder needs none

    if problem := problem_of_url(text):
        raise UsageError(f"{text}: {problem}")
    if not rest.strip("/"):
        raise UsageError(f"{text} names no folder: give one, as {protocol}://bucket/run")
    return cast(Path, UrlPath(text.rstrip("/")))


@dataclass(frozen=True, order=True)
class UrlPath:
    """Names a file or folder on a URL. Its methods raise OSError, whatever the storage raises.

    A bucket has no folders of its own: one is there as long as it has a file. A file is there, and
    whole, when it was closed.
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
    def _storage(self) -> Iterator[tuple[Any, str]]:
        """Give fsspec's file system and the path in it; turn what they raise into OSError."""
        from fsspec.core import url_to_fs

        try:
            # Listings that it kept would hide what other processes have written since.
            yield url_to_fs(self.url, use_listings_cache=False)
        except Exception as error:
            raise _os_error(error, self.url) from error

    def _kind(self) -> str | None:
        """Return "file", "directory", or None for nothing: what fsspec itself also takes for an
        answer where the storage cannot be asked."""
        try:
            with self._storage() as (storage, path):
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
        with self._storage() as (storage, path):
            names = {each.rstrip("/").rpartition("/")[2] for each in storage.ls(path, detail=False)}
        return iter(sorted(self / name for name in names - {"", self.name}))

    def stat(self) -> SimpleNamespace:
        """Return the size alone, in bytes, as ``st_size``."""
        with self._storage() as (storage, path):
            return SimpleNamespace(st_size=storage.size(path))

    def mkdir(self, *, parents: bool = True) -> None:
        """Make the folder where the storage has folders, but no bucket."""
        from data.storage import missing_bucket

        with self._storage() as (storage, path):
            if bucket := missing_bucket(storage, path):
                raise FileNotFoundError(errno.ENOENT, f"there is no bucket {bucket}")
            storage.makedirs(path, exist_ok=True)

    @contextlib.contextmanager
    def open(self, mode: str = "rb") -> Iterator[IO[bytes]]:
        """Open the file inside. What else is raised there, as of damaged content, stays as it
        is."""
        with self._storage() as (storage, path):
            file = storage.open(path, mode)
        try:
            yield cast(IO[bytes], _Stream(file, self.url))
        finally:
            with self._storage():
                file.close()

    def read_bytes(self) -> bytes:
        with self._storage() as (storage, path):
            return storage.cat_file(path)

    def write_bytes(self, content: bytes) -> None:
        with self._storage() as (storage, path):
            storage.pipe_file(path, content)

    def read_text(self, errors: str = "strict") -> str:
        return self.read_bytes().decode(errors=errors)

    def write_text(self, text: str) -> None:
        self.write_bytes(text.encode())

    def unlink(self, *, missing_ok: bool = False) -> None:
        with self._storage() as (storage, path):
            if not missing_ok or self.exists():
                storage.rm_file(path)

    def copy(self, target: UrlPath) -> None:
        """Copy a file within its storage."""
        with self._storage() as (storage, path), target._storage() as (_, to):
            storage.cp_file(path, to)

    def remove_tree(self) -> None:
        with self._storage() as (storage, path):
            storage.rm(path, recursive=True)
            if left := storage.find(path):  # s3fs 2026.9 removes what it can, and does not tell
                raise PermissionError(f"{len(left)} of its files could not be removed")

    def check_writable(self, *, removable: bool = False) -> None:
        """Write an empty file into the folder. Raises OSError if that, or else with ``removable``
        removing it, is not allowed; what may not be removed stays there."""
        probe = self / ".write_test"
        probe.write_bytes(b"")
        with contextlib.suppress(*([] if removable else [OSError])):
            probe.unlink(missing_ok=True)  # another process may have done it

    def resolve(self) -> UrlPath:
        return self


class _Stream:
    """An open file of a storage. Its methods raise OSError, whatever the storage raises."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._file, name)
        if not callable(found):
            return found

        def call(*args: Any) -> Any:
            try:
                return found(*args)
            except Exception as error:
                raise _os_error(error, self._url) from error

        return call


def _os_error(error: Exception, url: str) -> OSError:
    """Return an error with all that pathlib's have: number, text and name.

    It is never EIO, by which a disk tells that a file is damaged.
    """
    kinds = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}
    number = next((code for kind, code in kinds.items() if isinstance(error, kind)), None)
    number = getattr(error, "errno", None) or number
    text = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [""])[0][:200]
    if number in (None, errno.EIO):
        number = errno.EREMOTEIO
    return OSError(number, text or type(error).__name__, url)


def is_unreachable(error: BaseException) -> bool:
    """Return True if an error says nothing of the file itself, which may be whole: a storage did
    not answer, a right is missing. False if the file is missing or damaged."""
    of_the_file = errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO
    return isinstance(error, OSError) and error.errno not in of_the_file


def as_url(path: Path) -> UrlPath | None:
    """Return a path of ``folder_at`` as what it is, if that is a URL's, else None."""
    found: Any = path
    return found if isinstance(found, UrlPath) else None


def is_url(path: Path) -> bool:
    """Tell whether a path of ``folder_at`` is on a URL."""
    return as_url(path) is not None


def remove_tree(folder: Path) -> None:
    """Remove a folder with all in it, on a URL or not.

    Raises OSError if anything of it is left, after it has removed what can be removed.
    """
    if url := as_url(folder):
        with contextlib.suppress(FileNotFoundError):
            url.remove_tree()
        return
    errors: list[OSError] = []
    shutil.rmtree(folder, onerror=lambda _, path, caught: errors.append(cast(OSError, caught[1])))
    for error in errors:
        if not isinstance(error, FileNotFoundError):
            raise error


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a small file so that it is there whole, or as it was before. Raises OSError."""
    as_bytes = content.encode() if isinstance(content, str) else content
    if is_url(path):  # where a file appears when it is closed
        path.write_bytes(as_bytes)
        return
    own_files.replace_file(path, as_bytes)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Write the names in a folder to the disk for good, where the file system can do that."""
    if is_url(path):
        return
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:  # network file systems and buckets may not know it for folders
        pass
    finally:
        os.close(descriptor)
