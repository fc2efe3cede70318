"""The source of mosaics of handwritten digits: real images of any size, no download.

A mosaic's cells hold one digit of 8 x 8 pixels each (``data/digits.py``). Its label is the digit
that occurs most often, which only the whole image tells. The cells, from the first row to the
last, are four bands of one length; of the nine other digits, each is missing in one band, another
one for each, and occurs in the other three as often as the label does, as far as there is room.
So the label occurs in the whole about a third more often than any other digit, and who counts
without a mistake is always right. Within a band six or seven others are about as frequent.

Who counts one of four equal parts of the rows without a mistake, and guesses among the most
frequent digits, is right in 14 % of the mosaics of 64 x 64 to 512 x 512 pixels (512 of each were
counted; 10 % is chance). Two parts give 19 to 22 %, three 33 to 40 %; a quarter that is none of
these parts, but begins anywhere, 16 to 19 %. In 32 x 32 pixels, 16 digits, a quarter gives 25 %.

A volume's cells are 8 slices deep: each digit stands in all of them, in some darker than in others.
Mosaics are not augmented.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from data.digits import CLASSES, SIZE, check_classes, read_digits
from data.files import DataFolderError
from data.loader import PADDING, Sample
from data.source import SplitSource, Wanted

LENGTHS = {"train": 4096, "val": 512}
"""How many mosaics there are for training, and how many for validation."""
BANDS = 4
INTENSITIES = 1 - 0.05 * np.abs(np.arange(SIZE) - (SIZE - 1) / 2)
"""How bright a volume's digits are in each slice of a cell: most in the middle ones."""


def open_mosaics(wanted: Wanted) -> SplitSource:
    """Return the mosaics as a ``DataSource``.

    Raises DataFolderError for a model of fewer classes, or whose size is not made of cells.
    """
    check_classes(wanted)
    if any(side % SIZE for side in wanted.size):
        raise DataFolderError(
            f"mosaics are made of digits of {SIZE} x {SIZE} pixels, and the model takes "
            f"{' x '.join(map(str, wanted.size))}: use an --image_size that is a multiple of {SIZE}"
        )
    train = MosaicsSplit(wanted, "train") if wanted.with_train else None
    return SplitSource(
        wanted, "mosaics of digits", train, MosaicsSplit(wanted, "val"), list(CLASSES)
    )


class MosaicsSplit(Dataset):
    """Composes one split's mosaics of that split's digits: by (epoch, index), alike in all epochs.

    The seed, the split and the index alone decide what is in a mosaic.
    """

    dtype = torch.float32
    reads_rows = True

    def __init__(self, wanted: Wanted, split: str) -> None:
        found = [(digit, pixels) for part, digit, _, pixels in read_digits() if part == split]
        # Digit by digit, as they are read: so a digit's images are next to each other.
        self._pixels = np.stack([pixels for _, pixels in found]).astype(np.float32) / 255
        self._counts = np.bincount([digit for digit, _ in found])
        self._firsts = np.cumsum(self._counts) - self._counts
        self._split, self._seed = split, wanted.seed
        self._channels, self._size = wanted.channels, wanted.size
        self._grid = tuple(side // SIZE for side in wanted.size)
        self._colours = wanted.config.preprocessing.of_channels(wanted.channels)
        self._rows = range(wanted.size[0])

    def __len__(self) -> int:
        return LENGTHS[self._split]

    @property
    def labels(self) -> list[int]:
        return [label_of(index) for index in range(len(self))]

    def of_rows(self, rows: range) -> Dataset:
        part = copy.copy(self)
        part._rows = rows
        return part

    def digest(self) -> str:
        told = f"{self._seed} {self._split} {len(self)} {self._size}".encode()
        return xxhash.xxh3_64(told + self._pixels.tobytes()).hexdigest()

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        _, index = key
        shape = (self._channels, len(self._rows), *self._size[1:])
        if index == PADDING:
            return torch.zeros(shape), PADDING, []
        image = torch.from_numpy(self._compose(index)).expand(shape)
        mean, std = (
            torch.tensor(values).reshape(-1, *[1] * len(self._size)) for values in self._colours
        )
        return (image - mean) / std, label_of(index), []

    def _compose(self, index: int) -> np.ndarray:
        """Return the pixels, from 0 to 1, of this part's rows of a mosaic."""
        first, end = self._rows.start // SIZE, math.ceil(self._rows.stop / SIZE)
        cells = self._cells(index, first, end)
        # (rows of cells, ..., columns of cells, 8, 8) to (rows of cells, ..., height, width)
        pixels = np.moveaxis(self._pixels[cells], -2, -3)
        *others, rows, height, columns, width = pixels.shape
        pixels = pixels.reshape(*others, rows * height, columns * width)
        if others:
            slices = pixels[:, None] * INTENSITIES.astype(np.float32)[:, None, None]
            pixels = slices.reshape(-1, *pixels.shape[1:])
        return pixels[self._rows.start - first * SIZE : self._rows.stop - first * SIZE]

    def _cells(self, index: int, first: int, end: int) -> np.ndarray:
        """Return which of the split's digits are in the rows of cells from ``first`` to ``end``."""
        a_row, wanted = math.prod(self._grid[1:]), []
        seeds = (self._seed, list(LENGTHS).index(self._split), index)
        bands = band_digits(math.prod(self._grid), label_of(index), np.random.default_rng(seeds))
        start = 0
        for number, (length, digits) in enumerate(bands):
            keep = slice(max(first * a_row - start, 0), max(end * a_row - start, 0))
            start += length
            if keep.start >= length or keep.stop == 0:
                continue
            # Each band has random numbers of its own: those of other bands need not be drawn.
            random = np.random.default_rng((*seeds, 1 + number))
            cells = random.permutation(in_cells(length, digits))[keep]
            places = random.random(length)[keep]
            wanted.append(self._firsts[cells] + (places * self._counts[cells]).astype(np.int64))
        return np.concatenate(wanted).reshape(end - first, *self._grid[1:])


def label_of(index: int) -> int:
    """Return the digit that occurs most often in the mosaic numbered ``index``."""
    return index % len(CLASSES)


def band_digits(cells: int, label: int, random: np.random.Generator) -> list[tuple[int, list[int]]]:
    """Return the length of each band of so many ``cells``, and the digits that occur in it.

    The label is the first of them. Each other digit is missing in one band.
    """
    others = random.permutation([digit for digit in range(len(CLASSES)) if digit != label])
    count = min(BANDS, cells)
    ends = [cells * band // count for band in range(count + 1)]
    found = []
    for band in range(count):
        missing = others[band::count]
        present = random.permutation([digit for digit in others if digit not in missing])
        found.append((ends[band + 1] - ends[band], [label, *present.tolist()]))
    return found


def in_cells(length: int, digits: list[int]) -> np.ndarray:
    """Return a digit for each of a band's cells: as often as the first one, none is more often."""
    return np.repeat(digits, math.ceil(length / len(digits)))[:length]
