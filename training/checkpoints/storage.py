"""Lets PyTorch's DCP write and read checkpoints, in local folders and on URLs alike."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from training.url_path import UrlPath, is_url, replace_file

METADATA = ".metadata"
"""The file that DCP writes when all parts of a checkpoint are there: names, shapes, places."""
Name = str | os.PathLike
"""What DCP calls a file: on URLs a text, as it keeps the folder's name in the metadata."""
Entry = tuple[int, str]
"""A file's size in bytes and its checksum, XXH3 of 128 bits in hexadecimal digits."""


class UrlFiles:
    """Gives DCP the files of a URL: what ``FolderWriter`` and ``FolderReader`` use of its
    ``FileSystemBase``. Nothing is renamed or removed."""

    @contextlib.contextmanager
    def create_stream(self, path: Name, mode: str) -> Iterator[io.IOBase]:
        with _at(path).open(mode) as stream:
            yield cast(io.IOBase, stream)

    def concat_path(self, path: Name, suffix: str) -> Name:
        return str(_at(path) / suffix)

    def init_path(self, path: Name) -> Name:
        return path

    def mkdir(self, path: Name) -> None:
        _at(path).mkdir()

    def exists(self, path: Name) -> bool:
        return _at(path).exists()


def _at(path: Name) -> UrlPath:
    return UrlPath(str(path))


class SummedFiles:
    """Gives DCP the files of another file system, and sums up what is written to them meanwhile."""

    def __init__(self, files: FileSystem | UrlFiles) -> None:
        self._files = files
        self.sums: dict[str, Entry] = {}
        """Of the files written so far, by name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    @contextlib.contextmanager
    def create_stream(self, path: Name, mode: str) -> Iterator[io.IOBase]:
        with self._files.create_stream(path, mode) as stream:
            summed = _Summed(stream)
            yield cast(io.IOBase, summed)
        self.sums[os.path.basename(path)] = (summed.size, summed.digest.hexdigest())


class _Summed:
    """A stream, with the size and the checksum of what is written to it, from front to back."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream, self.size, self.digest = stream, 0, xxhash.xxh3_128()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, content: Any) -> int:
        self.digest.update(content)
        self.size += memoryview(content).nbytes
        return self._stream.write(content)


class FolderWriter(dcp.FileSystemWriter):
    """Writes the parts of a checkpoint and its metadata, with their checksums."""

    def __init__(self, folder: Path, *, from_host: bool) -> None:
        """``from_host``: all tensors of the checkpoint are on the CPU."""
        super().__init__(str(folder), sync_files=not is_url(folder))
        if from_host:  # what copies ahead would ask CUDA for device 0, in a thread of any process
            self.per_thread_copy_ahead = 0
        self.folder, files = folder, _use_urls(self, folder)
        self._summed = SummedFiles(files)
        self.fs = cast(FileSystem, self._summed)

    @property
    def sums(self) -> dict[str, Entry]:
        """The sizes and checksums of the files that this process has written, by name."""
        return self._summed.sums

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata under their own name, where DCP would write others and rename them: a
        bucket copies and removes for that, which may not be allowed."""
        content = pickle.dumps(
            dataclasses.replace(
                metadata,
                version=CURRENT_DCP_VERSION,
                storage_data={each.index: each.storage_data for part in results for each in part},
                storage_meta=self.storage_meta(),
            )
        )
        replace_file(self.folder / METADATA, content)
        self.sums[METADATA] = len(content), xxhash.xxh3_128(content).hexdigest()


class FolderReader(dcp.FileSystemReader):
    """Reads what ``FolderWriter`` has written; not safe by itself, see ``SafeReader``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder
        _use_urls(self, folder)


def _use_urls(
    files: dcp.FileSystemReader | dcp.FileSystemWriter, folder: Path
) -> FileSystem | UrlFiles:
    """Let DCP read and write a folder on a URL, if it is one; return what it does so by."""
    if is_url(folder):
        files.fs = UrlFiles()  # type: ignore[assignment]
        files.path = str(folder)
    return files.fs
