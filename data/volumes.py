"""The source of arrays in files, volumes above all: each process reads only its rows of them.

They are in ``<root>/train/<class>/*`` and ``<root>/val/<class>/*``, or a table lists them
(``--labels``). An array is cropped to the model's size, never resized: for training anywhere, for
validation in the middle.

``open_array`` knows the formats: .npy, .npz, NIfTI (.nii, .nii.gz) and TIFF. It opens a file so
that any part can be read without the rest. An unreadable file raises BrokenImageError when it is
opened if its header, size or table of contents shows the damage, and else when it is read.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
import math
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from data.batch import Batch
from data.files import (
    TEXT,
    BrokenImageError,
    DataFolderError,
    SizeLimit,
    is_url,
    reason_of,
    regular,
)
from data.image_table import index_table
from data.index import FolderIndex, index_folders
from data.index_file import Strings
from data.source import DatasetRequest, DataSource, Split
from data.transforms import seeded

# The reason that a file cannot be read is reported by this program: the packages need not log it.
for _package in ("tifffile", "nibabel.global"):
    logging.getLogger(_package).setLevel(logging.CRITICAL + 1)

_DECODED = SizeLimit("what is decoded as a whole", 5 * 2**30)
"""1024 x 1024 x 1024 values in fp32 take 4 GiB."""

Window = tuple[slice, ...]
"""The part of an array to read: for each axis from where to where, in steps of 1."""


def open_volumes(request: DatasetRequest) -> DataSource:
    """Find the files of the splits that are requested. Raises DataFolderError."""
    config, root = request.config, request.config.data_dir
    if is_url(root):
        raise DataFolderError(
            f"--data_dir {root}: --data_source volumes reads parts of files and cannot use URLs: "
            "copy the files to a local disk"
        )
    find = index_folders if config.labels is None else index_table
    indices = find(request, SUFFIXES)
    for index in indices.values():
        check_packages(index.paths)
    splits = {name: VolumesSplit(request, name, index) for name, index in indices.items()}
    return DataSource(config.labels or root, splits)


def open_files(request: DatasetRequest, paths: Sequence[str]) -> Split:
    """Return these files as validation reads them, without labels. Raises DataFolderError."""
    check_packages(paths)
    index = FolderIndex(None, Strings.of(paths), np.zeros(len(paths), np.int32))
    return VolumesSplit(request, "val", index)


class VolumesSplit(Split):
    """One split (train or val) of files of arrays."""

    reads_rows = True
    dtype = torch.float32

    def __init__(self, request: DatasetRequest, name: str, index: FolderIndex) -> None:
        super().__init__(request, name, index.labels, index.classes, index.left_out)
        self._index, self._channels, self._size = index, request.channels, request.size
        mean_and_std = request.config.preprocessing.of_channels(request.channels)
        by_channel = (-1, *[1] * len(request.size))
        self._mean, self._std = (torch.tensor(values).view(by_channel) for values in mean_and_std)

    def digest(self) -> str:
        """Return a checksum of the names in order and of their labels, which a table may change."""
        names = self._index.digest().encode()
        return xxhash.xxh3_64(names + self._index.labels.tobytes()).hexdigest()

    def name_of(self, number: int) -> str:
        return self._index.paths[number]

    def load_sample(self, number: int, epoch: int, index: int) -> Batch:
        path = self._index.paths[number]
        with open_array(path) as array:
            shape, dimensions, channel_axis = array.shape, len(self._size), None
            fits = len(shape) == dimensions and self._channels == 1
            if len(shape) == dimensions + 1:
                if dimensions == 3 and shape[0] == self._channels:
                    fits, channel_axis = True, 0
                elif shape[-1] == self._channels:
                    fits, channel_axis = True, dimensions
            if not fits:
                raise DataFolderError(
                    f"{path} has shape {_times(shape)}, but the model takes {_times(self._size)} "
                    f"with {self._channels} channel(s)"
                )
            size = [n for axis, n in enumerate(shape) if axis != channel_axis]
            margins = [side - needed for side, needed in zip(size, self._size, strict=True)]
            if min(margins) < 0:
                raise DataFolderError(
                    f"{path} has size {_times(size)}, smaller than the model's "
                    f"{_times(self._size)}: remove the file, or use a smaller image size"
                )
            # Draw the crop, and choose this process's rows of it.
            starts, flip = [margin // 2 for margin in margins], False

            def draw(margins: list[int]) -> tuple[list[int], bool]:
                starts = [int(torch.randint(margin + 1, ())) for margin in margins]
                return starts, bool(torch.rand(()) < self.request.config.hflip)

            if self.is_train:
                starts, flip = seeded(draw, margins, self.seed, epoch, index)
            window = [slice(start, start + n) for start, n in zip(starts, self._size, strict=True)]
            window[0] = slice(starts[0] + self.rows.start, starts[0] + self.rows.stop)
            if channel_axis is not None:
                window.insert(channel_axis, slice(0, self._channels))
            try:
                values = array.read(tuple(window))
                if values.dtype.kind in "iu":  # as a share of the largest of their type
                    values = values.astype(np.float32) / np.float32(np.iinfo(values.dtype).max)
                with np.errstate(over="ignore"):
                    values = values.astype(np.float32, copy=False)
                if not np.isfinite(values).all():
                    raise BrokenImageError("it contains values that are NaN or infinite in fp32")
            except BrokenImageError as error:
                if len(self.rows) == self._size[0]:
                    raise
                # Processes that read other rows may not see the damage: the image would be
                # replaced here, and not there.
                raise DataFolderError(
                    f"{path} is damaged ({error}), and processes that read its other rows cannot "
                    "detect this: repair or remove it"
                ) from None
        values = values[None] if channel_axis is None else np.moveaxis(values, channel_axis, 0)
        image = torch.from_numpy(np.ascontiguousarray(values))
        if flip:
            image = image.flip(-1)
        return {"image": (image - self._mean) / self._std}


def _times(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "no axis"


# -- files of arrays -------------------------------------------------------------------


_NUMBERS = "biuf"
"""The kinds of dtypes that are read."""


@dataclass(frozen=True)
class ArrayFile:
    """An array in an open file."""

    shape: tuple[int, ...]
    """The sizes of its axes. NIfTI's axes are in reverse order: slices, height, width."""
    dtype: np.dtype
    _read: Callable[[Window], np.ndarray]

    def read(self, window: Window) -> np.ndarray:
        """Return a part, and read little more than that. Raises BrokenImageError."""
        size = tuple(part.stop - part.start for part in window)
        with _broken_if_it_raises():
            values = np.array(self._read(window))
            if values.shape != size or values.dtype.kind not in _NUMBERS:
                raise BrokenImageError(
                    f"{_times(values.shape)} values of {values.dtype} were read, not {_times(size)}"
                )
            return values


