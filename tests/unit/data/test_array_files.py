"""Files of arrays in every format: any part that is read is what NumPy slices out of the whole."""

import gzip
import itertools
import struct
import sys
import tracemalloc

import nibabel
import numpy as np
import pytest
import tifffile
from PIL import Image

from data.decode import read_image
from data.files import BrokenImageError, DataFolderError
from data.volumes import check_packages, open_array

pytestmark = pytest.mark.fast

WINDOWS = [(0, 24, 0, 40), (5, 6, 0, 40), (3, 20, 7, 33), (23, 24, 39, 40)]


def values(*shape, dtype=np.int16):
    return np.random.default_rng(0).integers(0, 127, shape).astype(dtype)


def read(path, *window):
    with open_array(str(path)) as array:
        part = array.read(tuple(slice(*each) for each in window))
        return array.shape, part


def write_npz(compressed, name="volume", order="C"):
    def write(path, array):
        save = np.savez_compressed if compressed else np.savez
        arrays = {name: np.asarray(array, order=order)}
        if name == "volume":
            arrays["other"] = np.zeros(3)
        save(path, **arrays)

    return write


def write_nifti(path, array):
    nibabel.Nifti1Image(np.ascontiguousarray(array.T), np.eye(4)).to_filename(path)


VOLUME_WRITERS = {
    "npy": (".npy", np.save),
    "npy in Fortran's order": (".npy", lambda path, a: np.save(path, np.asfortranarray(a))),
    "npz compressed": (".npz", write_npz(True)),
    "npz compressed in Fortran's order": (".npz", write_npz(True, "alone", "F")),
    "nifti": (".nii", write_nifti),
    "nifti compressed": (".nii.gz", write_nifti),
}


@pytest.mark.parametrize("dtype", ["int16", "float32", ">u2"])
@pytest.mark.parametrize("writer", VOLUME_WRITERS)
def test_any_part_of_a_volume(writer, dtype, tmp_path):
    suffix, write = VOLUME_WRITERS[writer]
    array, path = values(9, 24, 40, dtype=dtype), tmp_path / f"a{suffix}"
    write(path, array)
    for top, bottom, left, right in WINDOWS:
        shape, part = read(path, (2, 7), (top, bottom), (left, right))
        assert shape == array.shape
        np.testing.assert_array_equal(part, array[2:7, top:bottom, left:right])
    _, part = read(path, (0, 9), (0, 24), (0, 40))
    np.testing.assert_array_equal(part, array)


def test_values_of_a_nifti_file_are_scaled_as_it_says(tmp_path):
    array = values(9, 24, 40)
    image = nibabel.Nifti1Image(np.ascontiguousarray(array.T), np.eye(4))
    image.header.set_slope_inter(0.5, -3)
    image.to_filename(tmp_path / "a.nii")
    _, part = read(tmp_path / "a.nii", (2, 4), (0, 24), (0, 40))
    expected = nibabel.load(tmp_path / "a.nii").get_fdata().T[2:4]
    np.testing.assert_array_equal(part, expected)
    assert part.min() < 0


TIFF_KINDS = {
    "mapped": {},
    "big-endian": {"byteorder": ">"},
    "strips": {"rowsperstrip": 5, "compression": "zlib"},
    "compressed tiles": {"tile": (16, 16), "compression": "zlib"},
    "one strip": {"compression": "zlib", "rowsperstrip": 24},
}


@pytest.mark.parametrize("kind", TIFF_KINDS)
@pytest.mark.parametrize("samples", [None, 3, "planes"])
def test_any_part_of_a_tiff_image(kind, samples, tmp_path):
    path, how = tmp_path / "a.tif", dict(TIFF_KINDS[kind])
    array = values(24, 40, *([3] if samples else []), dtype=np.uint16)
    if samples:
        how |= {"photometric": "rgb", "planarconfig": "separate" if samples != 3 else "contig"}
    stored = array.transpose(2, 0, 1) if samples == "planes" else array
    with tifffile.TiffWriter(path, byteorder=how.pop("byteorder", "<")) as file:
        file.write(stored, **how)
    more = [(0, 3)] if samples else []
    for top, bottom, left, right in WINDOWS:
        shape, part = read(path, (top, bottom), (left, right), *more)
        assert shape == array.shape
        np.testing.assert_array_equal(part, array[top:bottom, left:right])


