"""Index files, which avoid listing images again at each start, or reading their sizes.

An index file is a safetensors file, which all processes map into memory. It is written under a
temporary name and renamed, so that no process reads an incomplete one. It is a cache: an invalid
file is rebuilt.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import safe_open
from safetensors.numpy import save

from config_fields import is_of
from data import files
from data.config import DataConfig
from data.files import BrokenImageError, DataFolderError, is_url, printable, reason_of

# -- millions of names in two arrays ---------------------------------------------------


_ENCODING = "utf-8", "surrogateescape"  # file names may hold any byte


@dataclass(frozen=True)
class Strings(Sequence[str]):
    """Strings in one array of bytes, separated by newlines.

    Loader processes share the array. A list of strings would be copied into each process, because
    reference counting writes to every string.
    """

    content: np.ndarray
    """The bytes, uint8."""
    ends: np.ndarray
    """The end of each string in ``content``, int64."""
    folder: str = ""
    """A folder or URL that is prepended to each string."""

    @classmethod
    def of(cls, strings: Iterable[str], folder: str = "") -> Strings:
        """Build from an iterable; if it is lazy, only one string at a time is in memory."""
        content, ends = bytearray(), array("q")
        for string in strings:
            if ends:
                content += b"\n"
            content += string.encode(*_ENCODING)
            ends.append(len(content))
        return cls(np.frombuffer(content, np.uint8), np.frombuffer(ends, np.int64), folder)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: Any) -> str:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = self.ends[number - 1] + 1 if number else 0
        string = self.content[start : self.ends[number]].tobytes().decode(*_ENCODING)
        return os.path.join(self.folder, string)


@dataclass(frozen=True)
class StringLists(Sequence[list[str]]):
    """Lists of strings, in arrays as ``Strings``."""

    strings: Strings
    ends: np.ndarray
    """How many strings are in each list and those before it, int64."""

    @classmethod
    def of(cls, lists: Sequence[Sequence[str]]) -> StringLists:
        ends = np.cumsum([len(each) for each in lists], dtype=np.int64)
        return cls(Strings.of(string for each in lists for string in each), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start = self.ends[number - 1] if number else 0
        return [self.strings[at] for at in range(start, self.ends[number])]


# -- where an index file is ------------------------------------------------------------


_FOLDER = ".vit_fsdp_index"
"""The folder of the index files in ``--data_dir``."""


@dataclass(frozen=True)
class Places:
    """Where an index file may be."""

    paths: list[Path]
    """Local paths; a new file is written to the first one that can be."""
    url: str | None = None
    """Next to the images at a URL: read by hosts that have none of ``paths``."""

    @classmethod
    def of(cls, config: DataConfig, name: str, *, beside: bool) -> Places:
        """Return the places of the index file ``name``: in ``--index_dir``, else next to the images
        (if ``beside``), else in the cache folder. Images at a URL have it in both, as a file at a
        URL cannot be mapped. Raises DataFolderError without a cache folder."""
        root, name = config.data_dir, f"{name}-of-{config.data_source}"
        where = files.without_secrets(root) if is_url(root) else os.path.abspath(root)
        marked = f"{name}-{xxhash.xxh3_64(where.encode(errors='surrogateescape')).hexdigest()}"
        if config.index_dir is not None:
            return cls([Path(config.index_dir) / marked])
        cached = files.cache_folder() / marked
        if not beside:
            return cls([cached])
        if is_url(root):
            return cls([cached], f"{root.rstrip('/')}/{_FOLDER}/{name}")
        return cls([Path(root) / _FOLDER / name, cached])

    def write(self, content: bytes) -> Path:
        """Write a file to the first possible path, through no link; return the path. Raises
        OSError."""
        unfinished = f"{socket.gethostname()}.{os.getpid()}"
        for path in self.paths:
            try:
                files.make_folder(path.parent)
                files.replace_file(path, content, unfinished=unfinished)
                return path
            except OSError as error:
                reason = error
                with contextlib.suppress(OSError):
                    path.with_name(f"{path.name}.{unfinished}").unlink()
        raise reason


# -- what is in it ---------------------------------------------------------------------


VERSION = 2
_LARGEST = files.SizeLimit("an index file", 2**34)
"""At a URL, where it is read whole: more than a hundred million images."""
MIN_IMAGES = 10_000
"""Minimum number of images for which an index is saved by default; listing fewer takes less than a
second."""


@dataclass(frozen=True)
class Table:
    """Arrays of numbers, and additional information as JSON."""

    arrays: dict[str, np.ndarray]
    info: dict[str, Any]


def load_or_build(
    config: DataConfig,
    name: str,
    folder: str,
    build: Callable[[], Table],
    change: Callable[[Table], str | None],
    *,
    counted: str,
    beside: bool = True,
) -> Table:
    """Return the table in the index file ``name``; if the file is unusable, build and save it.

    It is saved for many images (the array ``counted`` has an entry for each), for images at a URL,
    and with ``--index_dir``, but not if the table's info has "settled": False. One process per host
    builds it while the others wait.

    ``folder`` is the indexed folder or URL. ``change`` returns what has changed there since a table
    was built, or None. ``beside``: the file may be next to the images. Raises DataFolderError if
    ``--index_dir`` is not writable.
    """
    started = time.time()
    places = Places.of(config, name, beside=beside)

    def load() -> tuple[Table | None, str | None]:
        """Return the saved table, or the reason why it is unusable; (None, None) without a file."""
        why = None
        for path in places.paths:
            try:
                table = _read(path)
                if table.info["version"] != VERSION:
                    why = "its format version is different"
                elif config.rebuild_index and table.info["built"] < started:
                    why = "--rebuild_index"
                elif changed := change(table):
                    why = changed
                else:
                    return table, None
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, ValueError, KeyError, TypeError) as error:
                why = reason_of(error)
        return None, why

    def log(line: str) -> None:
        print(printable(line), file=sys.stderr, flush=True)

    table, why = load()
    if table:
        return table
    with _one_process_at_a_time(folder):
        table, _ = load()  # another process may just have built it
        if not table and places.url and not config.rebuild_index:  # or another host
            with contextlib.suppress(BrokenImageError, OSError):
                places.write(files.read_bytes(places.url, limit=_LARGEST))
                table, why = load()
        if table:
            return table
        if why:
            log(f"note: the index of {folder} is being rebuilt: {why}")
        table = build()
        is_far_or_many = is_url(config.data_dir) or len(table.arrays[counted]) >= MIN_IMAGES
        is_settled = table.info.get("settled", True)
        if not (is_settled and (is_far_or_many or config.index_dir is not None)):
            return table
        took = time.time() - started
        info = table.info | {"version": VERSION, "built": time.time()}
        info["checksum"] = _checksum(table.arrays, info)
        content = save(table.arrays, {"info": json.dumps(info)})
        also = ""
        if places.url:
            also = f" and {places.url}"
            try:
                files.put(content, places.url)
            except DataFolderError as error:
                also = f"; each new host builds it again: {error}"
        try:
            path = places.write(content)
            table = _read(path)  # mapped from its file
            log(f"note: the index of {folder} was built in {took:.1f} s and saved as {path}{also}")
            return table
        except OSError as error:
            why = reason_of(error)
    if config.index_dir is not None:
        raise DataFolderError(f"--index_dir {config.index_dir} cannot be used: {why}")
    log(
        f"warning: the index of {folder} cannot be saved ({why}), so each start lists the images "
        "again: set --index_dir to a writable folder"
    )
    return table


@contextlib.contextmanager
def _one_process_at_a_time(folder: str) -> Iterator[None]:
    """Lock a folder, which leaves no lock file behind; if it cannot be locked (URL, NFS), lock this
    user's temporary folder instead. Other users could hold a lock on a folder of theirs forever."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_locked(folder))
        except OSError:
            with contextlib.suppress(OSError, DataFolderError):
                stack.enter_context(_locked(files.temporary_folder()))
        yield


