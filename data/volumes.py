"""The source of arrays in files, volumes above all: each process reads its rows of them only.

They lie in ``<root>/train/<class>/*`` and ``<root>/val/<class>/*``, or a table says which they are
(``--labels``). An array is cut to the model's size, never resized: for training anywhere, else in
the middle. ``data/volumes.py`` knows the formats.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import logging
import math
import os
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from data.files import BrokenImageError, DataFolderError, is_url, reason_of, regular
from data.index import FolderIndex, check_folder, kept_split, read_labels
from data.source import SampleSplit, SplitSource, Wanted
from data.transforms import seeded

# ------------------------------------------------------------------------------------------------
# Opens files of arrays, of which any part can then be read without the rest.
#
# .npy, .npz, NIfTI (.nii, .nii.gz) and TIFF. What cannot be read raises BrokenImageError, when a
# file is opened where its header, size or table of contents tells, and else when it is read.


# What it has to say of a file is said in the reason that the file is not read.
logging.getLogger("tifffile").addHandler(logging.NullHandler())

Window = tuple[slice, ...]
"""The part of an array that is wanted: for each axis from where to where, in steps of 1."""

_NAMES = ("volume", "image")  # of the array that is read where a .npz file has several
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip file's member: the lengths of name and extra


@dataclass(frozen=True)
class ArrayFile:
    """An array in an open file."""

    shape: tuple[int, ...]
    """The sizes of its axes; the order of NIfTI's axes is turned round: slices, height, width."""
    dtype: np.dtype
    _read: Callable[[Window], np.ndarray]

    def read(self, window: Window) -> np.ndarray:
        """Return a part, and read little more than that. Raises BrokenImageError."""
        with _broken_if_it_raises():
            return np.array(self._read(window))


@contextlib.contextmanager
def open_array(path: str) -> Iterator[ArrayFile]:
    """Open the array in the file ``path``. Raises BrokenImageError."""
    with contextlib.ExitStack() as stack:
        with _broken_if_it_raises():
            os.close(regular(path, os.O_RDONLY))
            opened = _opener_of(path)(path, stack)
            if opened.dtype.kind not in "biuf":
                raise BrokenImageError(f"its values are {opened.dtype}, and not numbers")
        yield opened


def check_packages(paths: Iterable[str]) -> None:
    """Raises DataFolderError if files of these names need a package that is not installed."""
    suffixes = {suffix for path in paths for suffix in SUFFIXES if path.lower().endswith(suffix)}
    for suffix in sorted(suffixes & set(_PACKAGES)):
        package = _PACKAGES[suffix]
        try:
            importlib.import_module(package)
        except ImportError:
            raise DataFolderError(
                f"{suffix} files need the package {package}: python3 -m pip install {package}"
            ) from None


@contextlib.contextmanager
def _broken_if_it_raises() -> Iterator[None]:
    try:
        yield
    except BrokenImageError:
        raise
    except Exception as error:  # each format raises what it likes
        raise BrokenImageError(reason_of(error)) from error


def _opener_of(path: str) -> Callable[[str, contextlib.ExitStack], ArrayFile]:
    for suffix, opener in _OPENERS.items():
        if path.lower().endswith(suffix):
            return opener
    raise BrokenImageError(f"its name ends in none of {', '.join(SUFFIXES)}")


# -- NumPy's ---------------------------------------------------------------------------


def _open_npy(path: str, _stack: contextlib.ExitStack) -> ArrayFile:
    return _mapped(np.lib.format.open_memmap(path, mode="r"))


def _mapped(array: np.ndarray) -> ArrayFile:
    return ArrayFile(array.shape, array.dtype, lambda window: array[window])


def _open_npz(path: str, stack: contextlib.ExitStack) -> ArrayFile:
    """Map the array where it lies uncompressed in the file, else read it as a stream."""
    archive = stack.enter_context(zipfile.ZipFile(path))
    member = _chosen(archive)
    stream = stack.enter_context(archive.open(member))
    shape, fortran, dtype = _npy_header(stream)
    if member.compress_type == zipfile.ZIP_STORED and not dtype.hasobject:
        start = _data_offset(path, member) + stream.tell()
        order: Any = "F" if fortran else "C"
        return _mapped(np.memmap(path, dtype, "r", start, shape, order))
    first = stream.tell()

    def read(window: Window) -> np.ndarray:
        if fortran:  # as the transposed array in C's order
            return _streamed(stream, first, shape[::-1], dtype, window[::-1]).T
        return _streamed(stream, first, shape, dtype, window)

    return ArrayFile(shape, dtype, read)


