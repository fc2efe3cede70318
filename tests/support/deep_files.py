"""Files of more than 8 bits, of several bands, and of DICOM, as tests write them."""

import io
import struct
import zlib

import tifffile
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

_COLORS = {1: 0, 2: 4, 3: 2, 4: 6}


def png_of_16_bits(values):
    """A PNG of (height, width[, bands]) values, which Pillow cannot write in colors."""
    height, width, *bands = values.shape
    kind = _COLORS[bands[0] if bands else 1]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)

    def chunk(name, content):
        check = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + check

    head = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    parts = (b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def tiff(values, **options):
    """A TIFF by tifffile."""
    file = io.BytesIO()
    tifffile.imwrite(file, values, **options)
    return file.getvalue()


def data_set(values, bits=None, colors="MONOCHROME2", **elements):
    """A data set of DICOM with these pixels, (height, width[, 3]); ``bits``: of a stored value."""
    made = Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made.file_meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    made.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    made.SOPClassUID = SecondaryCaptureImageStorage
    made.SOPInstanceUID = made.file_meta.MediaStorageSOPInstanceUID
    made.Rows, made.Columns = values.shape[:2]
    made.SamplesPerPixel = values.shape[2] if values.ndim == 3 else 1
    if made.SamplesPerPixel > 1:
        made.PlanarConfiguration = 0
    made.PhotometricInterpretation = colors
    made.BitsAllocated = 8 * values.dtype.itemsize
    made.BitsStored = bits or made.BitsAllocated
    made.HighBit = made.BitsStored - 1
    made.PixelRepresentation = int(values.dtype.kind == "i")
    made.PixelData = values.tobytes() + bytes(values.nbytes % 2)
    for name, value in elements.items():
        setattr(made, name, value)
    return made


def dicom(values, bits=None, colors="MONOCHROME2", **elements):
    """The bytes of a DICOM file, see ``data_set``."""
    return written(data_set(values, bits, colors, **elements))


def written(made):
    """The bytes of a DICOM file with this data set."""
    file = io.BytesIO()
    made.save_as(file, enforce_file_format=True)
    return file.getvalue()
