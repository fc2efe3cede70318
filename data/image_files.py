"""Single image files and folders of them, read one after the other: what a model is used on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, default_loader

from data.image_folder import DataFolderError


def find_images(paths: Iterable[str]) -> list[Path]:
    """The files named, and the images anywhere below the folders named, sorted in each.

    Looks at each file's header. Raises DataFolderError for one that is missing or no
    image, and for a folder without images.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        inside = [p for p in path.rglob("*") if p.suffix.lower() in IMG_EXTENSIONS and p.is_file()]
        if not inside:
            raise DataFolderError(f"{path} holds no images ({', '.join(IMG_EXTENSIONS)})")
        found += sorted(inside)
    for path in found:
        if not path.exists():
            raise DataFolderError(f"{path}: there is no such file or folder")
        with _reading(path):
            Image.open(path).close()
    return found


def read_batches(
    paths: list[Path], transform: Callable, batch_size: int
) -> Iterator[tuple[list[Path], torch.Tensor]]:
    """Up to ``batch_size`` paths and their images, transformed, (count, channels, size, size).

    Raises DataFolderError at an image that cannot be decoded.
    """
    for first in range(0, len(paths), batch_size):
        part = paths[first : first + batch_size]
        images = []
        for path in part:
            with _reading(path):
                images.append(transform(default_loader(str(path))))
        yield part, torch.stack(images)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Pillow has no error of its own for a broken file: formats raise what they like."""
    try:
        yield
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataFolderError(f"{path} is not a readable image: {error}") from error
