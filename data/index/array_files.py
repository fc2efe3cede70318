"""Opens files of arrays, of which any part can then be read without the rest.

.npy, .npz, NIfTI (.nii, .nii.gz) and TIFF. What cannot be read raises BrokenImageError, when a
file is opened where its header, size or table of contents tells, and else when it is read.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from data.errors import BrokenImageError, DataFolderError, reason_of
from data.own_files import regular

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
