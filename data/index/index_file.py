"""Keeps what was found among many files in one file of arrays, which all processes map.

The file is in safetensors' format. It is written under another name and renamed, so that nobody
ever reads half of one; and it is read as a cache is: what cannot be trusted is made anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from data.cache_folder import cache_folder
from data.config import DataConfig
from data.errors import DataFolderError, printable, reason_of
from data.own_files import make_folder, replace_file
from data.storage import is_url

VERSION = 1
FROM = 10_000
"""Images from which on an index is kept unasked; to find fewer takes less than a second."""
_BESIDE = ".vit_fsdp_index"


@dataclass(frozen=True)
class Table:
    """Arrays of numbers, and what else is known with them, as JSON has it."""

    arrays: dict[str, np.ndarray]
    info: dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """Says where an index is kept, what it must be an index of, and whether to make it anew."""

    paths: Sequence[Path]
    """It is read from and written to the first of these where that can be done."""
    of: str
    """The folder or URL that it tells of."""
    info: dict[str, Any]
    """What its ``Table.info`` must have."""
    config: DataConfig

    def load(
        self,
        build: Callable[[], Table],
        change: Callable[[Table], str | None],
        is_worth_it: Callable[[Table], bool],
    ) -> Table:
        """Return the table that is kept; where it is not usable, build it, and keep it.

        ``change`` says what has changed since a table was built, None if nothing has;
        ``is_worth_it`` whether a table is kept. Of this host's processes one builds it, and
        the others wait. Raises DataFolderError if ``--index_dir`` cannot be written to.
        """
        began = time.time()
        found, why = self._usable(change, began)
        if found:
            return found
        with _one_at_a_time(self.of):
            found, _ = self._usable(change, began)  # what another has just built
            if found:
                return found
            if why:
                _say(f"the index of {self.of} is made anew: {why}")
            table = build()
            return self._keep(table, time.time() - began) if is_worth_it(table) else table

    def _usable(self, change: Callable, began: float) -> tuple[Table | None, str | None]:
        """Return the table that is kept, or why it is of no use; neither if there is none."""
        why = None
        for path in self.paths:
            try:
                table = _read(path)
                if not self.info.items() <= table.info.items():
                    raise ValueError("it is another version's")
                if self.config.rebuild_index and table.info["built"] < began:
                    raise ValueError("--rebuild_index")
                if said := change(table):
                    raise ValueError(said)
                return table, None
            except FileNotFoundError:
                continue
            except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
                why = reason_of(error)
        return None, why

    def _keep(self, table: Table, took: float) -> Table:
        """Write the table and return it as it is read: mapped from its file."""
        info = table.info | self.info | {"built": time.time()}
        info["checksum"] = _checksum(table.arrays, info)
        content = save(table.arrays, {"info": json.dumps(info)})
        for path in self.paths:
            unfinished = f"{socket.gethostname()}.{os.getpid()}"
            try:
                make_folder(path.parent)
                replace_file(path, content, unfinished=unfinished)
                kept = _read(path)
            except OSError as error:
                why = reason_of(error)
                with contextlib.suppress(OSError):
                    path.with_name(f"{path.name}.{unfinished}").unlink()
                continue
            _say(f"the index of {self.of} took {took:.1f} s, and is kept as {path}")
            return kept
        if self.config.index_dir is not None:
            raise DataFolderError(f"--index_dir {self.config.index_dir} cannot be used: {why}")
        _say(f"the index of {self.of} cannot be kept ({why}): --index_dir names a place for it")
        return table


def places(config: DataConfig, root: str, name: str) -> list[Path]:
    """Return where the index called ``name`` of what is in ``root`` may be, the best place first.

    That is ``--index_dir``; or else beside the images, or else, as for URLs, in the cache folder.
    """
    whose = root if is_url(root) else os.path.abspath(root)
    marked = f"{name}-{xxhash.xxh3_64(whose.encode(errors='surrogateescape')).hexdigest()}"
    if config.index_dir is not None:
        return [Path(config.index_dir) / marked]
    beside = [] if is_url(root) else [Path(root) / _BESIDE / name]
    return [*beside, cache_folder() / marked]


def is_worth_it(config: DataConfig, array: str, table: Table) -> bool:
    """Tell whether a table is kept: of many images (``array`` has a number of each), of those far
    away, and where it is asked for."""
    asked = config.index_dir is not None or is_url(config.data_dir)
    return asked or len(table.arrays[array]) >= FROM


def _read(path: Path) -> Table:
    """Return the table in a file, whose arrays lie in the file; raises what safetensors raises."""
    with safe_open(path, "pt") as file:  # "numpy" would copy the arrays
        info = json.loads((file.metadata() or {})["info"])
        arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    if info.pop("checksum") != _checksum(arrays, info):
        raise ValueError("its checksum is wrong")
    return Table(arrays, info)


def _checksum(arrays: dict[str, np.ndarray], info: dict[str, Any]) -> str:
    digest = xxhash.xxh3_64(json.dumps(info, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


@contextlib.contextmanager
def _one_at_a_time(of: str) -> Iterator[None]:
    """Let one process of this host after the other in, where the system can.

    The folder itself is locked, so that no file is left behind; NFS cannot do that.
    """
    with contextlib.ExitStack() as stack:
        for folder in (of, tempfile.gettempdir()):
            try:
                opened = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, opened)
                fcntl.flock(opened, fcntl.LOCK_EX)
                break
            except OSError:
                continue
        yield


def _say(line: str) -> None:
    print(f"note: {printable(line)}", file=sys.stderr, flush=True)