@contextlib.contextmanager
def open_array(path: str) -> Iterator[ArrayFile]:
    """Open the array in the file ``path``. Raises BrokenImageError."""
    with contextlib.ExitStack() as stack:
        with _broken_if_it_raises():
            os.close(regular(path, os.O_RDONLY))
            suffix = next((suffix for suffix in SUFFIXES if path.lower().endswith(suffix)), None)
            if suffix is None:
                raise BrokenImageError(f"its extension is not one of {', '.join(SUFFIXES)}")
            array = _OPENERS[suffix](path, stack)
            if array.dtype.kind not in _NUMBERS:
                raise BrokenImageError(f"its dtype {array.dtype} is not numeric")
            if not all(isinstance(side, numbers.Integral) and side > 0 for side in array.shape):
                raise BrokenImageError(f"its header is damaged: its shape is {array.shape}")
        yield array


@contextlib.contextmanager
def _broken_if_it_raises() -> Iterator[None]:
    try:
        yield
    except BrokenImageError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise BrokenImageError(f"it is damaged ({reason_of(error)})") from error
    except Exception as error:  # each format raises its own errors
        raise BrokenImageError(reason_of(error)) from error


def check_packages(paths: Iterable[str]) -> None:
    """Raise DataFolderError if files of these names need a package that is not installed."""
    suffixes = {suffix for path in paths for suffix in _PACKAGES if path.lower().endswith(suffix)}
    for suffix in sorted(suffixes):
        package = _PACKAGES[suffix]
        try:
            importlib.import_module(package)
        except ImportError:
            raise DataFolderError(
                f"{suffix} files require the package {package}: python3 -m pip install {package}"
            ) from None


# NumPy's files


def _open_npy(path: str, _stack: contextlib.ExitStack) -> ArrayFile:
    with open(path, "rb") as file:
        major, _ = np.lib.format.read_magic(file)
        TEXT.check(int.from_bytes(file.read(2 if major == 1 else 4), "little"), "its header")
    with np.errstate(over="ignore"):  # of a damaged shape, which then raises ValueError
        array = np.lib.format.open_memmap(path, mode="r")
    return ArrayFile(array.shape, array.dtype, lambda window: array[window])


def _open_npz(path: str, _stack: contextlib.ExitStack) -> ArrayFile:
    with np.load(path) as archive:
        name = next((name for name in ("volume", "image") if name in archive.files), None)
        if len(archive.files) == 1:
            name = archive.files[0]
        if name is None:
            raise BrokenImageError(
                f"it has {len(archive.files)} arrays, and none is named volume or image: rename one"
            )
        _DECODED.check(archive.zip.getinfo(f"{name}.npy").file_size, name)
        array = archive[name]
    return ArrayFile(array.shape, array.dtype, lambda window: array[window])


# NIfTI


@functools.cache
def _nifti_kinds() -> list[Any]:
    """Return nibabel's types of NIfTI images, but without the extensions of a header, which are not
    needed and may claim any size."""
    import nibabel

    class NoExtensions(nibabel.nifti1.Nifti1Extensions):
        @classmethod
        def from_fileobj(cls, *_: Any) -> NoExtensions:
            return cls()

    kinds = []
    for kind in (nibabel.Nifti1Image, nibabel.Nifti2Image):
        header = type("Header", (kind.header_class,), {"exts_klass": NoExtensions})
        kinds.append(type("Image", (kind,), {"header_class": header}))
    return kinds


