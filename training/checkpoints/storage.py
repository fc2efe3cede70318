"""Lets PyTorch's DCP write and read checkpoints, in local folders and on URLs alike."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase

from training.url_path import UrlPath, folder_at, is_url

Name = str | os.PathLike
"""What DCP calls a file: on URLs a text, as it keeps the folder's name in the metadata."""
Entry = tuple[int, str]
"""A file's size in bytes and its checksum, XXH3 of 128 bits in hexadecimal digits."""


class UrlFiles(FileSystemBase):
    """Gives DCP the files of a URL."""

    @contextlib.contextmanager
    def create_stream(self, path: Name, mode: str) -> Iterator[io.IOBase]:
        with _at(path).open(mode) as stream:
            yield cast(io.IOBase, stream)

    def concat_path(self, path: Name, suffix: str) -> Name:
        return str(_at(path) / suffix)

    def rename(self, path: Name, new_path: Name) -> None:
        _at(path).copy(_at(new_path))
        _at(path).unlink()

    def init_path(self, path: Name) -> Name:
        return path

    def mkdir(self, path: Name) -> None:
        _at(path).mkdir()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Name) -> bool:
        return is_url(folder_at(str(checkpoint_id)))

    def exists(self, path: Name) -> bool:
        return _at(path).exists()

    def rm_file(self, path: Name) -> None:
        _at(path).unlink()


def _at(path: Name) -> UrlPath:
    return UrlPath(str(path))


class SummedFiles:
    """Gives DCP the files of another file system, and sums up what is written to them meanwhile."""

    def __init__(self, files: FileSystemBase) -> None:
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


def writer(folder: Path, *, from_host: bool) -> dcp.FileSystemWriter:
    """Return what DCP writes a checkpoint to, its ``fs`` being ``SummedFiles``.

    ``from_host``: all its tensors are on the CPU.
    """
    made = dcp.FileSystemWriter(str(folder), sync_files=not is_url(folder))
    if from_host:  # what copies ahead would ask CUDA for device 0, in a thread of any process
        made.per_thread_copy_ahead = 0
    _on_urls(made, folder)
    made.fs = cast(FileSystem, SummedFiles(made.fs))
    return made


class FolderReader(dcp.FileSystemReader):
    """Reads what ``writer`` has written; not safe by itself, see ``SafeReader``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder
        _on_urls(self, folder)


def _on_urls(files: dcp.FileSystemReader | dcp.FileSystemWriter, folder: Path) -> None:
    if is_url(folder):
        files.fs = UrlFiles()  # type: ignore[assignment]
        files.path = str(folder)