def test_only_the_tiles_and_strips_that_hold_the_rows_are_read(tmp_path, monkeypatch):
    count = []
    plain = tifffile.FileHandle.read

    def counted(self, size=-1):
        found = plain(self, size)
        count.append(len(found))
        return found

    array = np.random.default_rng(0).integers(0, 256, (64, 512)).astype(np.uint8)
    for how in ({"tile": (16, 16)}, {"rowsperstrip": 4}):
        tifffile.imwrite(tmp_path / "a.tif", array, compression="zlib", **how)
        with open_array(str(tmp_path / "a.tif")) as file, monkeypatch.context() as patch:
            patch.setattr(tifffile.FileHandle, "read", counted)
            count.clear()
            part = file.read((slice(16, 24), slice(0, 512)))
        np.testing.assert_array_equal(part, array[16:24])
        assert 8 * 512 < sum(count) < 17 * 512


# -- memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_a_slab_of_a_large_volume(suffix, tmp_path):
    path, array = tmp_path / f"a{suffix}", np.zeros((128, 512, 512), np.int16)
    array[100:102] = np.arange(512)
    write_nifti(path, array)
    window = (slice(100, 102), slice(0, 512), slice(0, 512))
    with open_array(str(path)) as file:
        tracemalloc.start()
        part = file.read(window)
        # gzip skips what is not wanted in pieces of up to 16 MB.
        assert tracemalloc.get_traced_memory()[1] < 40e6
        tracemalloc.stop()
    np.testing.assert_array_equal(part, array[window])


# -- what cannot be read ------------------------------------------------------------------


def cut(path, share=0.5):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def spoiled(kind, folder):
    """Write a file that cannot be read; returns its path."""
    array = values(9, 24, 40)
    path = folder / f"a{kind.partition(' ')[0]}"
    if kind.endswith("of objects"):
        np.save(path, np.array([{}, []], dtype=object), allow_pickle=True)
    elif kind.endswith("of words"):
        np.savez(path, np.array(["a", "b"]))
    elif kind.endswith("of two"):
        np.savez(path, a=array, b=array)
    elif kind.endswith("of text"):
        path.write_text("no array\n")
    elif kind.endswith("of nothing"):
        path.touch()
    else:
        suffix = kind.partition(" ")[0]
        if suffix == ".tif":
            tifffile.imwrite(path, array[0].astype(np.uint8))
        else:
            dict(VOLUME_WRITERS.values())[suffix](path, array)
        cut(path)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        ".npy of objects",
        ".npz of words",
        ".npz of two",
        *(f"{suffix} of text" for suffix in (".npy", ".npz", ".nii", ".nii.gz", ".tif")),
        *(f"{suffix} of nothing" for suffix in (".npy", ".npz", ".nii", ".nii.gz", ".tif")),
        *(f"{suffix} cut off" for suffix in (".npy", ".npz", ".nii", ".tif")),
    ],
)
def test_found_to_be_broken_when_it_is_opened(kind, tmp_path):
    path = spoiled(kind, tmp_path)
    with pytest.raises(BrokenImageError) as raised, open_array(str(path)):
        pass
    assert str(raised.value)
    assert "\n" not in str(raised.value)


def test_found_to_be_broken_when_it_is_read(tmp_path):
    path = tmp_path / "a.nii.gz"
    write_nifti(path, values(9, 24, 40))
    raw = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(raw[:5000]))
    with open_array(str(path)) as array:
        everything = tuple(slice(0, length) for length in array.shape)
        with pytest.raises(BrokenImageError):
            array.read(everything)


def test_a_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    check_packages(["a.npy", "b.tif"])
    with pytest.raises(
        DataFolderError, match="require the package nibabel: python3 -m pip install"
    ):
        check_packages(["a.npy", "b.nii.gz"])


def test_a_name_that_tells_no_format(tmp_path):
    path = tmp_path / "a.mha"
    path.touch()
    with (
        pytest.raises(BrokenImageError, match=r"extension is not one of \.npy, "),
        open_array(str(path)),
    ):
        pass


def test_a_sparse_tiff_file(tmp_path):
    array = values(32, 32, dtype=np.uint8)
    array[:16, 16:] = 0
    tiles = iter([array[:16, :16], None, array[16:, :16], array[16:, 16:]])
    tifffile.imwrite(
        tmp_path / "a.tif", tiles, shape=(32, 32), dtype=np.uint8, tile=(16, 16), compression="zlib"
    )
    _, part = read(tmp_path / "a.tif", (5, 20), (0, 32))
    np.testing.assert_array_equal(part, array[5:20])


def test_a_tiff_file_of_a_volume(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, values(16, 32, 32, dtype=np.uint8), tile=(16, 16, 16), volumetric=True)
    with pytest.raises(
        BrokenImageError, match="it is a TIFF volume; only 2-D TIFF images are supported"
    ):
        read(path)


