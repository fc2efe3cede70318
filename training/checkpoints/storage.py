"""Lets PyTorch's DCP write and read checkpoints, in local folders and on URLs alike."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemBase

from training.url_path import UrlPath, folder_at, is_url

Name = str | os.PathLike
"""What DCP calls a file: on URLs a text, as it keeps the folder's name in the metadata."""


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


def writer(folder: Path, *, from_host: bool) -> dcp.FileSystemWriter:
    """Return what DCP writes a checkpoint to. ``from_host``: all its tensors are on the CPU."""
    made = dcp.FileSystemWriter(str(folder), sync_files=not is_url(folder))
    if from_host:  # what copies ahead would ask CUDA for device 0, in a thread of any process
        made.per_thread_copy_ahead = 0
    return cast(dcp.FileSystemWriter, _on_urls(made, folder))


class FolderReader(dcp.FileSystemReader):
    """Reads what ``writer`` has written; not safe by itself, see ``SafeReader``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder
        _on_urls(self, folder)


def _on_urls(files: dcp.FileSystemReader | dcp.FileSystemWriter, folder: Path) -> object:
    if is_url(folder):
        files.fs = UrlFiles()  # type: ignore[assignment]
        files.path = str(folder)
    return files
