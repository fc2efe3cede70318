"""Files and folders: errors about them, safe writing on disk, and reading by path or URL.

A URL is any that fsspec knows: gs://, s3://, file://, ...
"""

import contextlib
import errno
import json
import logging
import os
import re
import stat
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.registry import get_filesystem_class, known_implementations

Result = TypeVar("Result")

# Otherwise gcsfs asks over gRPC of what kind a bucket is, which it calls experimental: the threads
# of gRPC do not go along into forked processes, such as those that load images.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

RETRY_WAITS_S = (0.5, 2.0, 8.0)
"""Seconds before each further attempt to read from a URL."""
HEAD = 64 * 1024
"""How many bytes at the start of a file hold the size of nearly every image."""

# -- errors: each message is one line that says what is wrong with a user's folder or image --


def printable(text: str) -> str:
    """Return ``text`` with unprintable characters escaped: file names may hold any byte."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class DataFolderError(Exception):
    """Raised for a folder or file that cannot be used; the message says what to change."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class MissingSplitError(DataFolderError):
    """Raised where there is nothing of a split at all: without labels, val/ may be missing."""


class BrokenImageError(Exception):
    """Raised for one image file of many that cannot be used; the message is the reason."""


def reason_of(error: Exception) -> str:
    """Return in one line why a file cannot be read, from the error that a package raised."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error)
    if _is_forbidden(error):  # what was requested, then Google's message
        text = _FORBIDDEN + (text.partition("\n")[2] or text.removeprefix(_FORBIDDEN))
    elif text.startswith("{"):  # Google's answer about one of several files
        with contextlib.suppress(ValueError, KeyError):
            text = parse_object(text)["message"]
    return printable(" ".join(text.split()))[:200] or type(error).__name__


_FORBIDDEN = "Forbidden: "


def _is_forbidden(error: Exception) -> bool:
    """Return True for the error that gcsfs raises in place of PermissionError."""
    return type(error) is OSError and str(error).startswith(_FORBIDDEN)


@contextlib.contextmanager
def reporting(path: str, action: str) -> Iterator[None]:
    """Raise DataFolderError in place of any error inside: ``path`` cannot be ``action``, "read"."""
    try:
        yield
    except DataFolderError:
        raise
    except Exception as error:  # each file system and package raises its own errors
        raise DataFolderError(f"{path} cannot be {action}: {reason_of(error)}") from error


def first_of(names: Sequence[str]) -> str:
    """Return the first few names, for a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _letters(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def told_apart(one: str, other: str) -> tuple[str, str]:
    """Return two names as they are or, if they look alike, with escapes: the same letters in other
    Unicode normal forms, as macOS and Linux may write them."""
    if one != other and _letters(one) == _letters(other):
        return ascii(one), ascii(other)
    return one, other


def other_classes(train: Sequence[str], val: Sequence[str]) -> str | None:
    """Return which classes only one of two splits has; None if both have the same names."""
    only_train, only_val = sorted({*train}.difference(val)), sorted({*val}.difference(train))
    val_names = {_letters(name): name for name in only_val}
    for name in only_train:
        if other := val_names.get(_letters(name)):
            there, here = told_apart(name, other)
            return (
                f"{name} is {there} in train and {here} in val, the same letters in two Unicode "
                "normal forms: rename one"
            )
    for split, names in (("train", only_train), ("val", only_val)):
        if names:
            return f"only {split} has {first_of(names)}"
    return None


_HIDDEN = re.compile(r"(^|/)(PaxHeaders(\.\d+)?(/|$)|\.(?!\.?(/|$)))")  # but for ./ and ../


def is_hidden(path: str) -> bool:
    """Return True if a file, or a folder in its ``path``, is one that tools leave among images: its
    name starts with a dot (macOS's ``._1.jpg``, ``.ipynb_checkpoints``) or is tar's PaxHeaders."""
    return _HIDDEN.search(path) is not None


# -- files on this machine -------------------------------------------------------------
#
# Other users may be able to write to a folder that this user writes to. A link there may lead to
# any file of this user, so nothing is written through a link.

_LINK = "it is a link, and nothing is written through one"


def regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file, or a link to one; an ``opener`` for ``open``. Raises OSError for
    anything else: reading a pipe would wait, and /dev/zero has no end."""
    opened = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return opened


def no_link(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file, but not through a link; an ``opener`` for ``open``. Raises OSError."""
    try:
        return regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, _LINK, os.fspath(path)) from None
        raise


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for anything else, also for one nested too deeply."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def make_folder(path: Path) -> None:
    """Create a folder and its parents unless it exists. Raises OSError, also for a link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, _LINK, str(path))
    path.mkdir(parents=True, exist_ok=True)


def replace_file(path: Path, content: bytes, *, unfinished: str = "tmp") -> None:
    """Write a file atomically, also in place of a link. ``unfinished``: the suffix of its name
    until it is complete. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{unfinished}")
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:  # "x" opens no existing file, and no link
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def cache_folder() -> Path:
    """Return this program's folder in the user's cache ($XDG_CACHE_HOME), for what can be computed
    again; for a user without a home, as in some containers, in the temporary folder. Raises
    DataFolderError if another user made it there."""
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


# -- URLs ------------------------------------------------------------------------------


