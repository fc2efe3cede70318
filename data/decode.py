"""Reads single image files and folders of them, one after the other: what a model is used on."""

from __future__ import annotations

import functools
import io
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import simplejpeg
import torch
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from data.files import BrokenImageError, DataFolderError, read_bytes, reason_of

# ------------------------------------------------------------------------------------------------
# Reads one image as RGB, in the same way for training, validation and ``--predict``.


# Of sizes between Pillow's two limits, palettes, EXIF: nothing that changes what is trained on.
warnings.filterwarnings("ignore", module=r"PIL\.")

_NOT_READ = {"EPS", "BUFR", "GRIB", "HDF5", "MPEG", "WMF"}
"""Pillow runs Ghostscript, an interpreter, for the first, and only recognises the others."""

_SIXTEEN_BITS = {"I;16", "I;16B", "I;16L", "I;16N"}
_SIXTEEN_BITS_AS_I = {"PNG", "PPM"}
"""Formats whose grey images of more than 8 bits Pillow scales to 0..65535 in mode I."""

_LONGEST = 1000  # times the shorter side, which is resized to a few hundred pixels

_TIFF_BITS, _TIFF_PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0


_JPEG = b"\xff\xd8\xff"
_JPEG_COLOURS = ("YCbCr", "Gray")
"""Those that are turned to RGB as Pillow turns them."""


class OpenImage(Protocol):
    """An image of which the size is known, and which is decoded when its pixels are asked for."""

    @property
    def size(self) -> tuple[int, int]:
        """Return height and width in pixels."""

    @property
    def shrinks(self) -> tuple[int, ...]:
        """Return by what its sides can be divided while it is decoded, with less work."""

    def pixels(self, shrink: int = 1) -> np.ndarray:
        """Return (height, width, 3), uint8, RGB; each side divided by ``shrink``, rounded up.

        Raises BrokenImageError.
        """


def open_image(encoded: bytes) -> OpenImage:
    """Return the image that the bytes of a file hold. Raises BrokenImageError."""
    if encoded.startswith(_JPEG):
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
        except ValueError:  # Pillow says what is wrong
            return Pixels(np.array(read_image(encoded)))
        if colours in _JPEG_COLOURS:
            _check_shape(height, width)
            return _Jpeg(encoded, (height, width))
    return Pixels(np.array(read_image(encoded)))


class Pixels:
    """An image that is decoded already."""

    shrinks = ()

    def __init__(self, pixels: np.ndarray) -> None:
        """Take (height, width, 3), uint8."""
        self._pixels, self.size = pixels, (pixels.shape[0], pixels.shape[1])

    def pixels(self, shrink: int = 1) -> np.ndarray:
        assert shrink == 1
        return self._pixels


