"""Opens files that are what they seem, and tells whose a folder is: others can guess names.

A link that stands where a file is to be written may lead to any file of this user, and whoever may
write to the folder may have put it there. So none is written through.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
import tempfile
from pathlib import Path

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
