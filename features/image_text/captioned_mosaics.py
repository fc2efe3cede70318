"""The source ``--data_source captioned_mosaics``: a few handwritten digits on a grid of 3 x 3, and
captions that say how many there are, or where.

    a seven above a three            a three below a seven
    two sevens and a one             a one and two sevens
    an eight at the bottom right     four sixes

Some combinations of digits, counts and places are for validation, one image of each: none of their
captions is in a training image, and the digits are written by other hands. So a model must have
learned what the parts of a caption mean. Most of them share their words with another one, such as
"a three above a seven", that is for validation, too: what tells the two apart is word order. The
digits are scikit-learn's (``data/digits.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from data.decode import Pixels
from data.digits import SIZE, read_digits
from data.files import DataFolderError
from data.images import ImageSplit, SampleTransform, source_of_images, view_of_images
from data.source import DatasetRequest, DataSource

TRAIN_LENGTH = 16_384
GRID = 3
"""Cells along each side."""
DIGITS = range(10)
_NAMES = "zero one two three four five six seven eight nine".split()
_PLURALS = "zeros ones twos threes fours fives sixes sevens eights nines".split()
_ROWS, _COLUMNS = ("top", "", "bottom"), ("left", "", "right")

Digits = Mapping[tuple[int, int], int]
"""The digits by row and column of their cell."""


class Scene(NamedTuple):
    """A combination of digits, counts or places."""

    captions: Sequence[str]
    """What can be said of it; the first is the one of validation."""
    draw: Callable[[np.random.Generator], Digits]


def open_captioned(request: DatasetRequest) -> DataSource:
    """Return the source. Raises DataFolderError for a model of volumes, or with classes."""
    if len(request.size) != 2:
        raise DataFolderError("--data_source captioned_mosaics requires a 2-D model")
    if request.labels:
        raise DataFolderError(
            "--data_source captioned_mosaics has captions, and no classes: use --objective siglip "
            "or clip"
        )
    splits = {
        name: CaptionedSplit(request, name, transform, scenes_of(name))
        for name, transform in view_of_images(request).transforms(request).items()
    }
    return source_of_images(request, "mosaics of digits with captions", splits)


class CaptionedSplit(ImageSplit):
    """The mosaics of one split, the same in all epochs: the seed, the split and the number decide
    what is in one."""

    def __init__(
        self,
        request: DatasetRequest,
        name: str,
        transform: SampleTransform,
        scenes: Sequence[Scene],
    ) -> None:
        length = TRAIN_LENGTH if name == "train" else len(scenes)
        super().__init__(request, name, transform, np.zeros(length, np.int64))
        self._scenes, self._pixels = scenes, [list[np.ndarray]() for _ in DIGITS]
        for split, digit, _, pixels in read_digits():
            if split == name:
                self._pixels[digit].append(pixels)

    def open(self, number: int, *, lines: bool = False) -> Pixels:
        seeds = (self.seed, self.name == "train", number)
        random = np.random.default_rng(seeds)
        pixels = np.zeros((GRID * SIZE, GRID * SIZE), np.uint8)
        for (row, column), digit in self._scenes[number % len(self._scenes)].draw(random).items():
            drawn = self._pixels[digit][int(random.integers(len(self._pixels[digit])))]
            pixels[row * SIZE : (row + 1) * SIZE, column * SIZE : (column + 1) * SIZE] = drawn
        return Pixels(np.repeat(pixels[:, :, None], 3, axis=2))

    def value(self, number: int, name: str) -> list[str]:
        return [*self._scenes[number % len(self._scenes)].captions]

    def name_of(self, number: int) -> str:
        return f"{self.name} mosaic {number}"

    def digest(self) -> str:
        described = f"{self.seed} {self.name} {len(self)}".encode()
        return xxhash.xxh3_64_hexdigest(described)


def scenes_of(split: str) -> list[Scene]:
    """Return the combinations of a split. Those with the same words are in the same split. For
    validation are, of each kind, a quarter of the combinations that share their words with another
    one, and a twentieth of those that do not."""
    random, chosen = np.random.default_rng(0), list[Scene]()
    for scenes in (beside(), placed(), counted(), counted_both()):
        alike = same_words(scenes)
        for shares_words, part in ((True, 4), (False, 20)):
            sets = [each for each in alike if (len(each) > 1) == shares_words]
            order = random.permutation(len(sets))
            of_val = len(sets) // part
            numbers = order[of_val:] if split == "train" else order[:of_val]
            chosen += [scene for number in sorted(numbers) for scene in sets[number]]
    return chosen


def same_words(scenes: Sequence[Scene]) -> list[list[Scene]]:
    """Return the sets of combinations whose first captions have the same words."""
    sets: dict[tuple[str, ...], list[Scene]] = {}
    for scene in scenes:
        sets.setdefault(words_of(scene.captions[0]), []).append(scene)
    return [*sets.values()]


def words_of(caption: str) -> tuple[str, ...]:
    """Return the words of a caption in alphabetical order."""
    return tuple(sorted(caption.split()))


# -- the four kinds of combinations ------------------------------------------------------


def one(digit: int) -> str:
    """Return the words for a digit."""
    return f"{'an' if digit == 8 else 'a'} {_NAMES[digit]}"


def several(count: int, digit: int) -> str:
    """Return the words for so many of a digit."""
    return one(digit) if count == 1 else f"{_NAMES[count]} {_PLURALS[digit]}"


def beside() -> list[Scene]:
    """Return two different digits, one of them above the other or to its left."""

    def scene(first: int, second: int, is_above: bool) -> Scene:
        def draw(random: np.random.Generator) -> Digits:
            line, (low, high) = int(random.integers(GRID)), _two(random)
            if is_above:
                return {(low, line): first, (high, line): second}
            return {(line, low): first, (line, high): second}

        words = ("above", "below") if is_above else ("to the left of", "to the right of")
        short = ("over", "under") if is_above else ("left of", "right of")
        captions = [
            f"{one(this)} {by[n]} {one(other)}"
            for by in (words, short)
            for n, (this, other) in enumerate([(first, second), (second, first)])
        ]
        return Scene(captions, draw)

    pairs = itertools.permutations(DIGITS, 2)
    return [scene(*pair, is_above) for pair in pairs for is_above in (True, False)]


def placed() -> list[Scene]:
    """Return a single digit in one of the cells."""

    def scene(digit: int, row: int, column: int) -> Scene:
        where = " ".join(filter(None, (_ROWS[row], _COLUMNS[column]))) or "center"
        captions = [
            f"{one(digit)} at the {where}",
            f"at the {where} {one(digit)}",
            f"one {_NAMES[digit]}, {where}",
        ]
        return Scene(captions, lambda random: {(row, column): digit})

    return [scene(*each) for each in itertools.product(DIGITS, range(GRID), range(GRID))]


def counted() -> list[Scene]:
    """Return two to five of a digit anywhere."""

    def scene(count: int, digit: int) -> Scene:
        words = several(count, digit)
        captions = [words, f"there are {words}", f"exactly {words}"]
        return Scene(captions, lambda random: _anywhere(random, [digit] * count))

    return [scene(*each) for each in itertools.product(range(2, 6), DIGITS)]


def counted_both() -> list[Scene]:
    """Return one to three of each of two digits anywhere, but not one of each."""

    def scene(counts: tuple[int, int], digits: tuple[int, int]) -> Scene:
        first, second = map(several, counts, digits)
        captions = [f"{first} and {second}", f"{second} and {first}", f"{first} with {second}"]
        there = [digit for count, digit in zip(counts, digits, strict=True) for _ in range(count)]
        return Scene(captions, lambda random: _anywhere(random, there))

    upto = range(1, 4)
    counts = [each for each in itertools.product(upto, upto) if each != (1, 1)]
    pairs = itertools.combinations(DIGITS, 2)
    return [scene(*each) for each in itertools.product(counts, pairs)]


def _two(random: np.random.Generator) -> tuple[int, int]:
    """Return two different numbers of rows or columns, in order."""
    low, high = sorted(random.choice(GRID, 2, replace=False).tolist())
    return low, high


def _anywhere(random: np.random.Generator, digits: Sequence[int]) -> Digits:
    cells = random.choice(GRID * GRID, len(digits), replace=False).tolist()
    return {divmod(cell, GRID): digit for cell, digit in zip(cells, digits, strict=True)}
