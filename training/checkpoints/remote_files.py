"""Read files in folders of other hosts, over the connections of ``training/processes/peers.py``.

A process offers files of its folders. Another one asks for a range of bytes of one of them, again
and again over one connection. Only names that are offered are opened, and nothing is written.
"""

import contextlib
import errno
import io
import json
import os
import re
from collections.abc import Collection, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from data.files import no_link, parse_object
from training.processes import peers

_LONGEST_REQUEST = 1 << 16
_LONGEST_READ = 1 << 24
"""In bytes; longer reads are divided."""
_BUFFER = 1 << 20
"""Bytes to read ahead: a tensor is read in dozens of small pieces."""
_NAME = re.compile(r"[\w.-]*\w[\w.-]*")
_CONTENT, _PROBLEM = b"\0", b"\1"
"""The first byte of an answer."""


class Offered:
    """The files of this process's host that other processes of the run may read."""

    def __init__(self) -> None:
        self._folders: dict[str, tuple[Path, frozenset[str]]] = {}

    def offer(self, label: str, folder: Path, names: Collection[str]) -> None:
        """Offer files of a folder under a label that is the same on all hosts."""
        self._folders[label] = folder, frozenset(filter(_NAME.fullmatch, names))

    def withdraw(self) -> None:
        """Offer nothing any more."""
        self._folders = {}

    def answer(self, connection: Connection) -> None:
        """Answer requests until the other process closes the connection."""
        with contextlib.suppress(Exception), connection:  # the other process reports what fails
            while True:
                request = connection.recv_bytes(_LONGEST_REQUEST)
                try:
                    answer = _CONTENT + self._read(parse_object(request))
                except OSError as error:
                    answer = _PROBLEM + (error.strerror or str(error)).encode()
                except Exception:  # noqa: BLE001 - a request may be anything
                    answer = _PROBLEM + b"no such file or range"
                connection.send_bytes(answer)

    def _read(self, request: dict[str, Any]) -> bytes:
        folder, names = self._folders[request["folder"]]
        name, offset, length = request["name"], request["offset"], request["length"]
        if name not in names or not 0 <= length <= _LONGEST_READ:
            raise ValueError
        with open(folder / name, "rb", opener=no_link) as file:
            return os.pread(file.fileno(), length, offset)


class RemoteFile(io.RawIOBase):
    """A file that another process offers, as a stream for reading. Methods raise OSError."""

    def __init__(self, connection: Connection, label: str, name: str, size: int) -> None:
        self._connection, self._label, self._name = connection, label, name
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        starts = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}
        self._at = starts[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        length = min(len(target), self._size - self._at, _LONGEST_READ)
        if length <= 0:
            return 0
        wanted = {"folder": self._label, "name": self._name, "offset": self._at, "length": length}
        try:
            self._connection.send_bytes(json.dumps(wanted).encode())
            answer = self._connection.recv_bytes(1 + _LONGEST_READ)
        except (EOFError, OSError) as error:
            reason = f"its host does not answer ({error or type(error).__name__})"
            raise OSError(errno.EREMOTEIO, reason, self._name) from error
        if answer[:1] == _CONTENT and len(answer) - 1 != length:
            raise OSError(errno.EREMOTEIO, "it has become shorter on its host", self._name)
        if answer[:1] != _CONTENT:
            raise OSError(errno.EREMOTEIO, answer[1:].decode(errors="replace"), self._name)
        target[:length] = answer[1:]
        self._at += length
        return length


@contextlib.contextmanager
def open_remote(
    address: tuple[str, int], key: bytes, label: str, name: str, size: int
) -> Iterator[io.IOBase]:
    """Open a file of this size that the process at an address offers. Raises OSError, or
    AuthenticationError if that process has another key."""
    with (
        peers.connect(address, key) as connection,
        io.BufferedReader(RemoteFile(connection, label, name, size), _BUFFER) as stream,
    ):
        yield stream