def _open_nifti(path: str, _stack: contextlib.ExitStack) -> ArrayFile:
    array: Any = None
    for kind in _nifti_kinds():
        if kind.path_maybe_image(path)[0]:
            array = kind.from_filename(path).dataobj
            break
    else:
        raise BrokenImageError("it is not a NIfTI file")
    if not path.lower().endswith(".gz"):
        _check_length(path, array.offset + math.prod(array.shape) * array.dtype.itemsize)
    return ArrayFile(array.shape[::-1], array.dtype, lambda window: array[window[::-1]].T)


def _check_length(path: str, needed: int) -> None:
    """Raise BrokenImageError if a file is truncated, which its header does not show."""
    if os.path.getsize(path) < needed:
        raise BrokenImageError(f"it is truncated: {os.path.getsize(path):,} of {needed:,} bytes")


# TIFF


def _open_tiff(path: str, stack: contextlib.ExitStack) -> ArrayFile:
    """Open the first page, as height x width or height x width x samples."""
    from tifffile import PHOTOMETRIC, TiffFile

    tiff = stack.enter_context(TiffFile(path))
    page: Any = tiff.pages.first
    ends = map(sum, zip(page.dataoffsets, page.databytecounts, strict=True))
    _check_length(path, max(ends, default=0))
    if page.imagedepth > 1:
        raise BrokenImageError(
            "it is a TIFF volume; only 2-D TIFF images are supported: save it as NIfTI or .npy"
        )
    if page.photometric == PHOTOMETRIC.PALETTE:
        raise BrokenImageError(
            "its values are indices into a palette of colors: save it as grayscale or RGB"
        )
    count, _, height, width, samples = page.shaped  # count of planes or of samples is 1
    white: int | None = None  # the value from which others are subtracted
    if page.photometric == PHOTOMETRIC.MINISWHITE:
        if page.dtype.kind not in "bu":
            raise BrokenImageError(
                f"zero is white in it (MinIsWhite), which is undefined for {page.dtype}: save it "
                "as MinIsBlack"
            )
        white = 2**page.bitspersample - 1
    mapped: np.ndarray | None = None
    if not page.is_memmappable:
        _DECODED.check(math.prod(page.chunks) * page.dtype.itemsize, "a tile or strip")
    else:
        dtype, size = page.dtype.newbyteorder(tiff.byteorder), (count, height, width, samples)
        mapped = np.memmap(path, dtype, "r", page.dataoffsets[0], size)

    def read(window: Window) -> np.ndarray:
        rows, columns, *channels = window
        if mapped is None:
            planes = _segments(tiff.filehandle, page, rows, columns)
        else:
            planes = mapped[:, rows, columns]
        values = np.concatenate(list(planes), axis=-1)
        if white is not None:
            values = ~values if values.dtype == bool else (white - values).astype(values.dtype)
        return values[..., channels[0]] if channels else values[..., 0]

    channels = count * samples
    shape = (height, width, channels) if channels > 1 else (height, width)
    return ArrayFile(shape, page.dtype, read)


def _segments(file: Any, page: Any, rows: slice, columns: slice) -> np.ndarray:
    """Decode the tiles or strips that hold these rows and columns: (planes, rows, columns,
    samples)."""
    planes, _, height, width, samples = page.shaped
    high, wide = page.chunks[:2] if page.planarconfig == 1 else page.chunks[-2:]
    across, down = math.ceil(width / wide), math.ceil(height / high)
    size = planes, rows.stop - rows.start, columns.stop - columns.start, samples
    pixels = np.zeros(size, page.dtype)
    tile_rows = range(rows.start // high, math.ceil(rows.stop / high))
    tile_columns = range(columns.start // wide, math.ceil(columns.stop / wide))
    for plane, tile_row, tile_column in itertools.product(range(planes), tile_rows, tile_columns):
        number = (plane * down + tile_row) * across + tile_column
        length = page.databytecounts[number]
        if not length:  # a sparse file's tile of zeros
            continue
        file.seek(page.dataoffsets[number])
        tile, *_ = page.decode(
            file.read(length), number, jpegtables=page.jpegtables, jpegheader=page.jpegheader
        )
        # Where the tile and the window overlap, in the window and in the tile.
        top, left = tile_row * high, tile_column * wide
        first_row, first_column = max(top, rows.start), max(left, columns.start)
        tile = tile[0, first_row - top : height - top, first_column - left : width - left]
        into = pixels[plane, first_row - rows.start :, first_column - columns.start :]
        tile = tile[: into.shape[0], : into.shape[1]]
        into[: tile.shape[0], : tile.shape[1]] = tile
    return pixels


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
"""The file extensions of arrays, in small letters."""
