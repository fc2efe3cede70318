"""Read images of more than 8 bits, or of several bands, with the values that their files have.

Each function returns None for an image that it need not read: one of 8 bits, gray or in colors.
"""

from __future__ import annotations

import io
import logging
import math
from typing import Any

import numpy as np
import torch
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from data.dicom import INSTALL
from data.files import BrokenImageError, DataFolderError, reason_of
from data.intensity import COLORS, Range, RawImage

# The reason that a file cannot be read is reported by this program.
logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)

_PNG, _TIFF = b"\x89PNG\r\n\x1a\n", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""First bytes; of TIFF with little and big endian, then of BigTIFF."""
_PLAIN = (b"\xff\xd8\xff", b"BM", b"GIF8", b"RIFF")
"""First bytes of formats of 8 bits: JPEG, BMP, GIF, WebP."""
_PLAIN_SUFFIXES = (".jpg", ".jpeg", ".bmp", ".gif", ".webp")
_PNG_DEPTH, _PNG_COLORS, _PNG_GRAY = 24, 25, 0
"""Where a PNG file says how many bits a value has and what its bands are, and the word for gray."""

SIXTEEN_BITS = {"I;16", "I;16B", "I;16L", "I;16N"}
"""Pillow's modes of 16 bits."""
_SIXTEEN_BITS_AS_I = {"PNG", "PPM"}
"""Formats whose grayscale images of more than 8 bits Pillow scales to 0..65535 in mode I."""
_TIFF_BITS, _TIFF_PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0


def is_plain(head: bytes) -> bool:
    """Return whether these first bytes are those of a gray or color image of 8 bits."""
    if head.startswith(_PNG):
        return head[_PNG_DEPTH : _PNG_DEPTH + 1] < b"\x10"
    return head.startswith(_PLAIN)


def is_plain_name(name: str) -> bool:
    """Return whether a file of this name is an image of 8 bits, unless it is misnamed."""
    return name.lower().endswith(_PLAIN_SUFFIXES)


def is_tiff(encoded: bytes) -> bool:
    """Return whether these first bytes are those of a TIFF file."""
    return encoded.startswith(_TIFF)


def tiff_size(encoded: bytes) -> tuple[int, int] | None:
    """Return height and width of a TIFF file; None if these bytes do not contain the size."""
    from tifffile import TiffFile

    try:
        with TiffFile(io.BytesIO(encoded)) as tiff:
            page: Any = tiff.pages.first
            return int(page.imagelength), int(page.imagewidth)
    except Exception:  # noqa: BLE001 - tifffile raises what it likes; Pillow says what is wrong
        return None


# By Pillow, and PNG files in colors by torchvision: Pillow drops their low bits.


def gray_of_pillow(image: ImageFile) -> RawImage | None:
    """Return the gray values of more than 8 bits of an image that Pillow has opened. Floats and
    integers of 32 bits have no full range."""
    is_wide = image.mode == "I" and image.format in _SIXTEEN_BITS_AS_I
    if not (is_wide or image.mode in SIXTEEN_BITS):
        is_other = image.mode in ("I", "F")
        return RawImage(np.asarray(image)[..., None], None) if is_other else None
    values, white = np.asarray(image), 65535
    if isinstance(image, TiffImageFile):
        white = 2 ** image.tag_v2.get(_TIFF_BITS, (16,))[0] - 1
        if image.tag_v2.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO:
            values = white - values
    return RawImage(values[..., None], (0, white))


def raw_of_pillow(image: ImageFile, encoded: bytes, channels: int) -> RawImage | None:
    """Return the image that Pillow has opened from these bytes, for a model with so many
    channels."""
    if (raw := gray_of_pillow(image)) is not None:
        return raw
    if not is_plain(encoded) and encoded.startswith(_PNG):
        from torchvision.io import ImageReadMode, decode_png

        data = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        values = decode_png(data, ImageReadMode.UNCHANGED).permute(1, 2, 0).numpy()
        if channels in COLORS:  # without the alpha channel
            values = values[..., : 1 if values.shape[2] < 3 else 3]
        return RawImage(values, (0, 65535))
    if channels in COLORS:
        return None
    values = np.asarray(image if image.mode not in ("1", "P") else image.convert("RGB"))
    return RawImage(values.reshape(image.height, image.width, -1), (0, 255))


# TIFF, by tifffile


