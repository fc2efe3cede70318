"""Reads one image as RGB, in the same way for training, validation and ``--predict``."""

from __future__ import annotations

import functools
import io
import warnings
from pathlib import Path
from typing import Protocol

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from data.errors import BrokenImageError, reason_of

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