def is_url(path: str) -> bool:
    """Return True if ``path`` is a URL, such as gs://bucket/folder."""
    return "://" in path


def problem_of_url(url: str) -> str | None:
    """Return why fsspec cannot open URLs of this kind; None if it can, or for a path."""
    if not is_url(url):
        return None
    protocol = url.partition("://")[0]
    try:
        get_filesystem_class(protocol)
    except ValueError:
        return f"{protocol}:// is not a kind of URL that fsspec knows"
    except ImportError as error:
        package = known_implementations.get(protocol, {}).get("class", "").partition(".")[0]
        if package in ("", "fsspec"):  # fsspec's own message names the packages
            return str(error).splitlines()[0]
        return f"requires the package {package}: python3 -m pip install {package}"
    return None


def open_storage(path: str, **options: Any) -> tuple[AbstractFileSystem, str]:
    """Return fsspec's file system for a path or URL, one for each process, as forked processes must
    not share connections, and the path in it. Raises whatever the file system raises."""
    # They log the traceback of each error of gcsfs, which it raises as well.
    for name in ("gcsfs", "fsspec.prefetcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return url_to_fs(path, **options)


def open_system(path: str) -> tuple[AbstractFileSystem, str]:
    """Return what ``open_storage`` returns. Raises DataFolderError."""
    if problem := problem_of_url(path):
        raise DataFolderError(f"{path}: {problem}")
    with reporting(path, "opened"):
        return open_storage(path)


def missing_bucket(system: AbstractFileSystem, path: str) -> str | None:
    """Return the bucket of a path of ``open_storage`` if it does not exist, else None. Raises
    anything if the storage does not answer."""
    bucket = path.partition("/")[0]
    if not bucket or is_url(path):  # this kind of storage has no buckets
        return None
    for look_up in (system.info, system.ls):
        # gcsfs's ``info`` also finds no empty bucket whose own metadata may not be read.
        with contextlib.suppress(FileNotFoundError):
            look_up(bucket)
            return None
    return bucket


def with_retries(path: str, read: Callable[[], Result]) -> Result:
    """Return what ``read`` returns, or raise what it raises; at a URL retry a few times, unless the
    error is one that a retry cannot change."""
    for wait in RETRY_WAITS_S if is_url(path) else ():
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError, PermissionError, DataFolderError):
            raise
        except Exception as error:  # each file system raises its own errors
            if _is_forbidden(error):
                raise
            time.sleep(wait)
    return read()


# -- reading by path or URL ------------------------------------------------------------


def read_bytes(
    path: str, start: int = 0, size: int | None = None, *, or_less: bool = False
) -> bytes:
    """Return the content of a file or URL, or ``size`` bytes of it from ``start`` on. Raises
    BrokenImageError, also if there are fewer than ``size``, unless ``or_less``."""

    def read_url() -> bytes:
        system, name = open_storage(path)
        end = None if size is None else start + size
        return system.cat_file(name, start=start or None, end=end)  # s3fs has others in between

    try:
        if is_url(path):
            content = with_retries(path, read_url)
        else:
            with open(path, "rb", opener=regular) as file:
                file.seek(start)
                content = file.read(-1 if size is None else size)
    except FileNotFoundError as error:
        raise BrokenImageError("No such file or directory") from error
    except Exception as error:  # each file system raises its own errors
        raise BrokenImageError(reason_of(error)) from error
    if size is not None and len(content) < size and not or_less:
        raise BrokenImageError(f"only {len(content)} of its {size} bytes are there")
    return content


def subfolders(url: str) -> list[str] | None:
    """Return the names of the folders at a URL, sorted, without hidden ones; None if it does not
    exist. Raises DataFolderError."""
    path, entries = _list(url, "ls")
    if entries is None:
        return None
    paths = {entry["name"].strip("/") for entry in entries if entry["type"] == "directory"}
    names = [folder.rpartition("/")[2] for folder in paths - {path.strip("/")}]
    return sorted(name for name in names if not is_hidden(name))


def find_files(folder: str, left_out: Counter[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return fsspec's information about each file in a folder and below, by its path in there;
    hidden ones are counted in ``left_out`` instead. Raises DataFolderError."""
    top, entries = _list(folder, "find")
    visible, left_out = {}, Counter() if left_out is None else left_out
    for path, info in (entries or {}).items():
        name = path.removeprefix(f"{top.rstrip('/')}/")
        if name.endswith("/"):  # a marker of an empty folder
            continue
        if is_hidden(name):
            left_out["hidden"] += 1
        else:
            visible[name] = info
    return visible


def _list(folder: str, method: str) -> tuple[str, Any]:
    """Return fsspec's path of the folder, and what its ``method`` returns about what is in there;
    None if the folder does not exist. Raises DataFolderError, also for a missing bucket."""
    system, path = open_system(folder)
    entries = None
    with reporting(folder, "listed"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        entries = with_retries(folder, lambda: getattr(system, method)(path, detail=True))
    if not entries:
        bucket = None
        with contextlib.suppress(Exception):  # a storage without buckets may raise anything
            bucket = missing_bucket(system, path)
        if bucket:
            raise DataFolderError(f"{folder}: there is no bucket {bucket}")
    return path, entries