class _Jpeg:
    """A JPEG, decoded by libjpeg-turbo alone: Pillow copies the pixels two times more."""

    shrinks = (8, 4, 2)

    def __init__(self, encoded: bytes, size: tuple[int, int]) -> None:
        self._encoded, self.size = encoded, size

    def pixels(self, shrink: int = 1) -> np.ndarray:
        height, width = (-(-side // shrink) for side in self.size)
        try:
            return simplejpeg.decode_jpeg(
                self._encoded, "RGB", min_height=height, min_width=width, min_factor=shrink
            )
        except ValueError:  # Pillow reads some of them, or says what is wrong
            image = read_image(self._encoded)
            return np.array(image.reduce(shrink) if shrink > 1 else image)


def image_size(encoded: bytes) -> tuple[int, int]:
    """Return height and width in pixels of the image that the bytes, or the first of them, hold.

    Nothing is decoded. Raises BrokenImageError if they do not tell.
    """
    try:
        with Image.open(io.BytesIO(encoded), formats=_formats()) as image:
            return image.height, image.width
    except Exception as error:  # each format raises what it likes
        raise BrokenImageError(reason_of(error)) from error


def read_image(source: str | Path | bytes) -> Image.Image:
    """Return the image in a file, or in the bytes of one, decoded whole, in RGB of 8 bits each.

    Raises BrokenImageError, whatever Pillow raises.
    """
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with Image.open(file, formats=_formats()) as image:
            _check_shape(image.height, image.width)
            image.load()
            return _to_8_bits(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise BrokenImageError("no image of a known format") from error
    except Exception as error:  # each format raises what it likes
        raise BrokenImageError(reason_of(error)) from error


def _check_shape(height: int, width: int) -> None:
    if max(height, width) > _LONGEST * min(height, width):
        raise BrokenImageError(f"its {width} x {height} pixels are a line")


@functools.cache
def extensions() -> frozenset[str]:
    """Return the extensions of files that ``read_image`` reads: small letters, with the dot."""
    formats = {*_formats(), "MPO"}  # MPO: several JPEGs in one file, read as the first
    known = Image.registered_extensions()
    return frozenset(suffix for suffix, name in known.items() if name in formats)


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.preinit()  # the common ones are tried first
    Image.init()
    return tuple(name for name in Image.ID if name not in _NOT_READ)


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Scale grey values of more than 8 bits to 0..255; Pillow's ``convert`` would clip them."""
    wide = image.mode in _SIXTEEN_BITS
    if wide or (image.mode == "I" and image.format in _SIXTEEN_BITS_AS_I):
        values, white = np.asarray(image).astype(np.float32), 65535
        if isinstance(image, TiffImageFile):
            white = 2 ** image.tag_v2.get(_TIFF_BITS, (16,))[0] - 1
            if image.tag_v2.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO:
                values = white - values
        return Image.fromarray(np.rint(values * (255 / white)).astype(np.uint8))
    if image.mode in ("I", "F"):
        values = np.asarray(image)
        low, high = values.min(), values.max()
        if not (low >= 0 and high <= 255):
            raise BrokenImageError(
                f"its values run from {low:g} to {high:g}, and what is white cannot be told: "
                "convert it to 8 or 16 bits"
            )
    return image


# ------------------------------------------------------------------------------------------------


@dataclass
class FoundImages:
    """Lists the files to look at, in order, and what was passed over on the way to them."""

    paths: list[Path] = field(default_factory=list)
    named: set[Path] = field(default_factory=set)
    """The files that were named one by one."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """How many files were passed over because they are no images, by extension."""
    unreadable: list[str] = field(default_factory=list)
    """The folders that could not be looked into, each with the reason."""


def find_images(paths: Iterable[str]) -> FoundImages:
    """Find the files named, and the images anywhere below the folders named, sorted in each.

    Links to folders are not followed: one may lead anywhere, and round in circles. Raises
    DataFolderError for a path that is not there, and for a folder without images.
    """
    found = FoundImages()
    for path in paths:
        try:
            os.stat(path)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            reason = "there is no such file or folder" if missing else error.strerror
            raise DataFolderError(f"{path or repr(path)}: {reason}") from None
        if os.path.isdir(path):
            _look_into(path, found)
        else:
            found.paths.append(Path(path))
            found.named.add(Path(path))
    return found


def _look_into(top: str, found: FoundImages) -> None:
    inside = []

    def note(error: OSError) -> None:
        found.unreadable.append(f"{error.filename}: {error.strerror}")

    for folder, folders, files in os.walk(top, onerror=note):
        links = sum(os.path.islink(os.path.join(folder, name)) for name in folders)
        if links:
            found.passed_over["linked folder"] += links
        for name in files:
            suffix = os.path.splitext(name)[1].lower()
            path = Path(folder, name)
            if suffix not in extensions():
                found.passed_over[suffix or "no extension"] += 1
            elif path.is_symlink() or path.is_file():  # a link is looked at when it is read
                inside.append(path)
            else:
                found.passed_over["no file"] += 1
    if not inside:
        why = found.unreadable[0] if found.unreadable else ".jpg, .png, or what else Pillow reads"
        raise DataFolderError(f"{top} holds no images ({why})")
    found.paths += sorted(inside)


def read_batches(
    paths: list[Path], transform: Callable, batch_size: int, broken: Callable[[Path, str], None]
) -> Iterator[tuple[list[Path], torch.Tensor]]:
    """Yield up to ``batch_size`` paths and their images, as (count, channels, size, size).

    ``broken`` is told the path and the reason of an image that cannot be read; it is left out.
    """
    for first in range(0, len(paths), batch_size):
        good, images = [], []
        for path in paths[first : first + batch_size]:
            try:
                images.append(transform(open_image(read_bytes(os.fspath(path)))))
                good.append(path)
            except BrokenImageError as error:
                broken(path, str(error))
        if good:
            yield good, torch.stack(images)
