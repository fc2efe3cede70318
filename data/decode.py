"""Decode images, in the same way for training, validation and ``--predict``.

``open_image`` opens the bytes of one image; ``data/raw_images.py`` and ``data/dicom.py`` read those
of more than 8 bits, which ``Reading`` maps to bytes. ``find_images`` and ``read_batches`` find and
read files and folders named on a command line.
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
from torchvision.datasets.folder import IMG_EXTENSIONS

from data import dicom, raw_images
from data.batch import Batch, collate
from data.files import BrokenImageError, DataFolderError, is_hidden, reason_of
from data.intensity import COLORS, FULL, Intensity, RawImage

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

SUFFIXES = (*IMG_EXTENSIONS, *dicom.SUFFIXES)
"""The file extensions of images, in small letters: torchvision's, and DICOM's."""
_NOT_READ = {"EPS", "BUFR", "GRIB", "HDF5", "MPEG", "WMF"}
"""Pillow runs the Ghostscript interpreter for EPS, and only recognizes the others."""

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


@dataclass(frozen=True)
class Reading:
    """How the values in image files become what a model takes."""

    channels: int = 3
    intensity: Intensity = FULL

    @property
    def is_color(self) -> bool:
        """Whether the model takes gray or color images, between which files are converted."""
        return self.channels in COLORS

    def pixels(self, raw: RawImage) -> np.ndarray:
        """Return (height, width, bands), uint8: RGB, or for a model of neither 1 nor 3 channels
        these. Raises BrokenImageError."""
        bands = raw.values.shape[2]
        if not (raw.is_color if self.is_color else bands == self.channels):
            raise BrokenImageError(f"it has {bands} bands, but --in_chans is {self.channels}")
        pixels = self.intensity.to_bytes(raw)
        return np.repeat(pixels, 3, axis=2) if self.is_color and bands == 1 else pixels


def open_image(encoded: bytes, reading: Reading = Reading(), *, lines: bool = False) -> OpenImage:
    """Return the image in the bytes of a file. Raises BrokenImageError, also for more than
    ``MAX_PIXELS`` and, unless ``lines``, for an aspect ratio above ``MAX_ASPECT``; and
    DataFolderError if a package is missing."""
    if encoded.startswith(_JPEG) and reading.is_color:
        with contextlib.suppress(ValueError):  # Pillow says what is wrong
            height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
            if colours in _JPEG_COLOURS:
                if height * width > MAX_PIXELS:
                    raise BrokenImageError(_TOO_LARGE)
                if not lines:
                    _check_shape(height, width)
                return Jpeg(encoded, (height, width))
    if (raw := read_raw(encoded, reading, lines=lines)) is not None:
        return Pixels(reading.pixels(raw))
    return Pixels(np.array(read_image(encoded, lines=lines)))


def read_raw(encoded: bytes, reading: Reading, *, lines: bool = False) -> RawImage | None:
    """Return the image in the bytes of a file as it is stored; None if ``read_image`` reads it: an
    image of 8 bits, or "full" gray and color images. Raises what ``open_image`` raises."""
    raw: RawImage | None = None
    if dicom.is_dicom(encoded):
        as_shown = reading.intensity.kind == "auto"
        raw = dicom.read_dicom(encoded, MAX_PIXELS, _TOO_LARGE, as_shown=as_shown)
    elif reading.is_color and (reading.intensity.kind == "full" or raw_images.is_plain(encoded)):
        return None
    elif raw_images.is_tiff(encoded):
        raw = raw_images.read_tiff(encoded, reading.channels, MAX_PIXELS, _TOO_LARGE)
    if raw is None:
        with _opened(encoded) as image:
            if not lines:
                _check_shape(image.height, image.width)
            return raw_images.raw_of_pillow(image, encoded, reading.channels)
    if not lines:
        _check_shape(*raw.values.shape[:2])
    return raw


class Pixels:
    """A decoded image. ``size`` is its height and width in pixels."""

    shrinks: tuple[int, ...] = ()
    """Factors by which decoding can downscale the image at lower cost."""

    def __init__(self, pixels: np.ndarray) -> None:
        """``pixels``: (height, width, bands), uint8, RGB or ``Reading.channels`` bands."""
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
    if dicom.is_dicom(encoded):
        return dicom.read_size(encoded)
    if raw_images.is_tiff(encoded) and (size := raw_images.tiff_size(encoded)):
        return size
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
        if (raw := raw_images.gray_of_pillow(image)) is None:
            pass
        elif raw.full:  # Pillow's ``convert`` would clip them
            whole = Image.fromarray(FULL.to_bytes(raw)[..., 0])
        else:
            low, high = raw.values.min(), raw.values.max()
            is_part = image.mode == "F" and 0 < high <= 1  # of white, or it is nearly black
            if not (low >= 0 and high <= 255) or is_part:
                raise BrokenImageError(
                    f"its values range from {low:g} to {high:g}, and the value of white "
                    "is unknown: convert it to 8 or 16 bits, or set --intensity LOW HIGH"
                )
        return whole.convert("RGB")


_LABEL_MODES = {"1", "L", "P", "I"} | raw_images.SIXTEEN_BITS
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
    known = suffixes or (*of_pillow, *dicom.SUFFIXES)
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
