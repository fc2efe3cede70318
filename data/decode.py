"""Decode images, in the same way for training, validation and ``--predict``.

``open_image`` opens the bytes of one image. ``find_images`` and ``read_batches`` find and read
files and folders named on a command line.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import filterfalse
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from data.batch import Batch, collate
from data.files import BrokenImageError, DataFolderError, is_hidden, reason_of

# Pillow warns about large images, palettes and EXIF data, none of which affects training.
warnings.filterwarnings("ignore", module=r"PIL\.")

MAX_PIXELS = 2**30 // 6
"""The most pixels of an image: a compressed file of a megabyte could claim any number. As Pillow's
own limit, which does not apply to the JPEGs that ``Jpeg`` decodes."""
MAX_ASPECT = 1000
"""The largest aspect ratio: the shorter side is resized to hundreds of pixels."""
_TOO_LARGE = (
    f"it has more than {MAX_PIXELS:,} pixels: for larger images use --data_source volumes, which "
    "reads parts of them"
)

_NOT_READ = {"EPS", "BUFR", "GRIB", "HDF5", "MPEG", "WMF"}
"""Pillow runs the Ghostscript interpreter for EPS, and only recognizes the others."""

_SIXTEEN_BITS = {"I;16", "I;16B", "I;16L", "I;16N"}
_SIXTEEN_BITS_AS_I = {"PNG", "PPM"}
"""Formats whose grayscale images of more than 8 bits Pillow scales to 0..65535 in mode I."""

_TIFF_BITS, _TIFF_PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0

_JPEG = b"\xff\xd8\xff"
_JPEG_COLOURS = ("YCbCr", "Gray")
"""The color spaces that libjpeg-turbo converts to RGB exactly like Pillow."""
_SEQUENTIAL, _RESTARTS, _SCAN = (0xC0, 0xC1), 0xDD, 0xDA
"""JPEG segment markers: frames whose rows are stored from top to bottom (SOF0, SOF1), the restart
interval (DRI), the start of the scan (SOS)."""
_ROWS_OF_BLOCKS = 16
"""Rows are decoded in groups of this many or half as many; other JPEGs are rare."""
_REST_IS_LEFT = re.compile(r"Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9")
"""libjpeg-turbo's first warning for an undamaged JPEG that has more rows than its header says."""

# -- one image -------------------------------------------------------------------------


def open_image(encoded: bytes, *, lines: bool = False) -> OpenImage:
    """Return the image in the bytes of a file. Raises BrokenImageError, also for more than
    ``MAX_PIXELS`` and, unless ``lines``, for an aspect ratio above ``MAX_ASPECT``."""
    if encoded.startswith(_JPEG):
        with contextlib.suppress(ValueError):  # Pillow says what is wrong
            height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
            if colours in _JPEG_COLOURS:
                if height * width > MAX_PIXELS:
                    raise BrokenImageError(_TOO_LARGE)
                if not lines:
                    _check_shape(height, width)
                return Jpeg(encoded, (height, width))
    return Pixels(np.array(read_image(encoded, lines=lines)))


class Pixels:
    """A decoded image. ``size`` is its height and width in pixels."""

    shrinks: tuple[int, ...] = ()
    """Factors by which decoding can downscale the image at lower cost."""

    def __init__(self, pixels: np.ndarray) -> None:
        """``pixels``: (height, width, 3), uint8, RGB."""
        self._pixels, self.size = pixels, (pixels.shape[0], pixels.shape[1])

    def pixels(self, shrink: int = 1, rows: int | None = None) -> np.ndarray:
        assert shrink == 1
        return self._pixels


