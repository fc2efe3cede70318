"""Reads and lists files by path, or by any URL that fsspec knows: gs://, s3://, file://, ..."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import pwd
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.registry import get_filesystem_class, known_implementations

# ------------------------------------------------------------------------------------------------
# The errors that say what is wrong with a user's folder or image, in one line each.


def printable(text: str) -> str:
    """Return ``text`` on one line that any terminal takes: file names may hold any byte."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class DataFolderError(Exception):
    """Raised for a folder or file that cannot be used; the message says what to change."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class BrokenImageError(Exception):
    """Raised for one image file of many that cannot be used; the message is the reason."""


def reason_of(error: Exception) -> str:
    """Return in one line why a file cannot be read, as what a package has raised says."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return printable(" ".join(str(error).split()))[:200] or type(error).__name__


# ------------------------------------------------------------------------------------------------
# Where a user's machine keeps what can be made again; imports nothing heavy.


def cache_folder() -> Path:
    """Return the program's folder in the user's cache ($XDG_CACHE_HOME, see the XDG Base Directory
    Specification).

    Of a user without a home, as a container's may be, it is in the temporary folder. Raises
    DataFolderError where another user has made it there.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vit_fsdp"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        folder = Path(tempfile.gettempdir()) / f"vit_fsdp-{os.getuid()}"
    if os.path.lexists(folder) and folder.lstat().st_uid != os.getuid():
        raise DataFolderError(
            f"{folder}, for a user without a home, was made by another user: set HOME or "
            "XDG_CACHE_HOME to a folder of yours"
        )
    return folder


# ------------------------------------------------------------------------------------------------
# Opens files that are what they seem, and tells whose a folder is: others can guess names.
#
# A link that stands where a file is to be written may lead to any file of this user, and whoever
# may write to the folder may have put it there. So none is written through.


_ROOT = 0


def regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file, or what a link to one leads to; an ``opener`` for ``open``.

    Nothing else: a pipe would be waited for, and a device such as /dev/zero has no end. Raises
    OSError.
    """
    opened = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return opened


def no_link(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file, but through no link; an ``opener`` for ``open``. Raises OSError."""
    try:
        return regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_link(path) from None
        raise


def _is_link(path: str | os.PathLike[str]) -> OSError:
    what = "it is a link, and nothing is written through one"
    return OSError(errno.ELOOP, what, os.fspath(path))


def make_folder(path: Path) -> None:
    """Make a folder, unless it is there; a link to one is none. Raises OSError."""
    if path.is_symlink():
        raise _is_link(path)
    path.mkdir(parents=True, exist_ok=True)


def replace_file(path: Path, content: bytes, *, unfinished: str = "tmp") -> None:
    """Write a file so that it is there whole, or as it was before. Raises OSError.

    A link of its name is replaced. ``unfinished``: what its name ends in until it is whole.
    """
    temporary = path.with_name(f"{path.name}.{unfinished}")
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:  # "x" opens nothing that is there, no link either
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def what_others_own(folder: Path) -> str | None:
    """Return what of a folder, or of what is directly in it, another user owns; None for nothing.

    Root's is nobody else's. The file system itself is asked as whom it takes this process: NFS may
    take root for nobody, and buckets and containers may know one user only. Raises OSError.
    """
    with tempfile.TemporaryFile(dir=folder) as probe:
        own = {_ROOT, os.geteuid(), os.fstat(probe.fileno()).st_uid}
    for path, found in ((folder, folder.lstat()), (folder, folder.stat())):
        if found.st_uid not in own:
            return f"{path} is {_name(found.st_uid)}'s"
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if (uid := entry.stat(follow_symlinks=False).st_uid) not in own:
                return f"{entry.path} is {_name(uid)}'s"
    return None


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


# ------------------------------------------------------------------------------------------------


Found = TypeVar("Found")

WAITS = (0.5, 2.0, 8.0)
"""Seconds before each further attempt to read from a URL."""
HEAD = 64 * 1024
"""Bytes in which the size of nearly every image stands."""


def is_url(path: str) -> bool:
    """Tell whether ``path`` is a URL, such as gs://bucket/folder, and no path."""
    return "://" in path


def read_bytes(path: str, start: int = 0, size: int | None = None) -> bytes:
    """Return the content of a file, or ``size`` bytes of it from ``start`` on.

    From a URL it is tried again a few times. Raises BrokenImageError.
    """
    content = _from_url(path, start, size) if is_url(path) else _from_file(path, start, size)
    if size is not None and len(content) < size:
        raise BrokenImageError(f"only {len(content)} of its {size} bytes are there")
    return content


def read_head(path: str) -> bytes:
    """Return the first ``HEAD`` bytes of a file, or all of a shorter one. Raises BrokenImageError.

    Of a shorter one at a URL too: file systems answer with what there is.
    """
    return _from_url(path, 0, HEAD) if is_url(path) else _from_file(path, 0, HEAD)


def _from_file(path: str, start: int, size: int | None) -> bytes:
    try:
        with open(path, "rb", opener=regular) as file:
            if start:
                file.seek(start)
            return file.read(-1 if size is None else size)
    except OSError as error:
        raise BrokenImageError(reason_of(error)) from error


def _from_url(url: str, start: int, size: int | None) -> bytes:
    def read() -> bytes:
        # A worker is forked, and the connections of its parent are not for it: fsspec gives
        # each process a file system of its own, once.
        system, path = url_to_fs(url)
        return system.cat_file(path, start or None, None if size is None else start + size)

    try:
        return tried_again(url, read)
    except FileNotFoundError as error:
        raise BrokenImageError("No such file or directory") from error
    except Exception as error:  # each file system raises what it likes
        raise BrokenImageError(reason_of(error)) from error


def tried_again(path: str, read: Callable[[], Found]) -> Found:
    """Return what ``read`` returns, or raise what it raises.

    At a URL it is tried again a few times, but where that can be of no use.
    """
    for wait in WAITS if is_url(path) else ():
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError, PermissionError, DataFolderError):
            raise
        except Exception:  # noqa: BLE001 - each file system raises what it likes
            time.sleep(wait)
    return read()