def read_tiff(encoded: bytes, channels: int, max_pixels: int, too_large: str) -> RawImage | None:
    """Return the image in the bytes of a TIFF file: its first page or, for models of neither 1 nor
    3 channels, all pages if each has one band. None also for what tifffile cannot read alone and
    Pillow can, or cannot either.

    ``too_large``: the reason to give if it has more than ``max_pixels``. Raises BrokenImageError,
    and DataFolderError if a package is missing.
    """
    from tifffile import TiffFile

    if tiff_size(encoded) is None:
        return None
    try:
        with TiffFile(io.BytesIO(encoded)) as tiff:
            page: Any = tiff.pages.first
            pages = [page]
            if channels not in COLORS and page.samplesperpixel == 1 and len(tiff.pages) == channels:
                pages = [tiff.pages[number] for number in range(channels)]
            return _read_pages(pages, encoded, channels, max_pixels, too_large)
    except (BrokenImageError, DataFolderError):
        raise
    except Exception as error:  # tifffile and each decoder raise what they like
        raise BrokenImageError(f"it is damaged ({reason_of(error)})") from error


def _read_pages(
    pages: list[Any], encoded: bytes, channels: int, max_pixels: int, too_large: str
) -> RawImage | None:
    from tifffile import EXTRASAMPLE, PHOTOMETRIC

    page = pages[0]
    bands, bits = page.samplesperpixel, page.bitspersample
    alpha = len([kind for kind in page.extrasamples if kind != EXTRASAMPLE.UNSPECIFIED])
    is_palette = page.photometric == PHOTOMETRIC.PALETTE
    if channels in COLORS:
        is_eight_bit = page.dtype is None or (page.dtype.kind in "bu" and bits <= 8)
        if is_palette or (is_eight_bit and bands - alpha in COLORS):
            return None
    elif is_palette:
        raise BrokenImageError("its values are indices into a palette of colors")
    if page.dtype is None or page.dtype.kind not in "buif":
        raise BrokenImageError(f"its values are {page.dtype or 'of an unknown type'}, not numbers")
    if page.imagedepth > 1:
        raise BrokenImageError("it is a TIFF volume: use --data_source volumes")
    height, width, count = page.imagelength, page.imagewidth, bands * len(pages)
    # A tile may be larger than the image, and is decoded as a whole.
    if (
        max(height * width, math.prod(page.chunks) // page.shaped[-1]) * max(1, count // 3)
        > max_pixels
    ):
        raise BrokenImageError(too_large)
    if any((each.dtype, each.shaped) != (page.dtype, page.shaped) for each in pages):
        raise BrokenImageError(f"its {len(pages)} pages differ in size or type")
    ends = (
        start + length
        for each in pages
        for start, length in zip(each.dataoffsets, each.databytecounts, strict=True)
    )
    if (needed := max(ends, default=0)) > len(encoded):
        raise BrokenImageError(f"it is truncated: {len(encoded):,} of {needed:,} bytes")
    try:
        planes = [each.asarray(maxworkers=1).reshape(each.shaped) for each in pages]
    except ValueError as error:
        if "imagecodecs" not in str(error):
            raise
        if bands == 1 and len(pages) == 1 and page.dtype.kind == "u" and bits <= 16:
            return None  # Pillow can
        raise DataFolderError(
            f"TIFF files with {page.compression.name} compression and these bands or bits require "
            f"the package imagecodecs: {INSTALL}"
        ) from None
    values = np.concatenate([part[:, 0] for part in planes])  # (planes, height, width, samples)
    values = np.moveaxis(values, 0, 2).reshape(height, width, count)
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    if page.photometric == PHOTOMETRIC.MINISWHITE:
        if page.dtype.kind not in "bu":
            raise BrokenImageError("zero is white in it, which is undefined for its type")
        values = ~values if page.dtype.kind == "b" else (2**bits - 1 - values).astype(values.dtype)
    if alpha and channels in COLORS:
        values = values[..., : count - alpha]
    return RawImage(*_typed(values, bits))


def _typed(values: np.ndarray, bits: int) -> tuple[np.ndarray, Range | None]:
    """Return the values and their full range: bits as 0 and 255, and of floats no range."""
    if values.dtype.kind == "b":
        return values.astype(np.uint8) * np.uint8(255), (0, 255)
    if values.dtype.kind == "f":
        return values, None
    if values.dtype.kind == "i":
        return values, (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if bits < 8:
        values = values.astype(np.uint16)  # white is not 255
    return values, (0, 2**bits - 1)
