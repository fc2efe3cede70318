"""Reads one image file as RGB, in the same way for training, validation and ``--predict``."""

from __future__ import annotations

import functools
import warnings

import numpy as np
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


def read_image(path: str) -> Image.Image:
    """Return the image in the file ``path``, decoded whole, in RGB with 8 bits a channel.

    Raises BrokenImageError, whatever Pillow raises.
    """
    try:
        with Image.open(path, formats=_formats()) as image:
            if max(image.size) > _LONGEST * min(image.size):
                raise BrokenImageError(f"its {image.width} x {image.height} pixels are a line")
            image.load()
            return _to_8_bits(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise BrokenImageError("no image of a known format") from error
    except Exception as error:  # each format raises what it likes
        raise BrokenImageError(reason_of(error)) from error


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
