"""Encoded images, such as JPEGs: how they are read, and what a source of them consists of.

``data/decode.py`` decodes an image, ``data/transforms.py`` crops and augments it.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from PIL import Image

from data.batch import Batch, Field
from data.config import Preprocessing
from data.decode import OpenImage, Reading, open_image, read_raw
from data.files import HEAD, BrokenImageError, DataFolderError
from data.intensity import Intensity, MeasuredIntensity, RawImage, measure
from data.raw_images import is_plain, is_plain_name
from data.source import DatasetRequest, DataSource, Split, Value, View
from data.transforms import TrainTransform, Transform, seeded, val_transform

SampleTransform = Callable[[OpenImage], Batch]
"""Maps an image to fields of a sample. Raises BrokenImageError."""

# -- what is read of an image ----------------------------------------------------------


class ImageView(View):
    """What is read of each encoded image, and how: the whole image in the model's size. A subclass
    reads something else, such as several crops."""

    def transforms(self, request: DatasetRequest) -> dict[str, SampleTransform]:
        """Return, for each split of the request, how an encoded image becomes the fields of a
        sample, besides ``target`` and ``index``. Raises DataFolderError."""
        return {name: AsImage(each) for name, each in self.image_transforms(request).items()}

    def image_transforms(self, request: DatasetRequest) -> dict[str, Transform]:
        """Return the transform of each split to an image of the request's size. Raises
        DataFolderError."""
        val = val_transform(request.config.preprocessing, request.size, request.channels)
        if not request.with_train:
            return {"val": val}
        train: Transform = val
        if request.augment:
            train = TrainTransform(request.config, request.size, request.channels)
        return {"train": train, "val": val}

    def check_splits(self, splits: Mapping[str, ImageSplit]) -> None:
        """Check what these splits of encoded images hold. Raises DataFolderError."""

    def arrange(
        self, request: DatasetRequest, name: str, splits: Mapping[str, ImageSplit]
    ) -> DataSource:
        """Return the source of these splits. Raises DataFolderError."""
        return DataSource(name, splits)


@dataclass(frozen=True)
class ArrangedView(ImageView):
    """What another view reads, its images in another arrangement, such as sizes or sequences."""

    view: ImageView = field(default_factory=ImageView, kw_only=True)
    """What is read of each image."""

    @property
    def values(self) -> Mapping[str, Value]:
        return self.view.values

    def fields_of(self, values: Mapping[str, Any], draw: Callable[[int], int]) -> Batch:
        return self.view.fields_of(values, draw)

    def check(self, request: DatasetRequest) -> None:
        self.view.check(request)

    def fields(
        self, request: DatasetRequest, image_dtype: torch.dtype, *, is_train: bool
    ) -> dict[str, Field]:
        return self.view.fields(request, image_dtype, is_train=is_train)

    def transforms(self, request: DatasetRequest) -> dict[str, SampleTransform]:
        return self.view.transforms(request)

    def check_splits(self, splits: Mapping[str, ImageSplit]) -> None:
        self.view.check_splits(splits)

    def with_others(self, images: Any, batch: Batch) -> Any:
        return self.view.with_others(images, batch)


def as_image_view(view: View) -> ImageView:
    """Return how encoded images are read: as the view says, or else whole."""
    return view if isinstance(view, ImageView) else ImageView()


def view_of_images(request: DatasetRequest) -> ImageView:
    """Return how the encoded images of a request are read."""
    return as_image_view(request.view)


@dataclass(frozen=True)
class AsImage:
    """The transform to the field ``image``."""

    transform: Transform

    def __call__(self, image: OpenImage) -> Batch:
        return {"image": self.transform(image)}


def reading_of(request: DatasetRequest) -> Reading:
    """Return how the values in encoded images are read. Raises DataFolderError for an impossible
    ``--intensity``."""
    return _reading(request.channels, request.config.intensity)


@functools.cache
def _reading(channels: int, words: str | tuple[str, ...] | None) -> Reading:
    intensity = Intensity.parse(Preprocessing().intensity if words is None else words)
    try:
        intensity.check_bands(channels)
    except ValueError as error:
        raise DataFolderError(f"--intensity: {error}") from None
    return Reading(channels, intensity)


# -- one split: train or val -----------------------------------------------------------


class ImageSplit(Split):
    """One split of images, each read as the bytes of a JPEG, PNG or similar file and then
    decoded."""

    reading_threads = 16  # mostly they wait, if images are far away

    def __init__(
        self,
        request: DatasetRequest,
        name: str,
        transform: SampleTransform,
        labels: Any,
        *others: Any,
    ) -> None:
        """``labels`` and ``others``: see ``Split``."""
        super().__init__(request, name, labels, *others)
        self.transform = transform

    def read(self, number: int, most: int | None = None) -> bytes:
        """Return image ``number`` as stored, encoded; ``most``: number of first bytes that suffice.
        Raises BrokenImageError."""
        raise NotImplementedError

    def open(self, number: int, *, lines: bool = False) -> OpenImage:
        """Return image ``number``, possibly not decoded yet. Raises BrokenImageError, see
        ``open_image``."""
        return open_image(self.read(number), reading_of(self.request), lines=lines)

    def known_sizes(self) -> np.ndarray | None:
        """Return height and width of each image in pixels, (n, 2), int32, if known without reading
        images."""
        return None

    def thumbnail(self, number: int, side: int) -> Image.Image:
        """Return a small picture of the whole stored image; see ``Split.thumbnail``."""
        image = self.open(number, lines=True)
        shrink = next((n for n in image.shrinks if min(image.size) >= n * side), 1)
        picture = Image.fromarray(image.pixels(shrink))
        picture.thumbnail((side, side))
        return picture

    def with_request(self, request: DatasetRequest) -> Self:
        part = copy.copy(self)
        Split.__init__(part, request, self.name, self.labels, self.classes, self.left_out)
        part.transform = view_of_images(request).transforms(request)[self.name]
        return part.with_index() if "index" in self.fields else part

    def load_sample(self, number: int, epoch: int, index: int) -> Batch:
        return seeded(self.transform, self.open(number), self.seed, epoch, index)


class RearrangedSplit(Split):
    """The images of another split in another arrangement, such as sizes or sequences."""

    def __init__(self, request: DatasetRequest, split: ImageSplit) -> None:
        super().__init__(request, split.name, split.labels, split.classes, split.left_out)
        self._split, self.reading_threads = split, split.reading_threads

    def name_of(self, number: int) -> str:
        return self._split.name_of(number)

    def thumbnail(self, number: int, side: int) -> Image.Image:
        return self._split.thumbnail(number, side)

    def value(self, number: int, name: str) -> Any:
        return self._split.value(number, name)

    def digest(self) -> str:
        return self._split.digest()


# -- a source --------------------------------------------------------------------------


def source_of_images(
    request: DatasetRequest, name: str, splits: Mapping[str, ImageSplit]
) -> DataSource:
    """Return the source of these splits, as the request's view arranges them, with the range that
    ``--intensity`` auto chooses. Raises DataFolderError."""
    one, measured = next(iter(splits.values())), MeasuredIntensity()
    if type(one).read is not ImageSplit.read:  # else its images are not encoded
        measured = _measure_intensity(name, one)
    if measured.words:
        request = request.with_data(intensity=measured.words)
        for split in splits.values():
            split.request = split.request.with_data(intensity=measured.words)
    view = view_of_images(request)
    view.check_splits(splits)
    source = view.arrange(request, name, splits)
    source.remark += measured.remark
    return source


_DECODING_THREADS = 4
"""How many large images may be in memory at once."""


def _measure_intensity(name: str, split: ImageSplit) -> MeasuredIntensity:
    """Look at a sample of the images: what ``--intensity`` auto is, and how much is left of them.
    Raises DataFolderError if nothing is, or if none has as many bands as the model takes."""
    reading = reading_of(split.request)
    intensity = reading.intensity
    is_undecided = intensity.kind == "auto" and not intensity.numbers
    if not (is_undecided or split.is_train):
        return MeasuredIntensity()

    if intensity.kind == "full":  # whose images Pillow converts to bytes
        reading = replace(reading, intensity=Intensity("range", (0, 1)))

    bands = Counter[int]()

    def read_one(number: int) -> RawImage | None:
        try:
            if reading.is_color and (
                is_plain_name(split.name_of(number)) or is_plain(split.read(number, HEAD))
            ):
                return None
            raw = read_raw(split.read(number), reading)
        except BrokenImageError:  # training and evaluation report it when they read it
            return None
        if raw is not None:
            bands[raw.values.shape[2]] += 1
        is_bytes = raw and raw.values.dtype == np.uint8 and not raw.window
        return None if raw is None or is_bytes else raw.sample()

    def read(numbers: list[int]) -> list[RawImage]:
        with ThreadPoolExecutor(min(split.reading_threads, _DECODING_THREADS)) as pool:
            return [raw for raw in pool.map(read_one, numbers) if raw is not None]

    try:
        measured = measure(len(split), split.seed, intensity, read)
    except ValueError as error:
        raise DataFolderError(f"{name}: {error}") from None
    if bands and not reading.is_color and reading.channels not in bands:
        has = " or ".join(str(count) for count in sorted(bands))
        of_them = "band" if has == "1" else "bands"
        raise DataFolderError(
            f"--in_chans {reading.channels}: images of {name} have {has} {of_them}"
        )
    return measured
