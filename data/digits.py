"""The source of scikit-learn's bundled handwritten digits: real images, no download.

1,797 grey 8x8 images of the UCI Optical Recognition of Handwritten Digits set
(E. Alpaydin, C. Kaynak, 1998), shipped inside scikit-learn: four fifths for training, one fifth
for validation. As a source in memory (``--data_source digits``), or written as an image folder:

    python -m data.digits datasets/digits
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import xxhash
from PIL import Image

from data.decode import Pixels
from data.files import DataFolderError
from data.loader import PADDING, Sample
from data.source import SplitSource, Wanted, WholeImages
from data.transforms import Transform, seeded, transforms_of

SIZE = 8
MAX_VALUE = 16  # scikit-learn's grey levels run from 0 to 16
CLASSES = [str(digit) for digit in range(10)]


class DigitsSplit(WholeImages):
    """Holds a split of grey images in memory: a dataset of ``Sample`` by (epoch, image index)."""

    dtype = torch.uint8

    def __init__(
        self, found: Sequence[tuple[int, np.ndarray]], transform: Transform, seed: int
    ) -> None:
        """Take labels and pixels, (height, width) uint8, of all images."""
        self._pixels = [pixels for _, pixels in found]
        self.labels = [label for label, _ in found]
        self._transform, self._seed = transform, seed

    def __len__(self) -> int:
        return len(self._pixels)

    def digest(self) -> str:
        return xxhash.xxh3_64(b"".join(each.tobytes() for each in self._pixels)).hexdigest()

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        pixels = self._pixels[max(index, 0)]
        image = Pixels(np.repeat(pixels[:, :, None], 3, axis=2))
        tensor = seeded(self._transform, image, self._seed, epoch, max(index, 0))
        if index == PADDING:
            return torch.zeros_like(tensor), PADDING, []
        return tensor, self.labels[index], []


def open_digits(wanted: Wanted) -> SplitSource:
    """Return the digits as a ``DataSource``.

    Raises DataFolderError for a model of fewer classes.
    """
    check_classes(wanted)
    augment, plain = transforms_of(wanted)
    found: dict[str, list[tuple[int, np.ndarray]]] = {"train": [], "val": []}
    for split, digit, _, pixels in read_digits():
        found[split].append((digit, pixels))
    train = DigitsSplit(found["train"], augment, wanted.seed) if wanted.with_train else None
    val = DigitsSplit(found["val"], plain, wanted.seed)
    return SplitSource(wanted, "handwritten digits", train, val, CLASSES)


def check_classes(wanted: Wanted) -> None:
    """Raises DataFolderError for a model that has fewer classes than there are digits."""
    if wanted.num_classes < len(CLASSES):
        raise DataFolderError(
            f"the digits have 10 classes, more than --num_classes {wanted.num_classes}"
        )


def read_digits() -> Iterator[tuple[str, int, int, np.ndarray]]:
    """Yield (split, digit, number, pixels) of each image, in the order of an image folder's names.

    Each class is split by a fixed shuffle. Pixels are (8, 8), uint8.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataFolderError(
            "the digits need the package scikit-learn: python3 -m pip install scikit-learn"
        ) from None
    digits = load_digits()
    pixels = np.round(digits.images * (255 / MAX_VALUE)).astype(np.uint8)
    rng = np.random.default_rng(0)
    for digit in range(10):
        members = rng.permutation(np.flatnonzero(digits.target == digit))
        val_count = round(len(members) / 5)
        for split, indices in (("val", members[:val_count]), ("train", members[val_count:])):
            for index in sorted(indices):
                yield split, digit, int(index), pixels[index]


def write_digits(root: str | os.PathLike[str]) -> Path:
    """Write the digits as an image folder below ``root`` unless it is there; return its path.

    Written to a neighbouring name first and renamed, so that an interrupted run leaves no
    half-filled tree.
    """
    root = Path(root)
    if root.is_dir():
        return root
    partial = root.with_name(root.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    for split, digit, number, pixels in read_digits():
        folder = partial / split / str(digit)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number:04d}.png")
    partial.rename(root)
    return root


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the digits image folder.")
    parser.add_argument("root", nargs="?", default="datasets/digits", help="where to write")
    try:
        print(f"digits: {write_digits(parser.parse_args().root)}")
    except OSError as error:
        parser.exit(2, f"{parser.prog}: error: {error.filename}: {error.strerror}\n")


if __name__ == "__main__":
    main()