def problem_of_url(url: str) -> str | None:
    """Return why no URL of this kind can be used; None if nothing is in the way, or for a path."""
    return _problem_of_kind(url.partition("://")[0]) if is_url(url) else None


@functools.cache
def _problem_of_kind(protocol: str) -> str | None:
    try:
        get_filesystem_class(protocol)
    except ValueError:
        return f"{protocol}:// is no kind of URL that fsspec knows"
    except ImportError as error:
        package = known_implementations.get(protocol, {}).get("class", "").partition(".")[0]
        if package in ("", "fsspec"):  # whose own text names the packages
            return str(error).splitlines()[0]
        return f"requires the package {package}: python3 -m pip install {package}"
    return None


def missing_bucket(system: AbstractFileSystem, path: str) -> str | None:
    """Return the name of the bucket that a path of ``open_system`` is in, if it is not there.

    Raises anything if that cannot be asked.
    """
    bucket = path.partition("/")[0]
    if not bucket or is_url(path):  # no kind of storage that has buckets
        return None
    try:
        system.info(bucket)
    except FileNotFoundError:
        return bucket
    return None


def open_system(path: str) -> tuple[AbstractFileSystem, str]:
    """Return fsspec's file system of a path or URL, and what it calls the path there.

    Raises DataFolderError for a URL of a kind that is unknown or needs a package.
    """
    if problem := problem_of_url(path):
        raise DataFolderError(f"{path}: {problem}")
    try:
        return url_to_fs(path)
    except Exception as error:  # each file system raises what it likes
        raise DataFolderError(f"{path} cannot be opened: {reason_of(error)}") from error


def subfolders(url: str) -> list[str] | None:
    """Return the names of the folders in a folder, sorted; None if it does not exist.

    Raises DataFolderError.
    """
    path, found = _listed(url, lambda system, path: system.ls(path, detail=True))
    if found is None:
        return None
    names = {info["name"].rstrip("/") for info in found if info["type"] == "directory"}
    return sorted(name.rpartition("/")[2] for name in names if name.strip("/") != path.strip("/"))


def find_files(folder: str) -> dict[str, dict[str, Any]]:
    """Return what is known of each file in a folder and below, by its name in the folder.

    Raises DataFolderError.
    """
    path, found = _listed(folder, lambda system, path: system.find(path, detail=True))
    top = f"{path.rstrip('/')}/"
    return {name.removeprefix(top): info for name, info in (found or {}).items() if name[-1] != "/"}


def _listed(
    folder: str, listing: Callable[[AbstractFileSystem, str], Found]
) -> tuple[str, Found | None]:
    """Return what fsspec calls the folder, and what ``listing`` returns of it; None for what does
    not exist. Raises DataFolderError, also for a bucket that does not exist."""
    system, path = open_system(folder)
    found = None
    try:
        found = tried_again(folder, lambda: listing(system, path))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except Exception as error:  # each file system raises what it likes
        raise DataFolderError(f"{folder} cannot be listed: {reason_of(error)}") from error
    if not found:
        bucket = None
        with contextlib.suppress(Exception):  # a storage that has none may raise anything
            bucket = missing_bucket(system, path)
        if bucket:
            raise DataFolderError(f"{folder}: there is no bucket {bucket}")
    return path, found
