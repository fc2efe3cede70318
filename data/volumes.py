"""The source of arrays in files, volumes above all: each process reads its rows of them only.

They lie in ``<root>/train/<class>/*`` and ``<root>/val/<class>/*``, or a table says which they are
(``--labels``). An array is cut to the model's size, never resized: for training anywhere, else in
the middle. ``data/index/array_files.py`` knows the formats.
"""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from data.errors import BrokenImageError, DataFolderError
from data.image.transforms import seeded
from data.index.array_files import SUFFIXES, ArrayFile, Window, check_packages, open_array
from data.index.folder_index import FolderIndex, check_folder
from data.index.kept_folder import kept_split
from data.index.label_file import read_labels
from data.loading.sample_split import SampleSplit
from data.source import SplitSource, Wanted
from data.storage import is_url


def open_volumes(wanted: Wanted) -> SplitSource:
    """Find the files of the splits that are wanted.

    Raises DataFolderError for a folder or table that cannot be used, and for a missing package.
    """
    config, splits = wanted.config, ("train", "val") if wanted.with_train else ("val",)
    if is_url(config.data_dir):
        raise DataFolderError(
            f"--data_dir {config.data_dir}: --data_source volumes reads parts of files, which have "
            "to be on a disk of this host"
        )
    if config.labels is None:
        check_folder(config.data_dir, wanted.num_classes, splits, SUFFIXES)
        found = [kept_split(config, split, SUFFIXES) for split in splits]
    else:
        found = read_labels(config.labels, config.data_dir, wanted.num_classes, splits)
    for index in found:
        check_packages(index.paths)
    *train, val = [VolumesSplit(wanted, *each) for each in zip(splits, found, strict=True)]
    left_out = sum((index.left_out for index in found), Counter[str]())
    name = config.labels or config.data_dir
    return SplitSource(wanted, name, train[0] if train else None, val, found[-1].classes, left_out)


class VolumesSplit(SampleSplit):
    """One split (train or val) of files of arrays: a dataset by (epoch, index)."""

    reads_rows = True
    dtype = torch.float32

    def __init__(self, wanted: Wanted, split: str, found: FolderIndex) -> None:
        super().__init__(found.labels, wanted.seed, substitutes=split == "train")
        self._index = found
        self._channels, self._size = wanted.channels, wanted.size
        self._rows = range(wanted.size[0])
        self._augments, self._hflip = split == "train", wanted.config.hflip
        values = wanted.config.preprocessing.of_channels(wanted.channels)
        a_number_each = (-1, *[1] * len(wanted.size))
        self._mean, self._std = (torch.tensor(each).reshape(a_number_each) for each in values)

    def of_rows(self, rows: range) -> Dataset:
        part = copy.copy(self)
        part._rows = rows
        return part

    def digest(self) -> str:
        """Return a checksum of the names in order and of their labels, which a table may change."""
        names = self._index.digest().encode()
        return xxhash.xxh3_64(names + self._index.labels.tobytes()).hexdigest()

    def name_of(self, number: int) -> str:
        return self._index.paths[number]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._channels, len(self._rows), *self._size[1:])

    def make(self, number: int, epoch: int, index: int) -> torch.Tensor:
        path = self._index.paths[number]
        with open_array(path) as array:
            channel_axis = self._channel_axis(path, array.shape)
            size = [n for axis, n in enumerate(array.shape) if axis != channel_axis]
            self._check_size(path, size)
            starts, flip = self._place(size, epoch, index)
            window = self._window(starts, channel_axis, len(array.shape))
            values = self._read(path, array, window)
        values = values[None] if channel_axis is None else np.moveaxis(values, channel_axis, 0)
        image = torch.from_numpy(np.ascontiguousarray(as_floats(values)))
        if flip:
            image = image.flip(-1)
        return (image - self._mean) / self._std

    def _channel_axis(self, path: str, shape: tuple[int, ...]) -> int | None:
        """Return which axis of an array is that of the channels; None: it has none.

        Raises DataFolderError for an array that has not the model's dimensions and channels.
        """
        dimensions, channels = len(self._size), self._channels
        if len(shape) == dimensions and channels == 1:
            return None
        if len(shape) == dimensions + 1:
            if dimensions == 3 and shape[0] == channels:
                return 0
            if shape[-1] == channels:
                return dimensions
        raise DataFolderError(
            f"{path} holds an array of {_times(shape)}, which is no image of {_times(self._size)} "
            f"with channels: {channels}"
        )

    def _check_size(self, path: str, size: list[int]) -> None:
        if any(there < wanted for there, wanted in zip(size, self._size, strict=True)):
            raise DataFolderError(
                f"{path} holds an array of {_times(size)}, smaller than the {_times(self._size)} "
                "that the model takes: leave it out, or give the model a smaller image size"
            )

    def _place(self, size: list[int], epoch: int, index: int) -> tuple[list[int], bool]:
        """Return where what is cut out of an array begins, and whether it is flipped."""
        left = [there - wanted for there, wanted in zip(size, self._size, strict=True)]
        if not self._augments:
            return [each // 2 for each in left], False

        def draw(left: list[int]) -> tuple[list[int], bool]:
            starts = [int(torch.randint(each + 1, ())) for each in left]
            return starts, bool(torch.rand(()) < self._hflip)

        return seeded(draw, left, self.seed, epoch, index)

    def _window(self, starts: list[int], channel_axis: int | None, dimensions: int) -> Window:
        ends = [start + length for start, length in zip(starts, self._size, strict=True)]
        rows = slice(starts[0] + self._rows.start, starts[0] + self._rows.stop)
        window = [rows, *map(slice, starts[1:], ends[1:])]
        if channel_axis is not None:
            window.insert(channel_axis, slice(0, self._channels))
        return tuple(window)

    def _read(self, path: str, array: ArrayFile, window: Window) -> np.ndarray:
        """Return this part's values.

        Raises DataFolderError for damage that who reads other rows may not see: the image would
        be replaced here, and not there.
        """
        try:
            return array.read(window)
        except BrokenImageError as error:
            if len(self._rows) == self._size[0]:
                raise
            raise DataFolderError(
                f"{path} is damaged ({error}), and processes that read other rows of it cannot "
                "know: mend or remove it"
            ) from None


def as_floats(values: np.ndarray) -> np.ndarray:
    """Return float32: whole numbers as a share of the largest of their type, others as they are."""
    if values.dtype.kind in "iu":
        return values.astype(np.float32) / np.float32(np.iinfo(values.dtype).max)
    return values.astype(np.float32)


def _times(sizes: tuple[int, ...] | list[int]) -> str:
    return " x ".join(map(str, sizes)) or "no axis"
