"""Gives a folder to one job: the system frees the lock when its process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from pathlib import Path

from data.own_files import no_link, what_others_own
from training.errors import UsageError

LOCK_FILE = ".lock"
_HELD = {errno.EACCES, errno.EAGAIN}
_PATIENCE_S, _RESTART_PATIENCE_S = 3.0, 120.0
"""The seconds to wait for a job that is just ending, and longer in a restart: of a node that has
crashed, an NFS server may keep the lock for a lease (90 s by default)."""
_VISIBLE_WITHIN_S = 30.0
"""The seconds after which a network file system shows a new file on all hosts."""


class FolderLock:
    """Holds a folder for the first process of a job, for as long as that process lives.

    It is a POSIX record lock: children do not inherit it, and NFS passes it on to its server. It
    goes when the process closes the file, however it had opened it, so nothing else in it may open
    it. The file itself stays; it says who had the lock last.
    """

    def __init__(self, ckpt_dir: Path, *, inside: Path | None = None, shared: bool = False) -> None:
        """Name the folder. ``inside``: the local folder that is locked in the place of a URL, on
        which there are no locks; the file is copied there. ``shared``: it may be another user's."""
        self._folder, self._place, self._shared = ckpt_dir, inside or ckpt_dir, shared
        self._file: int | None = None

    def acquire(self, *, is_restart: bool) -> str:
        """Take the lock; return a token that is in the file.

        Raises UsageError if it is held, or if the folder is another user's.
        """
        path = self._place / LOCK_FILE
        try:
            self._place.mkdir(parents=True, exist_ok=True)
            check_own(self._place, shared=self._shared)
            self._file = no_link(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise UsageError(
                f"cannot write to --ckpt_dir {self._place}: {error.strerror}"
            ) from None
        deadline = time.monotonic() + (_RESTART_PATIENCE_S if is_restart else _PATIENCE_S)
        while not self._try():
            if time.monotonic() > deadline:
                holder = os.pread(self._file, 4096, 0)
                self.release()
                raise UsageError(
                    f"--ckpt_dir {self._folder} is in use by {_describe(holder)}: end that run "
                    "first, or choose another folder"
                )
            time.sleep(0.2)
        token = secrets.token_hex(8)
        content = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "token": token,
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(content).encode(), 0)
        os.fsync(self._file)
        if self._place != self._folder:
            (self._folder / LOCK_FILE).write_text(json.dumps(content))
        return token

    def _try(self) -> bool:
        assert self._file is not None
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Any other error: a file system without locks, where nothing can be told.
            return error.errno not in _HELD
        return True

    def release(self) -> None:
        """Let go of the lock, if it is held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _describe(holder: bytes) -> str:
    try:
        content = json.loads(holder)
        return f"process {content['pid']} on {content['host']}, since {content['since']}"
    except (ValueError, KeyError, TypeError):
        return "another job"


def check_own(folder: Path, flag: str = "--ckpt_dir", *, shared: bool = False) -> None:
    """Raise UsageError if a folder, or what is in it, is another user's, and not ``shared``.

    A checkpoint in it would be resumed, whoever has made it up. Raises OSError.
    """
    if not shared and (theirs := what_others_own(folder)):
        remedy = ", or take what is there as it is with --shared_ckpt_dir"
        raise UsageError(
            f"{flag} {folder}: {theirs}: give a folder of your own"
            + (remedy if flag == "--ckpt_dir" else "")
        )


def check_same_folder(ckpt_dir: Path, token: str) -> None:
    """Raise UsageError if this process does not see the file that the first one has locked."""
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while True:
        try:
            if json.loads((ckpt_dir / LOCK_FILE).read_text())["token"] == token:
                return
        except (OSError, ValueError, KeyError, TypeError):
            pass
        if time.monotonic() > deadline:
            raise UsageError(
                f"--ckpt_dir {ckpt_dir} is not the folder that the first process sees under this "
                "name: give one that all nodes share"
            )
        time.sleep(0.2)
