"""Digits of which some classes are rare: the first images of each class."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.support.cli import ALL_DIGITS

SIZES = (96, 48, 24, 24, 12, 12, 8, 6, 4, 3)
"""The number of training images of each class that tests use."""


def thin_out(folder: Path, sizes: Sequence[int] = SIZES, val: int = 9) -> Path:
    """Copy digits to ``folder``: of each class so many training images, and ``val`` others."""
    for split, counts in (("train", sizes), ("val", [val] * len(sizes))):
        for label, count in enumerate(counts):
            to = folder / split / str(label)
            to.mkdir(parents=True)
            images = sorted((ALL_DIGITS / split / str(label)).iterdir())[:count]
            assert len(images) == count, (split, label)
            for image in images:
                shutil.copy(image, to)
    return folder
