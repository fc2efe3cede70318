"""Files and folders: error types, safe writes to disk, and reading from paths or URLs.

URLs of all kinds that fsspec supports can be used: gs://, s3://, file://, ...
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import logging
import os
import re
import stat
import tempfile
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Result = TypeVar("Result")

# Otherwise gcsfs queries the bucket type over gRPC (an experimental feature of gcsfs), and gRPC's
# threads do not survive the fork of loader processes.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

RETRY_WAITS_S = (0.5, 2.0, 8.0)
"""Seconds to wait before each retry of a read from a URL."""
HEAD = 64 * 1024
"""Number of bytes at the start of a file that contain the image size of nearly all images."""

# -- limits: a small file, or a sparse one, can claim any size; memory is taken only below these --


class TooLarge(ValueError):
    """Raised for more bytes than a limit; the message names it."""


@dataclass(frozen=True)
class SizeLimit:
    """The maximum number of bytes of something that is read or decoded as a whole."""

    what: str
    size: int

    def check(self, size: int, name: str = "it") -> None:
        """Raise TooLarge if ``name`` has more than the maximum."""
        if size > self.size:
            raise TooLarge(f"{name} has {size:,} bytes; the limit for {self.what} is {self.size:,}")


ENCODED = SizeLimit("a file of one image", 2**30)
"""Enough for ``MAX_PIXELS`` (``data/decode.py``) of 16 bits, uncompressed."""
TEXT = SizeLimit("a file of text or JSON", 2**26)
"""Several million class names. Parsed JSON may take thirty times the memory."""

# -- errors: each message is one line that says what is wrong with a folder or image --------


_SECRETS = re.compile(
    r"""
    (?<=://)  # of a URL in any text: user and password, which may contain anything, but are no port
    (?: [^\s/?#]* @ | [^\s/?#:\[]* : (?!\d*(?:[\s/]|$)) \S* @ )?
    ([^\s?'"]*)
    (?: \? [^\s'"<>]* = [^\s'"<>]* [^\s'"<>.,:;)] )?  # a query, such as a signature
    | (?<=Bearer\ ) [^\s'"]+  # of an HTTP header
    """,
    re.VERBOSE,
)


def without_secrets(text: str) -> str:
    """Return ``text`` with all URLs in it without user, password and query, and without tokens of
    HTTP headers: for whatever leaves this process, e.g. to a log, a checkpoint or an index file."""
    return _SECRETS.sub(lambda found: found[1] or "", text)


def printable(text: str) -> str:
    """Return ``text`` for a message: unprintable characters escaped, as file names may contain any
    byte, and ``without_secrets``."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in without_secrets(text)
    )


class DataFolderError(Exception):
    """Raised for an unusable folder or file; the message says what to change."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class MissingSplitError(DataFolderError):
    """Raised if a split does not exist at all: without labels, val/ may be missing."""


class BrokenImageError(Exception):
    """Raised for a single unusable image file; the message is the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(without_secrets(message))


def reason_of(error: Exception) -> str:
    """Return a one-line reason why a file cannot be read, from an error of any package."""
    if isinstance(error, OSError) and error.strerror:
        return without_secrets(error.strerror)
    text = str(error)
    if _is_forbidden(error):  # what was requested, then Google's message
        text = _FORBIDDEN + (text.partition("\n")[2] or text.removeprefix(_FORBIDDEN))
    elif text.startswith("{"):  # Google's answer about one of several files
        with contextlib.suppress(ValueError, KeyError):
            text = parse_object(text)["message"]
    return printable(" ".join(text.split()))[:200] or type(error).__name__


_FORBIDDEN = "Forbidden: "


def _is_forbidden(error: Exception) -> bool:
    """Return True for the error that gcsfs raises instead of PermissionError."""
    return type(error) is OSError and str(error).startswith(_FORBIDDEN)


@contextlib.contextmanager
def reporting(path: str, action: str) -> Iterator[None]:
    """Turn any error in the block into DataFolderError: "PATH cannot be ACTION: REASON"."""
    try:
        yield
    except DataFolderError:
        raise
    except Exception as error:  # each file system and package raises its own errors
        raise DataFolderError(f"{path} cannot be {action}: {reason_of(error)}") from error


def first_of(names: Sequence[str]) -> str:
    """Return the first few names, for use in a message."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _letters(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def told_apart(one: str, other: str) -> tuple[str, str]:
    """Return two names unchanged or, if they look the same, with escapes: macOS and Linux may write
    the same letters in different Unicode normal forms."""
    if one != other and _letters(one) == _letters(other):
        return ascii(one), ascii(other)
    return one, other


def other_classes(train: Sequence[str], val: Sequence[str]) -> str | None:
    """Return which classes are in only one of two splits; None if both have the same names."""
    only_train, only_val = sorted({*train}.difference(val)), sorted({*val}.difference(train))
    val_names = {_letters(name): name for name in only_val}
    for name in only_train:
        if other := val_names.get(_letters(name)):
            there, here = told_apart(name, other)
            return (
                f"{name} is {there} in train and {here} in val: the same letters in "
                "different Unicode normal forms; rename one"
            )
    for split, names in (("train", only_train), ("val", only_val)):
        if names:
            return f"only {split} has {first_of(names)}"
    return None


_HIDDEN = re.compile(r"(^|/)(PaxHeaders(\.\d+)?(/|$)|\.(?!\.?(/|$)))")  # but for ./ and ../


def is_hidden(path: str) -> bool:
    """Return True if ``path``, or a folder in it, is hidden or left behind by tools: its name
    starts with a dot (macOS's ``._1.jpg``, ``.ipynb_checkpoints``) or is tar's PaxHeaders."""
    return _HIDDEN.search(path) is not None


# -- files on this machine -------------------------------------------------------------
#
# Other users may have write access to a folder that this user writes to, and could place a link
# there to any file of this user. Therefore nothing is written through links.

_LINK = "it is a symbolic link, and files are not written through links"


def regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file or a link to one; an ``opener`` for ``open``. Raises OSError for anything
    else: reading a pipe could block, and /dev/zero is endless."""
    opened = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(opened).st_mode
    if not stat.S_ISREG(mode):
        os.close(opened)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO  # as the kernel for sockets
        raise OSError(number, "it is not a regular file", os.fspath(path))
    return opened


def no_link(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file, but no link; an ``opener`` for ``open``. Raises OSError."""
    try:
        return regular(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, _LINK, os.fspath(path)) from None
        raise


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for anything else, including too deep nesting."""
    too_deep = ValueError("it is nested too deeply")
    try:
        content = json.loads(text)
    except RecursionError:
        raise too_deep from None
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    if not _is_within(content, _DEEPEST):
        raise too_deep
    return content


_DEEPEST = 50
"""The most levels of a JSON object: far below Python's recursion limit, so that it can also be
written again, compared and shown."""


def _is_within(value: Any, levels: int) -> bool:
    """Return True if a value from JSON has at most so many levels of objects and lists."""
    if not isinstance(value, dict | list):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(_is_within(each, levels - 1) for each in inner)


def make_folder(path: Path) -> None:
    """Create a folder and its parents unless it exists. Raises OSError, in particular for a
    link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, _LINK, str(path))
    path.mkdir(parents=True, exist_ok=True)


def replace_file(path: Path, content: bytes, *, unfinished: str = "tmp") -> None:
    """Write a file atomically; replaces a link itself, not its target. ``unfinished`` is the suffix
    of the temporary file. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{unfinished}")
    temporary.unlink(missing_ok=True)
    with temporary.open("xb") as file:  # "x" opens no existing file, and no link
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Write a table for spreadsheets and terminals, atomically. Raises OSError.

    Text that a spreadsheet would compute as a formula gets an apostrophe, control characters are
    escaped; bytes in names that are no text stay as they are.
    """

    def cell(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        text = "".join(char if "\udc80" <= char <= "\udcff" else printable(char) for char in value)
        first = unicodedata.normalize("NFKC", text.lstrip()[:1])
        return f"'{text}" if first and first in "=+-@" else text

    content = io.StringIO(newline="")
    csv.writer(content).writerows([*map(cell, row)] for row in rows)
    replace_file(path, content.getvalue().encode(errors="surrogateescape"))


def cache_folder() -> Path:
    """Return this program's cache folder in $XDG_CACHE_HOME or ~/.cache, or in the temporary folder
    for a user without a home folder (common in containers). Raises DataFolderError if another user
    created it there."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vit_fsdp"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        return temporary_folder(
            ", the cache folder used because HOME is not set,",
            "set HOME or XDG_CACHE_HOME to a folder of your own",
        )


def temporary_folder(role: str = "", remedy: str = "remove it") -> Path:
    """Return this user's folder in the temporary folder; create it if possible.

    Raises DataFolderError if another user may have written to it, with words for its ``role`` and
    what to do: anybody can guess its name.
    """
    folder = Path(tempfile.gettempdir()) / f"vit_fsdp-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    if os.path.lexists(folder):
        found = folder.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not is_own or found.st_mode & stat.S_IWOTH:
            raise DataFolderError(
                f"{folder}{role} belongs to another user or can be written by any: {remedy}"
            )
    return folder


# -- URLs ------------------------------------------------------------------------------


def is_url(path: str) -> bool:
    """Return True if ``path`` is a URL, such as gs://bucket/folder."""
    return "://" in path


def problem_of_url(url: str) -> str | None:
    """Return why fsspec cannot open this URL's protocol; None if it can, or for a path."""
    if not is_url(url):
        return None
    from fsspec.registry import get_filesystem_class, known_implementations  # see open_storage

    protocol = url.partition("://")[0]
    try:
        get_filesystem_class(protocol)
    except ValueError:
        return f"fsspec does not support {protocol}:// URLs"
    except ImportError as error:
        package = known_implementations.get(protocol, {}).get("class", "").partition(".")[0]
        if package in ("", "fsspec"):  # fsspec's own message names the packages
            return str(error).splitlines()[0]
        return f"requires the package {package}: python3 -m pip install {package}"
    return None


def open_storage(path: str, **options: Any) -> tuple[AbstractFileSystem, str]:
    """Return the fsspec file system and the path in it for a path or URL. Each process gets its own
    file system, because forked processes must not share connections. Raises what the file system
    raises."""
    from fsspec.core import url_to_fs  # here: tools that read local files run without packages

    # These loggers print a traceback for each error that gcsfs also raises.
    for name in ("gcsfs", "fsspec.prefetcher"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return url_to_fs(path, **options)


def open_system(path: str) -> tuple[AbstractFileSystem, str]:
    """Call ``open_storage``, with errors as DataFolderError."""
    if problem := problem_of_url(path):
        raise DataFolderError(f"{path}: {problem}")
    with reporting(path, "opened"):
        return open_storage(path)


def missing_bucket(system: AbstractFileSystem, path: str) -> str | None:
    """Return the name of the bucket in a path of ``open_storage`` if it does not exist, else None.
    May raise anything if the storage does not respond."""
    bucket = path.partition("/")[0]
    if not bucket or is_url(path):  # this kind of storage has no buckets
        return None
    for look_up in (system.info, system.ls):
        # gcsfs's ``info`` does not find an empty bucket whose metadata may not be read.
        with contextlib.suppress(FileNotFoundError):
            look_up(bucket)
            return None
    return bucket


_PERMANENT = (
    FileNotFoundError,
    NotADirectoryError,
    PermissionError,
    NotImplementedError,
    DataFolderError,
    TooLarge,
)


def with_retries(path: str, read: Callable[[], Result]) -> Result:
    """Call ``read``; for a URL, retry a few times unless the error is permanent."""
    for wait in RETRY_WAITS_S if is_url(path) else ():
        try:
            return read()
        except _PERMANENT:
            raise
        except Exception as error:  # each file system raises its own errors
            if _is_forbidden(error):
                raise
            time.sleep(wait)
    return read()


# -- reading by path or URL ------------------------------------------------------------


def read_bytes(
    path: str,
    start: int = 0,
    size: int | None = None,
    *,
    or_less: bool = False,
    limit: SizeLimit = ENCODED,
) -> bytes:
    """Return the content of a file or URL, or ``size`` bytes of it starting at ``start``. Raises
    BrokenImageError, also for more bytes than ``limit``, and if fewer than ``size`` bytes exist,
    unless ``or_less``."""

    def read_url() -> bytes:
        system, name = open_storage(path)
        end = start + (limit.size + 1 if size is None else size)
        try:
            return system.cat_file(name, start=start or None, end=end)  # s3fs has others in between
        except Exception:
            if size is None and not start and system.size(name) == 0:  # it has no byte to ask for
                return b""
            raise

    try:
        limit.check(size or 0)
        if is_url(path):
            content = with_retries(path, read_url)
            limit.check(len(content))
        else:
            with open(path, "rb", opener=regular) as file:
                if size is None:
                    limit.check(os.fstat(file.fileno()).st_size - start)
                file.seek(start)
                content = file.read(-1 if size is None else size)
    except FileNotFoundError as error:
        raise BrokenImageError("No such file or directory") from error
    except Exception as error:  # each file system raises its own errors
        raise BrokenImageError(reason_of(error)) from error
    if size is not None and len(content) < size and not or_less:
        raise BrokenImageError(f"it is truncated: {len(content)} of {size} bytes")
    return content


def put(content: bytes | str, path: str) -> None:
    """Write bytes, or the local file of this name, to a path or URL. Raises DataFolderError."""
    system, name = open_system(path)
    write = system.put_file if isinstance(content, str) else system.pipe_file
    arguments = (content, name) if isinstance(content, str) else (name, content)
    with reporting(path, "written"):
        with_retries(path, lambda: write(*arguments))


def subfolders(url: str) -> list[str] | None:
    """Return the sorted names of the folders at a URL without hidden ones; None if the URL does not
    exist. Raises DataFolderError."""
    path, entries = _list(url, "ls")
    if entries is None:
        return None
    paths = {entry["name"].strip("/") for entry in entries if entry["type"] == "directory"}
    names = [folder.rpartition("/")[2] for folder in paths - {path.strip("/")}]
    return sorted(name for name in names if not is_hidden(name))


def find_files(folder: str, left_out: Counter[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return fsspec's metadata of all files below a folder, by relative path; hidden files are
    counted in ``left_out`` instead. Raises DataFolderError."""
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
    """Return fsspec's path of the folder, and the result of fsspec's ``method`` for it; None if the
    folder does not exist. Raises DataFolderError, also for a missing bucket."""
    system, path = open_system(folder)
    entries = None
    with reporting(folder, "listed"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        entries = with_retries(folder, lambda: getattr(system, method)(path, detail=True))
    if not entries:
        bucket = None
        with contextlib.suppress(Exception):  # a storage without buckets may raise anything
            bucket = missing_bucket(system, path)
        if bucket:
            raise DataFolderError(f"{folder}: the bucket {bucket} does not exist")
    return path, entries
