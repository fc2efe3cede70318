"""The source of scikit-learn's handwritten digits: real images, no download.

1,797 grey 8x8 images of the UCI Optical Recognition of Handwritten Digits set (E. Alpaydin, C.
Kaynak, 1998), shipped inside scikit-learn: four fifths for training, one fifth for validation. As
a source in memory (``--data_source digits``), or written as an image folder:

    python -m data.digits datasets/digits
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
import xxhash
from PIL import Image

from data.decode import Pixels
from data.files import DataFolderError
from data.source import DatasetRequest, DataSource, SampleSplit
from data.transforms import Transform, seeded, transforms_of

SIZE = 8
MAX_VALUE = 16  # scikit-learn's grey levels run from 0 to 16
CLASSES = [str(digit) for digit in range(10)]

SplitDigit = tuple[str, int, int, np.ndarray]
"""A digit's split, class, number in the data set, and pixels: (height, width), uint8."""


def open_digits(request: DatasetRequest) -> DataSource:
    """Return the digits as a ``DataSource``. Raises DataFolderError if the model has fewer classes
    than ten."""
    check_classes(request)
    return digits_source(request, "handwritten digits", read_digits())


def digits_source(request: DatasetRequest, name: str, digits: Iterable[SplitDigit]) -> DataSource:
    """Return a source of digits that are in memory."""
    augment, plain = transforms_of(request)
    found: dict[str, list[tuple[int, np.ndarray]]] = {"train": [], "val": []}
    for split, digit, _, pixels in digits:
        found[split].append((digit, pixels))
    train = DigitsSplit(request, found["train"], augment) if request.with_train else None
    return DataSource(request, name, train, DigitsSplit(request, found["val"], plain), CLASSES)


def check_classes(request: DatasetRequest) -> None:
    """Raises DataFolderError if the model has fewer classes than there are digits."""
    if request.num_classes < len(CLASSES):
        raise DataFolderError(
            f"the digits have 10 classes, more than --num_classes {request.num_classes}"
        )


class DigitsSplit(SampleSplit):
    """One split of grey images in memory: a dataset by (epoch, image index)."""

    def __init__(
        self,
        request: DatasetRequest,
        found: list[tuple[int, np.ndarray]],
        transform: Transform,
    ) -> None:
        """``found``: the label and the pixels, (height, width) uint8, of each image."""
        super().__init__(request, [label for label, _ in found], substitutes=False)
        self._pixels = [pixels for _, pixels in found]
        self._transform = transform

    def name_of(self, number: int) -> str:
        return f"digit {number}"

    def make(self, number: int, epoch: int, index: int) -> torch.Tensor:
        image = Pixels(np.repeat(self._pixels[number][:, :, None], 3, axis=2))
        return seeded(self._transform, image, self.seed, epoch, index)

    def digest(self) -> str:
        return xxhash.xxh3_64(b"".join(each.tobytes() for each in self._pixels)).hexdigest()


def read_digits() -> Iterator[SplitDigit]:
    """Yield each image, (8, 8), in the order of an image folder's names, see ``split_digits``.

    Raises DataFolderError without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataFolderError(
            "the digits need the package scikit-learn: python3 -m pip install scikit-learn"
        ) from None
    digits = load_digits()
    pixels = np.round(digits.images * (255 / MAX_VALUE)).astype(np.uint8)
    return split_digits(pixels, digits.target)


def split_digits(pixels: np.ndarray, labels: np.ndarray) -> Iterator[SplitDigit]:
    """Divide the images of each class by a fixed shuffle: one fifth is for validation."""
    rng = np.random.default_rng(0)
    for digit in range(len(CLASSES)):
        members = rng.permutation(np.flatnonzero(labels == digit))
        val_count = round(len(members) / 5)
        for split, indices in (("val", members[:val_count]), ("train", members[val_count:])):
            for index in sorted(indices):
                yield split, digit, int(index), pixels[index]


def write_digits(root: str | os.PathLike[str]) -> Path:
    """Write the digits as an image folder below ``root`` unless it exists; return its path.

    They are written under another name first and renamed, so that an interrupted run leaves no
    half-filled folder.
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
    parser = argparse.ArgumentParser(description="Write the digits as an image folder.")
    parser.add_argument(
        "root", nargs="?", default="datasets/digits", help="folder to write (default: %(default)s)"
    )
    try:
        print(f"digits: {write_digits(parser.parse_args().root)}")
    except OSError as error:
        parser.exit(2, f"{parser.prog}: error: {error.filename}: {error.strerror}\n")


if __name__ == "__main__":
    main()
