"""Read a DICOM file of one frame with pydicom, which is imported when the first one is read.

Values are those after rescale or the modality LUT, such as Hounsfield units. The window is the
first of the file's VOI LUTs or windows, as DICOM PS3.3 C.11.2 defines them.
"""

from __future__ import annotations

import io
import logging
import warnings
from functools import cache
from typing import Any

import numpy as np

from data.files import BrokenImageError, DataFolderError, reason_of
from data.intensity import Range, RawImage

INSTALL = "python3 -m pip install -r requirements-imaging.txt"
SUFFIXES = (".dcm", ".dicom")
_DEFLATED = "1.2.840.10008.1.2.1.99"
_MOST_BITS = 32
_LARGER_THAN_DECODED = 2
"""How many times larger than the image its compressed form may be: an RLE of zeros claims 64 times
its size."""


def is_dicom(encoded: bytes) -> bool:
    """Return whether these first bytes are those of a DICOM file."""
    return encoded[128:132] == b"DICM"


@cache
def _pydicom() -> Any:
    try:
        import pydicom
        import pydicom.filereader
        import pydicom.pixels
    except ImportError:
        raise DataFolderError(f"DICOM files require the package pydicom: {INSTALL}") from None
    # What is wrong with a file is reported by this program.
    logging.getLogger("pydicom").setLevel(logging.CRITICAL + 1)
    warnings.filterwarnings("ignore", module=r"pydicom\.")
    return pydicom


def read_size(encoded: bytes) -> tuple[int, int]:
    """Return height and width in pixels; the first bytes may suffice. Raises BrokenImageError."""
    dataset = _parsed(encoded, with_pixels=False)
    try:
        return int(dataset.Rows), int(dataset.Columns)
    except (AttributeError, TypeError, ValueError):
        raise BrokenImageError("it has no pixels (no Rows and Columns)") from None


def read_dicom(encoded: bytes, max_pixels: int, too_large: str, *, as_shown: bool) -> RawImage:
    """Return the image in the bytes of a DICOM file, with ``as_shown`` its window.

    ``too_large``: the reason to give if it has more than ``max_pixels``. Raises BrokenImageError,
    and DataFolderError if a package is missing.
    """
    dataset = _parsed(encoded, with_pixels=True)
    try:
        _check_frame(dataset, max_pixels, too_large)
        _check_compressed(dataset, max_pixels, too_large)
        return _raw_image(dataset, as_shown=as_shown)
    except (BrokenImageError, DataFolderError):
        raise
    except Exception as error:  # pydicom and each decoder raise what they like
        raise BrokenImageError(f"it is damaged ({reason_of(error)})") from error


def _parsed(encoded: bytes, *, with_pixels: bool) -> Any:
    """Return the data set. Raises BrokenImageError."""
    pydicom = _pydicom()
    try:
        # The header is read first, because pydicom inflates a deflated file without a limit.
        file = io.BytesIO(encoded)
        file.seek(132)
        header = pydicom.filereader.read_dataset(
            file, False, True, stop_when=lambda tag, vr, length: tag >> 16 != 2
        )
        if str(header.get("TransferSyntaxUID", "")) == _DEFLATED:
            raise BrokenImageError(
                "it is deflated as a whole: save it uncompressed, or as JPEG 2000"
            )
        return pydicom.dcmread(io.BytesIO(encoded), stop_before_pixels=not with_pixels)
    except BrokenImageError:
        raise
    except Exception as error:  # pydicom raises many kinds
        raise BrokenImageError(f"it is damaged ({reason_of(error)})") from error


def _check_frame(dataset: Any, max_pixels: int, too_large: str) -> None:
    """Raise BrokenImageError unless the data set has one image."""
    if not any(name in dataset for name in ("PixelData", "FloatPixelData", "DoubleFloatPixelData")):
        kind = dataset.get("SOPClassUID")
        raise BrokenImageError(f"it has no pixels ({kind.name if kind else 'no SOP class'})")
    frames = int(dataset.get("NumberOfFrames") or 1)
    if frames != 1:
        raise BrokenImageError(
            f"it has {frames:,} frames: save each as a file, or all as an array for --data_source "
            "volumes"
        )
    if dataset.Rows * dataset.Columns > max_pixels:
        raise BrokenImageError(too_large)
    if dataset.get("BitsAllocated", 0) > _MOST_BITS and "PixelData" in dataset:
        raise BrokenImageError(f"it has {dataset.BitsAllocated} bits per value")


