"""Reads single image files and folders of them, one after the other: what a model is used on."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from data.errors import BrokenImageError, DataFolderError
from data.image.decode import extensions, open_image
from data.storage import read_bytes


@dataclass
class FoundImages:
    """Lists the files to look at, in order, and what was passed over on the way to them."""

    paths: list[Path] = field(default_factory=list)
    named: set[Path] = field(default_factory=set)
    """The files that were named one by one."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """How many files were passed over because they are no images, by extension."""
    unreadable: list[str] = field(default_factory=list)
    """The folders that could not be looked into, each with the reason."""


def find_images(paths: Iterable[str]) -> FoundImages:
    """Find the files named, and the images anywhere below the folders named, sorted in each.

    Links to folders are not followed: one may lead anywhere, and round in circles. Raises
    DataFolderError for a path that is not there, and for a folder without images.
    """
    found = FoundImages()
    for path in paths:
        try:
            os.stat(path)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            reason = "there is no such file or folder" if missing else error.strerror
            raise DataFolderError(f"{path or repr(path)}: {reason}") from None
        if os.path.isdir(path):
            _look_into(path, found)
        else:
            found.paths.append(Path(path))
            found.named.add(Path(path))
    return found


def _look_into(top: str, found: FoundImages) -> None:
    inside = []

    def note(error: OSError) -> None:
        found.unreadable.append(f"{error.filename}: {error.strerror}")

    for folder, folders, files in os.walk(top, onerror=note):
        links = sum(os.path.islink(os.path.join(folder, name)) for name in folders)
        if links:
            found.passed_over["linked folder"] += links
        for name in files:
            suffix = os.path.splitext(name)[1].lower()
            path = Path(folder, name)
            if suffix not in extensions():
                found.passed_over[suffix or "no extension"] += 1
            elif path.is_symlink() or path.is_file():  # a link is looked at when it is read
                inside.append(path)
            else:
                found.passed_over["no file"] += 1
    if not inside:
        why = found.unreadable[0] if found.unreadable else ".jpg, .png, or what else Pillow reads"
        raise DataFolderError(f"{top} holds no images ({why})")
    found.paths += sorted(inside)


def read_batches(
    paths: list[Path], transform: Callable, batch_size: int, broken: Callable[[Path, str], None]
) -> Iterator[tuple[list[Path], torch.Tensor]]:
    """Yield up to ``batch_size`` paths and their images, as (count, channels, size, size).

    ``broken`` is told the path and the reason of an image that cannot be read; it is left out.
    """
    for first in range(0, len(paths), batch_size):
        good, images = [], []
        for path in paths[first : first + batch_size]:
            try:
                images.append(transform(open_image(read_bytes(os.fspath(path)))))
                good.append(path)
            except BrokenImageError as error:
                broken(path, str(error))
        if good:
            yield good, torch.stack(images)
