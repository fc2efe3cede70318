"""Decodes images: one, in the same way for training, validation and ``--predict``; or many files.

``open_image`` opens the bytes of one image. ``find_images`` and ``read_batches`` find and read the
files and folders that are named on a command line.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import filterfalse
from pathlib import Path

import numpy as np
import simplejpeg
import torch
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from data.files import BrokenImageError, DataFolderError, is_hidden, read_bytes, reason_of

# Pillow warns of sizes between its two limits, palettes, EXIF: nothing that changes training.
warnings.filterwarnings("ignore", module=r"PIL\.")

_NOT_READ = {"EPS", "BUFR", "GRIB", "HDF5", "MPEG", "WMF"}
"""Pillow runs Ghostscript, an interpreter, for the first, and only recognises the others."""

_SIXTEEN_BITS = {"I;16", "I;16B", "I;16L", "I;16N"}
_SIXTEEN_BITS_AS_I = {"PNG", "PPM"}
"""Formats whose grey images of more than 8 bits Pillow scales to 0..65535 in mode I."""

_TIFF_BITS, _TIFF_PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0

_JPEG = b"\xff\xd8\xff"
_JPEG_COLOURS = ("YCbCr", "Gray")
"""The colour spaces that libjpeg-turbo converts to RGB as Pillow does."""

# -- one image -------------------------------------------------------------------------


def open_image(encoded: bytes) -> OpenImage:
    """Return the image that the bytes of a file hold. Raises BrokenImageError."""
    if encoded.startswith(_JPEG):
        with contextlib.suppress(ValueError):  # Pillow says what is wrong
            height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
            if colours in _JPEG_COLOURS:
                _check_shape(height, width)
                return Jpeg(encoded, (height, width))
    return Pixels(np.array(read_image(encoded)))


class Pixels:
    """An image that is decoded already. ``size`` is its height and width in pixels."""

    shrinks: tuple[int, ...] = ()
    """The factors by which its sides can be divided while it is decoded, with less work."""

    def __init__(self, pixels: np.ndarray) -> None:
        """``pixels``: (height, width, 3), uint8, RGB."""
        self._pixels, self.size = pixels, (pixels.shape[0], pixels.shape[1])

    def pixels(self, shrink: int = 1) -> np.ndarray:
        assert shrink == 1
        return self._pixels


@dataclass
class Jpeg:
    """A JPEG that is decoded when its pixels are asked for, by libjpeg-turbo alone: Pillow copies
    them two times more."""

    encoded: bytes
    size: tuple[int, int]
    shrinks: tuple[int, ...] = (8, 4, 2)

    def pixels(self, shrink: int = 1) -> np.ndarray:
        """Return (height, width, 3), uint8, RGB; each side divided by ``shrink``, rounded up.
        Raises BrokenImageError."""
        height, width = (-(-side // shrink) for side in self.size)
        try:
            return simplejpeg.decode_jpeg(
                self.encoded, "RGB", min_height=height, min_width=width, min_factor=shrink
            )
        except ValueError:  # Pillow reads some of them, or says what is wrong
            image = read_image(self.encoded)
            return np.array(image.reduce(shrink) if shrink > 1 else image)


OpenImage = Pixels | Jpeg


def image_size(encoded: bytes) -> tuple[int, int]:
    """Return the height and width in pixels of an encoded image; its first bytes may be enough.
    Raises BrokenImageError if the size is not in these bytes."""
    try:
        with Image.open(io.BytesIO(encoded), formats=_formats()) as image:
            return image.height, image.width
    except Exception as error:  # each format raises what it likes
        raise BrokenImageError(reason_of(error)) from error


def read_image(source: str | Path | bytes) -> Image.Image:
    """Return the image in a file, or in the bytes of one, as 8-bit RGB. Raises BrokenImageError."""
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with Image.open(file, formats=_formats()) as image:
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
                if not (low >= 0 and high <= 255):
                    raise BrokenImageError(
                        f"its values run from {low:g} to {high:g}, and which value is white is "
                        "unknown: convert it to 8 or 16 bits"
                    )
            return whole.convert("RGB")
    except UnidentifiedImageError as error:
        raise BrokenImageError("no image of a known format") from error
    except Exception as error:  # each format raises what it likes
        raise BrokenImageError(reason_of(error)) from error


def _check_shape(height: int, width: int) -> None:
    if max(height, width) > 1000 * min(height, width):  # the shorter side is resized to hundreds
        raise BrokenImageError(f"its {width} x {height} pixels are a line")


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.preinit()  # the common ones are tried first
    Image.init()
    return tuple(name for name in Image.ID if name not in _NOT_READ)


# -- files and folders of images, one after the other ---------------------------------


@dataclass
class FoundImages:
    """The files to read, in order, and what was skipped on the way to them."""

    paths: list[Path] = field(default_factory=list)
    named: set[Path] = field(default_factory=set)
    """The files that were named one by one."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """How many files were skipped because they are hidden, or are not images, by extension."""
    unreadable: list[str] = field(default_factory=list)
    """The folders that could not be listed, each with the reason."""


def find_images(paths: Iterable[str]) -> FoundImages:
    """Find the files named, and the images anywhere below the folders named, sorted in each; links
    to folders are not followed. Raises DataFolderError for a path that does not exist, and for a
    folder without images."""
    readable = {*_formats(), "MPO"}  # MPO: several JPEGs in one file, read as the first
    known = {suffix for suffix, kind in Image.registered_extensions().items() if kind in readable}
    found = FoundImages()
    errors: list[OSError] = []
    for top in paths:
        try:
            os.stat(top)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            reason = "there is no such file or folder" if missing else error.strerror
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
                if suffix not in known:
                    found.passed_over[suffix or "no extension"] += 1
                elif path.is_symlink() or path.is_file():  # a link is checked when it is read
                    inside.append(path)
                else:
                    found.passed_over["no file"] += 1
        found.unreadable = [f"{error.filename}: {error.strerror}" for error in errors]
        if not inside:
            why = found.unreadable[0] if errors else ".jpg, .png, or what Pillow reads"
            raise DataFolderError(f"{top} holds no images ({why})")
        found.paths += sorted(inside)
    return found


def read_batches(
    paths: list[Path], transform: Callable, batch_size: int, broken: Callable[[Path, str], None]
) -> Iterator[tuple[list[Path], torch.Tensor]]:
    """Yield up to ``batch_size`` paths and their images, (count, channels, size, size). An image
    that cannot be read is left out, and ``broken`` is called with its path and the reason."""
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