def entries_of(content):
    """The offsets of a TIFF file's entries, 12 bytes each: tag, type, count, value."""
    (start,) = struct.unpack_from("<I", content, 4)
    (count,) = struct.unpack_from("<H", content, start)
    return range(start + 2, start + 2 + 12 * count, 12)


CHANGES = [
    *[("<H", 2, kind) for kind in range(20)],
    *[("<I", 4, count) for count in (0, 2, 2**31, 2**32 - 1)],
    *[("<I", 8, value) for value in (0, 1, 3, 8, 255, 2**16, 2**31, 2**32 - 1)],
    ("<HIHH", 2, (3, 2, 40, 40)),  # two values
]


@pytest.mark.parametrize("how", [{}, {"tile": (16, 16)}, {"rowsperstrip": 5}], ids=str)
def test_a_tiff_file_is_read_as_it_says_or_broken(how, tmp_path):
    """With any one tag of its header changed: no other error, and no array of another shape."""
    path, readable, broken = tmp_path / "a.tif", 0, 0
    tifffile.imwrite(path, values(24, 40, dtype=np.uint8), compression="zlib", **how)
    content = path.read_bytes()
    for at, (form, offset, value) in itertools.product(entries_of(content), CHANGES):
        changed = bytearray(content)
        struct.pack_into(form, changed, at + offset, *(value if form == "<HIHH" else [value]))
        path.write_bytes(changed)
        try:
            with open_array(str(path)) as array:
                assert all(isinstance(side, int) and side > 0 for side in array.shape)
                window = [slice(side - min(side, 6), side) for side in array.shape]
                part = array.read(tuple(window))
        except BrokenImageError:
            broken += 1
        else:
            assert part.shape == tuple(each.stop - each.start for each in window)
            readable += 1
    assert min(readable, broken) > 20


def npy(shape, dtype="<i2"):
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + bytes(100)


@pytest.mark.filterwarnings("error")
def test_an_npy_file_of_an_impossible_shape(tmp_path):
    path = tmp_path / "a.npy"
    for shape in (
        "(0, 4)",
        "(-4, -4)",
        f"({2**70},)",
        f"({2**32}, {2**32})",
        "(4.5,)",
        "4",
        "(2,) * 9",
    ):
        for dtype in ("<i2", "<f8"):
            path.write_bytes(npy(shape, dtype))
            with pytest.raises(BrokenImageError), open_array(str(path)):
                pass
    path.write_bytes(npy("(5, 10)"))
    assert read(path, (0, 5), (0, 10))[0] == (5, 10)


def test_headers_of_nifti_files(tmp_path, caplog):
    """Any damage is an unreadable file or another array; nibabel writes nothing about it."""
    path, outcomes = tmp_path / "a.nii", set()
    write_nifti(path, values(3, 4, 5))
    content = path.read_bytes()
    for at, two in itertools.product(
        range(0, 352, 4), (b"\0\0", b"\xff\xff", b"\x7f\xff", b"\2\0")
    ):
        path.write_bytes(content[:at] + two + content[at + 2 :])
        try:
            with open_array(str(path)) as array:
                size = [min(side, 6) for side in array.shape]
                assert array.read(tuple(slice(0, n) for n in size)).shape == tuple(size)
            outcomes.add("read")
        except BrokenImageError:
            outcomes.add("broken")
    assert outcomes == {"read", "broken"}
    assert not caplog.records


# -- what zero means in a TIFF file -----------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"tile": (16, 16), "compression": "zlib"}], ids=str)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, bool])
def test_zero_may_be_white(how, dtype, tmp_path):
    path, array = tmp_path / "a.tif", values(24, 40, dtype=dtype)
    tifffile.imwrite(path, array, photometric="miniswhite", **how)
    _, part = read(path, (3, 20), (7, 33))
    expected = ~array if dtype is bool else np.iinfo(dtype).max - array
    assert part.dtype == dtype
    np.testing.assert_array_equal(part, expected[3:20, 7:33])
    if dtype == np.uint8:  # as images are decoded
        np.testing.assert_array_equal(part, np.array(read_image(path))[3:20, 7:33, 0])


def test_white_is_undefined_for_floats(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", values(8, 8, dtype=np.float32), photometric="miniswhite")
    with pytest.raises(BrokenImageError, match=r"\(MinIsWhite\), which is undefined for float32"):
        read(tmp_path / "a.tif")


def test_a_palette(tmp_path):
    Image.fromarray(values(8, 8, dtype=np.uint8)).convert("P").save(tmp_path / "a.tif")
    with pytest.raises(BrokenImageError, match="are indices into a palette of colors: save it as"):
        read(tmp_path / "a.tif")
