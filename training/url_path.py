"""Folders on URLs (gs://, s3://, ...), by fsspec, with those methods of pathlib that runs use."""

from __future__ import annotations

import contextlib
import errno
import functools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

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
    if problem := _problem_of(protocol):
        raise UsageError(f"{text}: {problem}")
    if not rest.strip("/"):
        raise UsageError(f"{text} names no folder: give one, as {protocol}://bucket/run")
    return cast(Path, UrlPath(text.rstrip("/")))


@functools.cache
def _problem_of(protocol: str) -> str | None:
    from fsspec.registry import get_filesystem_class, known_implementations

    try:
        get_filesystem_class(protocol)
    except ValueError:
        return f"{protocol}:// is no kind of URL that fsspec knows"
    except ImportError as error:
        package = known_implementations.get(protocol, {}).get("class", "").partition(".")[0]
        if package in ("", "fsspec"):
            return str(error).splitlines()[0]
        return f"needs the package {package}: python3 -m pip install {package}"
    return None


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
        with self._storage() as (storage, path):
            bucket = path.partition("/")[0]
            try:
                _ = storage.info(bucket) if bucket else None
            except FileNotFoundError:
                raise FileNotFoundError(errno.ENOENT, f"there is no bucket {bucket}") from None
            storage.makedirs(path, exist_ok=True)

    @contextlib.contextmanager
    def open(self, mode: str = "rb") -> Iterator[IO[bytes]]:
        with self._storage() as (storage, path), storage.open(path, mode) as file:
            yield file

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

    def resolve(self) -> UrlPath:
        return self


def _os_error(error: Exception, url: str) -> OSError:
    """Return an error with all that pathlib's have: number, text and name."""
    kinds = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}
    number = next((code for kind, code in kinds.items() if isinstance(error, kind)), errno.EIO)
    text = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [""])[0][:200]
    return OSError(getattr(error, "errno", None) or number, text or type(error).__name__, url)


def as_url(path: Path) -> UrlPath | None:
    """Return a path of ``folder_at`` as what it is, if that is a URL's, else None."""
    found: Any = path
    return found if isinstance(found, UrlPath) else None


def is_url(path: Path) -> bool:
    """Tell whether a path of ``folder_at`` is on a URL."""
    return as_url(path) is not None


def remove_tree(folder: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder with all in it, on a URL or not. Raises OSError, unless told not to."""
    if url := as_url(folder):
        with contextlib.suppress(*([OSError] if ignore_errors else [])):
            url.remove_tree()
    else:
        shutil.rmtree(folder, ignore_errors=ignore_errors)