@dataclass
class Jpeg:
    """A JPEG that is decoded on demand, directly by libjpeg-turbo: Pillow would copy the pixels
    twice."""

    encoded: bytes
    size: tuple[int, int]
    shrinks: tuple[int, ...] = (8, 4, 2)

    def pixels(self, shrink: int = 1, rows: int | None = None) -> np.ndarray:
        """Return (height, width, 3), uint8, RGB; each side divided by ``shrink``, rounded up.

        With ``rows``, only that many first rows are needed: fewer than all may be returned, and
        damage below them may go undetected. Raises BrokenImageError.
        """
        if rows is not None and (pixels := self._first_rows(shrink, rows)) is not None:
            return pixels
        try:
            return self._decode(self.encoded, self.size[0], shrink)
        except ValueError:  # Pillow reads some of them, or says what is wrong
            image = read_image(self.encoded, lines=True)  # checked when it was opened
            return np.array(image.reduce(shrink) if shrink > 1 else image)

    def _first_rows(self, shrink: int, rows: int) -> np.ndarray | None:
        """Return at least the first ``rows`` rows, identical to those of the whole image; None if
        they cannot be decoded separately, or if that saves nothing.

        The decoder reads a copy whose header is patched to a smaller height.
        """
        # With chroma subsampling a row depends on the next one.
        height = -(-(rows + 1) * shrink // _ROWS_OF_BLOCKS) * _ROWS_OF_BLOCKS
        if height >= self.size[0] or (at := _height_offset(self.encoded)) is None:
            return None
        shortened = bytearray(self.encoded)
        shortened[at : at + 2] = height.to_bytes(2, "big")
        pixels = np.empty((height // shrink, -(-self.size[1] // shrink), 3), np.uint8)
        try:
            self._decode(shortened, height, shrink, pixels)
        except ValueError as error:
            if not _REST_IS_LEFT.fullmatch(str(error)):
                return None
        return pixels

    def _decode(
        self, encoded: bytes | bytearray, height: int, shrink: int, into: np.ndarray | None = None
    ) -> np.ndarray:
        """Decode a JPEG with the width of this one. May raise ValueError although the pixels have
        been decoded ``into`` the buffer."""
        height, width = (-(-side // shrink) for side in (height, self.size[1]))
        return simplejpeg.decode_jpeg(
            encoded, "RGB", min_height=height, min_width=width, min_factor=shrink, buffer=into
        )


def _height_offset(encoded: bytes) -> int | None:
    """Return the offset of the height, two bytes, in a JPEG's header; None unless rows are stored
    from top to bottom without restart markers."""
    at, place = len(_JPEG) - 1, None
    while at + 4 <= len(encoded) and encoded[at] == 0xFF and encoded[at + 1] != _RESTARTS:
        if encoded[at + 1] == _SCAN:
            return place
        if encoded[at + 1] in _SEQUENTIAL:
            place = at + 5
        at += 2 + int.from_bytes(encoded[at + 2 : at + 4], "big")
    return None


OpenImage = Pixels | Jpeg


@contextlib.contextmanager
def _opened(source: str | Path | bytes) -> Iterator[ImageFile]:
    """Open the image in a file, or in its bytes, with Pillow. Whatever is raised, also inside,
    becomes BrokenImageError."""
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with Image.open(file, formats=_formats()) as image:
            yield image
    except BrokenImageError:
        raise
    except UnidentifiedImageError as error:
        raise BrokenImageError("no image of a known format") from error
    except Image.DecompressionBombError as error:
        raise BrokenImageError(_TOO_LARGE) from error
    except Exception as error:  # each format raises what it likes
        raise BrokenImageError(reason_of(error)) from error


def image_size(encoded: bytes) -> tuple[int, int]:
    """Return the height and width in pixels of an encoded image; the first bytes may suffice.
    Raises BrokenImageError if these bytes do not contain the size."""
    with _opened(encoded) as image:
        return image.height, image.width


def read_image(source: str | Path | bytes, *, lines: bool = False) -> Image.Image:
    """Return the image in a file, or in its bytes, as 8-bit RGB. Raises BrokenImageError, see
    ``open_image``."""
    with _opened(source) as image:
        if not lines:
            _check_shape(image.height, image.width)
        image.load()
        whole: Image.Image = image
        is_wide = image.mode == "I" and image.format in _SIXTEEN_BITS_AS_I
        if is_wide or image.mode in _SIXTEEN_BITS:  # Pillow's ``convert`` would clip them
            values, white = np.asarray(image).astype(np.float32), 65535
            if isinstance(image, TiffImageFile):
                white = 2 ** image.tag_v2.get(_TIFF_BITS, (16,))[0] - 1
                if image.tag_v2.get(_TIFF_PHOTOMETRIC) == _WHITE_IS_ZERO:
                    values = white - values
            whole = Image.fromarray(np.rint(values * (255 / white)).astype(np.uint8))
        elif image.mode in ("I", "F"):
            values = np.asarray(image)
            low, high = values.min(), values.max()
            is_part = image.mode == "F" and 0 < high <= 1  # of white, or it is nearly black
            if not (low >= 0 and high <= 255) or is_part:
                raise BrokenImageError(
                    f"its values range from {low:g} to {high:g}, and the value of white "
                    "is unknown: convert it to 8 or 16 bits"
                )
        return whole.convert("RGB")


_LABEL_MODES = {"1", "L", "P", "I"} | _SIXTEEN_BITS
"""Pillow modes with one integer per pixel (the index for palettes)."""


def read_mask(encoded: bytes) -> np.ndarray:
    """Return the labels in the bytes of a mask file, (height, width), int32; palette indices for an
    image with a palette. Raises BrokenImageError, also for color images."""
    with _opened(encoded) as image:
        if image.format == "JPEG":
            raise BrokenImageError("it is a JPEG, whose compression changes labels: save it as PNG")
        if image.mode not in _LABEL_MODES:
            raise BrokenImageError(
                f"it has colors (mode {image.mode}) instead of one label per pixel: save "
                "it as 8-bit grayscale or with a palette"
            )
        return np.array(image).astype(np.int32)


def _check_shape(height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise BrokenImageError(
            f"its size, {width} x {height} pixels, exceeds the aspect ratio limit of {MAX_ASPECT:,}"
        )


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.preinit()  # the common ones are tried first
    Image.init()
    return tuple(name for name in Image.ID if name not in _NOT_READ)


# -- files and folders of images, one after the other ---------------------------------


@dataclass
class FoundImages:
    """The files to read, in order, and what was skipped."""

    paths: list[Path] = field(default_factory=list)
    named: set[Path] = field(default_factory=set)
    """The files that were named individually."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """Number of skipped files by extension; "hidden" for hidden ones."""
    unreadable: list[str] = field(default_factory=list)
    """Folders that could not be listed, with the reasons."""


def find_images(paths: Iterable[str], suffixes: tuple[str, ...] | None = None) -> FoundImages:
    """Find the named files, and the images below the named folders, sorted within each folder;
    links to folders are not followed. ``suffixes``: the extensions of images, None for Pillow's.
    Raises DataFolderError for a missing path and for a folder without images."""
    readable = {*_formats(), "MPO"}  # MPO: several JPEGs in one file, read as the first
    of_pillow = (name for name, kind in Image.registered_extensions().items() if kind in readable)
    known = suffixes or tuple(of_pillow)
    kinds = ", ".join(suffixes or (".jpg", ".png", "or another format of Pillow"))
    found = FoundImages()
    errors: list[OSError] = []
    for top in paths:
        try:
            os.stat(top)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            reason = "no such file or folder" if missing else error.strerror
            raise DataFolderError(f"{top or repr(top)}: {reason}") from None
        if not os.path.isdir(top):
            found.paths.append(Path(top))
            found.named.add(Path(top))
            continue
        inside = []
        for folder, folders, files in os.walk(top, onerror=errors.append):
            found.passed_over.update("hidden" for name in (*folders, *files) if is_hidden(name))
            folders[:] = filterfalse(is_hidden, folders)
            links = sum(os.path.islink(os.path.join(folder, name)) for name in folders)
            if links:
                found.passed_over["linked folder"] += links
            for name in filterfalse(is_hidden, files):
                suffix = os.path.splitext(name)[1].lower()
                path = Path(folder, name)
                if not name.lower().endswith(known):
                    found.passed_over[suffix or "no extension"] += 1
                elif path.is_symlink() or path.is_file():  # a link is checked when it is read
                    inside.append(path)
                else:
                    found.passed_over["not a file"] += 1
        found.unreadable = [f"{error.filename}: {error.strerror}" for error in errors]
        if not inside:
            why = found.unreadable[0] if errors else kinds
            raise DataFolderError(f"{top} contains no images ({why})")
        found.paths += sorted(inside)
    return found


def read_batches(
    paths: list[Path],
    load: Callable[[int], Batch],
    batch_size: int,
    broken: Callable[[Path, str], None],
) -> Iterator[tuple[list[Path], Batch]]:
    """Yield up to ``batch_size`` paths, and a batch of their images. ``load`` returns the fields of
    the image of the path of this number; if it is unreadable, ``broken`` is called with the path
    and the reason."""
    for first in range(0, len(paths), batch_size):
        good, samples = [], []
        for number, path in enumerate(paths[first : first + batch_size], first):
            try:
                samples.append(load(number))
                good.append(path)
            except BrokenImageError as error:
                broken(path, str(error))
        if good:
            yield good, collate(samples)