def _check_compressed(dataset: Any, max_pixels: int, too_large: str) -> None:
    """Raise BrokenImageError if compressed pixels claim to be much larger than the data set says,
    and DataFolderError if their decoder is not installed."""
    syntax = dataset.file_meta.TransferSyntaxUID
    if not syntax.is_compressed:
        return
    from pydicom.encaps import get_frame
    from pydicom.pixels import get_decoder

    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        raise BrokenImageError(f"its compression, {syntax.name}, is not supported") from None
    if not decoder.is_available:
        raise DataFolderError(f"DICOM files compressed as {syntax.name} require: {INSTALL}")
    frame = get_frame(dataset.PixelData, 0, number_of_frames=1)
    decoded = dataset.Rows * dataset.Columns * dataset.SamplesPerPixel * dataset.BitsAllocated // 8
    if len(frame) > _LARGER_THAN_DECODED * decoded + 2**16:
        raise BrokenImageError("its compressed pixels are larger than the image")
    claimed = _codestream_size(frame)
    if claimed and claimed[0] * claimed[1] > max_pixels:
        raise BrokenImageError(too_large)
    if claimed and claimed != (dataset.Rows, dataset.Columns):
        raise BrokenImageError(
            f"it has {dataset.Columns} x {dataset.Rows} pixels, its compressed pixels "
            f"{claimed[1]} x {claimed[0]}"
        )


def _codestream_size(frame: bytes) -> tuple[int, int] | None:
    """Return the height and width that a JPEG, JPEG-LS or JPEG 2000 codestream claims; None if it
    is none of them. Decoders allocate that much, whatever the data set says."""
    start = frame.find(b"\xff\x4f\xff\x51", 0, 4096)  # behind the boxes of a .jp2 file, if any
    if start >= 0:  # SIZ: length, capabilities, then the far and the near corner
        right, bottom, left, top = (
            int.from_bytes(frame[start + at : start + at + 4], "big") for at in (8, 12, 16, 20)
        )
        return bottom - top, right - left
    if not frame.startswith(b"\xff\xd8"):
        return None
    at = 2
    while at + 9 <= len(frame):
        if frame[at] != 0xFF:
            break
        marker = frame[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)) or marker == 0xF7:
            sides = frame[at + 5 : at + 7], frame[at + 7 : at + 9]
            return int.from_bytes(sides[0], "big"), int.from_bytes(sides[1], "big")
        else:
            at += 2 + int.from_bytes(frame[at + 2 : at + 4], "big")
    raise BrokenImageError("it is damaged (its JPEG has no size)")


def _raw_image(dataset: Any, *, as_shown: bool) -> RawImage:
    from pydicom.pixels import apply_color_lut, apply_modality_lut, pixel_array

    values = pixel_array(dataset, index=0)  # colors are converted to RGB
    colors = str(dataset.PhotometricInterpretation)
    if colors == "PALETTE COLOR":
        values = apply_color_lut(values, dataset)
        if values.dtype != np.uint8:  # entries of 16 bits use the whole range (C.7.6.3.1.6)
            values = (values >> 8).astype(np.uint8)
    if values.ndim == 3:
        bits = 8 if values.dtype == np.uint8 else dataset.BitsStored
        return RawImage(values, (0, 2**bits - 1))

    full: Range | None = None  # floats have none
    if "PixelData" in dataset:
        bits, is_signed = dataset.BitsStored, bool(dataset.PixelRepresentation)
        full = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
        if bits < 8 and values.dtype == np.uint8:
            values = values.astype(np.uint16)  # white is not 255
    slope, intercept = (
        float(default if (value := dataset.get(name)) is None else value)
        for name, default in (("RescaleSlope", 1), ("RescaleIntercept", 0))
    )
    if sequence := dataset.get("ModalityLUTSequence"):
        values, full = (
            apply_modality_lut(values, dataset),
            (0, 2 ** sequence[0].LUTDescriptor[2] - 1),
        )
    elif (slope, intercept) != (1, 0):
        values = values * slope + intercept
        if full:
            low, high = sorted(end * slope + intercept for end in full)
            full = low, high
    window: Range | None = None
    if as_shown:
        values, window = _windowed(values, dataset)
    return RawImage(values[..., None], full, window, is_inverted=colors == "MONOCHROME1")


def _windowed(values: np.ndarray, dataset: Any) -> tuple[np.ndarray, Range | None]:
    """Return the values, through the file's VOI LUT or sigmoid if it has one, and the range of them
    that it shows; None if the file does not say, or says something impossible."""
    from pydicom.pixels import apply_voi

    if sequence := dataset.get("VOILUTSequence"):
        table = apply_voi(np.rint(values).astype(np.int32), dataset)
        return table, (0, 2 ** sequence[0].LUTDescriptor[2] - 1)
    center, width = (_first_number(dataset.get(name)) for name in ("WindowCenter", "WindowWidth"))
    function = str(dataset.get("VOILUTFunction") or "LINEAR").upper()
    if center is None or width is None or width < (1 if function == "LINEAR" else 1e-9):
        return values, None
    if function == "SIGMOID":  # C.11.2.1.3.1
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-4 * (values.astype(np.float64) - center) / width)), (0, 1)
    if function == "LINEAR":  # C.11.2.1.2.1; for LINEAR_EXACT, C.11.2.1.3.2, without the shift
        center, width = center - 0.5, width - 1
    return values, (center - width / 2, center + width / 2)


def _first_number(value: Any) -> float | None:
    """Return a number, the first one if there are several windows; None without one."""
    if value is None or isinstance(value, str):
        return None
    values = value if hasattr(value, "__len__") else [value]
    return float(values[0]) if len(values) else None