def _chosen(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    found = {each.filename.removesuffix(".npy"): each for each in archive.infolist()}
    if len(found) == 1:
        return next(iter(found.values()))
    for name in _NAMES:
        if name in found:
            return found[name]
    raise BrokenImageError(f"it has {len(found)} arrays, and none is named {' or '.join(_NAMES)}")


def _npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise BrokenImageError(f"version {version[0]}.{version[1]} of NumPy's format is not known here")


def _data_offset(path: str, member: zipfile.ZipInfo) -> int:
    """Return where a member's data begins: its header there may differ from the one in the list."""
    with open(path, "rb") as file:
        file.seek(member.header_offset)
        name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return member.header_offset + _LOCAL_HEADER.size + name + extra


def _streamed(
    stream: IO[bytes], first: int, shape: tuple[int, ...], dtype: np.dtype, window: Window
) -> np.ndarray:
    """Return a part of an array in C's order that begins at ``first``, going forwards only.

    One row, or plane, of the array is in memory at a time beside the part.
    """
    inner = 1 if len(shape) < 3 else 2
    rows, rest = window[:-inner], window[-inner:]
    bytes_a_row = math.prod(shape[-inner:]) * dtype.itemsize
    found = np.empty([each.stop - each.start for each in window], dtype)
    for place in itertools.product(*(range(each.start, each.stop) for each in rows)):
        stream.seek(first + int(np.ravel_multi_index(place, shape[:-inner])) * bytes_a_row)
        values = np.frombuffer(stream.read(bytes_a_row), dtype).reshape(shape[-inner:])
        target = tuple(at - each.start for at, each in zip(place, rows, strict=True))
        found[target] = values[rest]
    return found


# -- NIfTI -----------------------------------------------------------------------------


def _open_nifti(path: str, _stack: contextlib.ExitStack) -> ArrayFile:
    import nibabel

    array: Any = nibabel.load(path).dataobj
    if not path.lower().endswith(".gz"):
        _check_length(path, array.offset + math.prod(array.shape) * array.dtype.itemsize)
    return ArrayFile(array.shape[::-1], array.dtype, lambda window: array[window[::-1]].T)


def _check_length(path: str, needed: int) -> None:
    """Raises BrokenImageError if a file has been cut off, which its beginning does not show."""
    if os.path.getsize(path) < needed:
        raise BrokenImageError(f"it has {os.path.getsize(path):,} of {needed:,} bytes")


# -- TIFF ------------------------------------------------------------------------------


def _open_tiff(path: str, stack: contextlib.ExitStack) -> ArrayFile:
    """Open the first page, as height x width or height x width x samples."""
    from tifffile import TiffFile

    tiff = stack.enter_context(TiffFile(path))
    page: Any = tiff.pages.first
    ends = [sum(each) for each in zip(page.dataoffsets, page.databytecounts, strict=True)]
    _check_length(path, max(ends, default=0))
    if page.imagedepth > 1:
        raise BrokenImageError("it is a volume; of TIFF files, images are read")
    planes, _, height, width, samples = page.shaped
    shape = (height, width, planes * samples)
    if page.is_memmappable:
        dtype = page.dtype.newbyteorder(tiff.byteorder)
        mapped = np.memmap(path, dtype, "r", page.dataoffsets[0], (planes, *shape[:2], samples))
        return _without_axis_of_one(shape, page.dtype, lambda w: mapped[:, w[0], w[1]])
    return _without_axis_of_one(
        shape, page.dtype, lambda window: _segments(tiff.filehandle, page, *window[:2])
    )


def _without_axis_of_one(
    shape: tuple[int, ...], dtype: np.dtype, read: Callable[[Window], np.ndarray]
) -> ArrayFile:
    """Return the array with its samples as last axis, or without that axis if they are one.

    ``read`` gives (planes, height, width, samples), one of planes and samples is 1.
    """

    def arranged(window: Window) -> np.ndarray:
        values = np.concatenate(list(read(window)), axis=-1)
        return values[..., window[2]] if len(window) == 3 else values[..., 0]

    return ArrayFile(shape if shape[2] > 1 else shape[:2], dtype, arranged)


def _segments(file: Any, page: Any, rows: slice, columns: slice) -> np.ndarray:
    """Decode the tiles or strips that hold these rows and columns."""
    planes, _, height, width, samples = page.shaped
    high, wide = page.chunks[:2] if page.planarconfig == 1 else page.chunks[-2:]
    across, down = math.ceil(width / wide), math.ceil(height / high)
    found = np.zeros(
        (planes, rows.stop - rows.start, columns.stop - columns.start, samples), page.dtype
    )
    needed = itertools.product(
        range(planes),
        range(rows.start // high, math.ceil(rows.stop / high)),
        range(columns.start // wide, math.ceil(columns.stop / wide)),
    )
    for plane, tile_row, tile_column in needed:
        number = (plane * down + tile_row) * across + tile_column
        length = page.databytecounts[number]
        if not length:  # a sparse file's tile of zeros
            continue
        file.seek(page.dataoffsets[number])
        values, *_ = page.decode(
            file.read(length), number, jpegtables=page.jpegtables, jpegheader=page.jpegheader
        )
        top, left = tile_row * high, tile_column * wide
        values = values[0, : height - top, : width - left]
        there, here = _overlap(top, values.shape[0], rows)
        there_too, here_too = _overlap(left, values.shape[1], columns)
        found[plane, here, here_too] = values[there, there_too]
    return found


def _overlap(start: int, length: int, wanted: slice) -> tuple[slice, slice]:
    """Return what is wanted of a tile from ``start`` on, and where that is in what is wanted."""
    first, end = max(start, wanted.start), min(start + length, wanted.stop)
    return slice(first - start, end - start), slice(first - wanted.start, end - wanted.start)


_OPENERS = {
    ".npy": _open_npy,
    ".npz": _open_npz,
    ".nii": _open_nifti,
    ".nii.gz": _open_nifti,
    ".tif": _open_tiff,
    ".tiff": _open_tiff,
}
_PACKAGES = {".nii": "nibabel", ".nii.gz": "nibabel", ".tif": "tifffile", ".tiff": "tifffile"}
SUFFIXES = tuple(_OPENERS)
"""What the names of files of arrays end in, in small letters."""


# ------------------------------------------------------------------------------------------------


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