@contextlib.contextmanager
def _locked(folder: str | Path) -> Iterator[None]:
    """Hold a folder's lock inside. Raises OSError."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


_TYPES = {
    "built": float,
    "left_out": dict[str, int],
    **dict.fromkeys(("classes", "names"), list[str] | None),
}
"""The types of the values in ``Table.info`` that are not only compared."""


def _read(path: Path) -> Table:
    """Return the table in a file with memory-mapped arrays. Raises OSError, or ValueError if it is
    damaged."""
    try:
        os.close(files.regular(path, os.O_RDONLY))
        with safe_open(path, "pt") as file:  # "numpy" would copy the arrays
            info = files.parse_object((file.metadata() or {})["info"])
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
        if info.pop("checksum") != _checksum(arrays, info):
            raise ValueError("its checksum does not match")
        for name, hint in _TYPES.items():
            if name in info and not is_of(info[name], hint):
                raise ValueError(f"its {name} is invalid")
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - safetensors and PyTorch fail in any way
        raise ValueError(reason_of(error)) from None
    return Table(arrays, info)


def _checksum(arrays: dict[str, np.ndarray], info: dict[str, Any]) -> str:
    digest = xxhash.xxh3_64(json.dumps(info, sort_keys=True).encode())
    for name, values in sorted(arrays.items()):
        digest.update(f"{name} {values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()
