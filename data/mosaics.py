"""The source of mosaics of handwritten digits: real images of any size, no download.

A mosaic is a grid of cells of 8 x 8 pixels, each with one digit (``data/digits.py``). Its label is
the digit that occurs most often, which only the whole image shows: a model that sees a part of the
rows cannot be right (docs/domain_parallelism.md has figures).

The cells of a volume are 8 slices deep: each digit is in all of them, in some darker than in
others. Mosaics are not augmented.
"""

import math

import numpy as np
import torch
import xxhash

from data.digits import CLASSES, SIZE, read_digits
from data.files import DataFolderError
from data.source import DatasetRequest, DataSource, Split

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
            f"mosaics are made of digits of {SIZE} x {SIZE} pixels, and the model takes "
            f"{' x '.join(map(str, request.size))}: use an --image_size that is a multiple of "
            f"{SIZE}"
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

    def make(self, number: int, epoch: int, index: int) -> torch.Tensor:
        """Return this part's rows of a mosaic, normalised. Its cells are divided into bands of the
        same length. Each of the nine other digits is missing in one band, each band misses others,
        and elsewhere it occurs as often as the label, as far as there is room: so only over the
        whole mosaic the label occurs about a third more often than any other digit."""
        first, end = self.rows.start // SIZE, math.ceil(self.rows.stop / SIZE)
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
        images = np.concatenate(bands).reshape(end - first, *self._grid[1:])

        # (rows of cells, ..., columns of cells, 8, 8) to (rows of cells, ..., height, width)
        pixels = np.moveaxis(self._pixels[images], -2, -3)
        *between, rows, height, columns, width = pixels.shape
        pixels = pixels.reshape(*between, rows * height, columns * width)
        if between:
            slices = pixels[:, None] * INTENSITIES.astype(np.float32)[:, None, None]
            pixels = slices.reshape(-1, *pixels.shape[1:])
        pixels = pixels[self.rows.start - first * SIZE : self.rows.stop - first * SIZE]
        by_channel = (-1, *[1] * len(self._grid))
        mean, std = (torch.tensor(values).reshape(by_channel) for values in self._mean_and_std)
        return (torch.from_numpy(pixels).expand(self.shape) - mean) / std
