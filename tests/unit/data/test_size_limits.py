"""Sizes that files claim: each kind has a limit, which is looked at before memory is taken."""

import gzip
import io
import re
import struct
import subprocess
import tarfile
import zipfile
import zlib

import nibabel
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tifffile
from PIL import Image

from data import tables, volumes
from data.batch import BatchShard
from data.class_order import in_order
from data.decode import MAX_PIXELS, image_size, open_image, read_mask
from data.files import BrokenImageError, DataFolderError, SizeLimit, read_bytes
from data.image_table import read_table
from data.open import open_data
from data.pack import pack
from data.segmentation import open_masked
from data.volumes import open_array
from tests.support.archives import write_tar
from tests.support.jpegs import jpeg
from tests.support.little_memory import little_memory, sparse
from tests.support.loading import arguments, wanted
from tests.support.masked_images import encoded, request_of, write_masked

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def _little_memory():
    with little_memory():
        yield


# -- pixels ---------------------------------------------------------------------------------


def jpeg_of(width, height):
    """A small JPEG whose header says another size."""
    content = bytearray(jpeg(np.zeros((8, 8, 3), np.uint8)))
    at = content.index(b"\xff\xc0")
    content[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(content)


def png_of(width, height, **how):
    """A small PNG whose header says another size."""
    content = bytearray(encoded(np.zeros((8, 8), np.uint8), **how))
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    return bytes(content)


@pytest.mark.parametrize("made", [jpeg_of, png_of])
def test_images_of_too_many_pixels(made):
    assert MAX_PIXELS == 2 * Image.MAX_IMAGE_PIXELS  # so that all formats have the same limit
    large = made(20_000, 20_000)
    told = "it has more than 178,956,970 pixels: for larger images use --data_source volumes"
    for lines in (False, True):
        with pytest.raises(BrokenImageError, match=told):
            open_image(large, lines=lines)
    with pytest.raises(BrokenImageError, match=told):
        image_size(large)
    assert image_size(made(13_000, 13_700)) == (13_700, 13_000)
    assert open_image(jpeg_of(13_000, 13_700)).size == (13_700, 13_000)


def test_masks_of_too_many_pixels():
    with pytest.raises(BrokenImageError, match="it has more than 178,956,970 pixels"):
        read_mask(png_of(20_000, 20_000))


def test_they_count_as_unreadable_images(tmp_path):
    for split in ("train", "val"):
        for name, content in (
            ("a", jpeg_of(20_000, 20_000)),
            ("b", jpeg(np.ones((16, 16, 3), "B"))),
        ):
            path = tmp_path / split / "class" / f"{name}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    source = open_data(wanted(arguments(tmp_path, batch_size=2)))
    for loader in (source.train_loader(2, BatchShard()), source.val_loader(2, BatchShard())):
        assert len(list(loader.epoch(0))) == 1
        ((path, reason, *_),) = loader.bad_images()
        assert path.endswith("a.jpg")
        assert reason.startswith("it has more than 178,956,970 pixels")


def test_a_line_of_pixels_has_one_window(tmp_path):
    """It is unreadable; as windows, it would be read a million times."""
    write_masked(tmp_path, "pairs", [(16, 16)], [(16, 16), (16, 16)])
    image, _ = sorted((tmp_path / "val").rglob("*.bmp"))
    image.write_bytes(png_of(100_000_000, 1))
    split = open_masked(request_of(tmp_path)).splits["val"]
    assert split.counts.tolist() == [1, 1]
    with pytest.raises(BrokenImageError, match="exceeds the aspect ratio limit of 1,000"):
        split.picture(0)


# -- bytes ----------------------------------------------------------------------------------


def test_a_file_that_is_no_image_by_its_size(tmp_path):
    path = sparse(tmp_path / "film.jpg")
    told = "it has 8,589,934,592 bytes; the limit for a file of one image is 1,073,741,824"
    for size in (None, 2**33):
        with pytest.raises(BrokenImageError, match=told):
            read_bytes(str(path), 0, size)
    assert read_bytes(str(path), 0, 10) == bytes(10)


@pytest.mark.parametrize("protocol", ["", "file://"])
def test_the_limit_itself(tmp_path, protocol):
    path, limit = tmp_path / "file", SizeLimit("a test", 100)
    for size in (0, 99, 100):
        path.write_bytes(b"x" * size)
        assert read_bytes(f"{protocol}{path}", limit=limit) == b"x" * size
    path.write_bytes(b"x" * 101)
    with pytest.raises(BrokenImageError, match="101 bytes; the limit for a test is 100"):
        read_bytes(f"{protocol}{path}", limit=limit)
    assert read_bytes(f"{protocol}{path}", 50, limit=limit) == b"x" * 51


def shards(root, files):
    for split in ("train", "val"):
        write_tar(
            root / split / f"{split}.tar", {f"{split}.cls": b"1", f"{split}.png": png_of(8, 8)}
        )
    return [sparse(root / name) for name in files]


@pytest.mark.parametrize("name", ["classes.json", "classes.txt", "packing.json"])
def test_text_beside_shards(tmp_path, name):
    shards(tmp_path, [name])
    told = f"{name} cannot be read: it has .* bytes; the limit for a file of text or JSON is 67,"
    with pytest.raises(DataFolderError, match=told):
        open_data(wanted(arguments(tmp_path, data_source="webdataset")))


def test_lists_and_tables(tmp_path):
    path = sparse(tmp_path / "list")
    with pytest.raises(
        DataFolderError, match=r"--class_map .* the limit for a file of text or JSON"
    ):
        in_order(["a"], class_map=str(path))
    with pytest.raises(DataFolderError, match=r"--labels .* the limit for a table of labels is"):
        read_table(arguments(tmp_path, labels=str(path)))
    write_masked(tmp_path / "voc", "voc", [(16, 16)], [(16, 16)])
    names = sparse(tmp_path / "voc" / "classes.txt")
    with pytest.raises(
        DataFolderError, match=r"classes.txt cannot be read: .* limit for a file of"
    ):
        open_masked(request_of(tmp_path / "voc"))
    names.unlink()
    sparse(tmp_path / "voc" / "ImageSets" / "Segmentation" / "val.txt")
    with pytest.raises(
        DataFolderError, match=r"val.txt, the list of images: .* limit for a file of"
    ):
        open_masked(request_of(tmp_path / "voc"))


# -- tar files ------------------------------------------------------------------------------


def header(name, size, kind=tarfile.REGTYPE):
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


TARS = {
    "a label of 64 GB": (header("a.json", 2**36), "a.json has .* the limit for a file of text"),
    "a pax header of 64 GB": (
        header("x", 2**36, tarfile.XHDTYPE),
        "a header in it has .* limit for",
    ),
    "a long name of 64 GB": (
        header("x", 2**36, tarfile.GNUTYPE_LONGNAME),
        "a header in it has .* li",
    ),
    "a negative size": (header("a.png", -(2**20)), "a member's size is negative"),
    "a negative long name": (
        header("x", -1, tarfile.GNUTYPE_LONGNAME),
        "a member's size is negative",
    ),
}


@pytest.mark.parametrize("kind", TARS)
def test_what_tar_headers_say(tmp_path, kind):
    content, told = TARS[kind]
    shards(tmp_path, [])
    sparse(tmp_path / "val" / "val.tar", content, 2**37)
    with pytest.raises(DataFolderError, match=f"val.tar (cannot be read: )?.*{told}"):
        open_data(wanted(arguments(tmp_path, data_source="webdataset")))


def test_a_pax_header_with_a_negative_size(tmp_path):
    """tarfile would go back to it for ever."""
    shards(tmp_path, [])
    with tarfile.open(tmp_path / "val" / "val.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("a.png")
        member.pax_headers = {"size": "-2048"}
        tar.addfile(member)
    with pytest.raises(DataFolderError, match="a member's size is negative"):
        open_data(wanted(arguments(tmp_path, data_source="webdataset")))


@pytest.mark.parametrize("form", ["gnu", "pax"])
@pytest.mark.parametrize("suffix", ["jpg", "json"])
def test_sparse_members(tmp_path, form, suffix):
    """GNU tar's --sparse: a few bytes for a file of 64 GB."""
    shards(tmp_path, [])
    sparse(tmp_path / f"a.{suffix}", b"x", 2**36)
    shard = tmp_path / "train" / "train.tar"
    command = ["tar", "--sparse", f"--format={form}", "-cf", shard, "-C", tmp_path, f"a.{suffix}"]
    subprocess.run(command, check=True)
    assert shard.stat().st_size < 20_000
    with pytest.raises(
        DataFolderError, match=rf"train.tar cannot be read: a.{suffix} is a sparse member"
    ):
        open_data(wanted(arguments(tmp_path, data_source="webdataset")))


def test_an_image_too_large_to_be_packed(tmp_path):
    for split in ("train", "val"):
        sparse(tmp_path / split / "class" / "a.png", encoded(np.zeros((8, 8), np.uint8)), 2**31)
    told = r"cannot be packed: .*a.png has 2,147,483,648 bytes; the limit for a file of one image"
    with pytest.raises(DataFolderError, match=told):
        pack(str(tmp_path), str(tmp_path / "packed"), 10**6, 1)


# -- parquet --------------------------------------------------------------------------------


@pytest.fixture
def parquet(tmp_path):
    content = encoded(np.zeros((16, 16), np.uint8))
    columns = {"image": [{"bytes": content}] * 100, "label": [0] * 100}
    for split in ("train", "val"):
        (tmp_path / "data").mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), tmp_path / "data" / f"{split}-0.parquet")
    return tmp_path / "data"


def test_a_parquet_footer(parquet):
    footer = struct.pack("<I", 2**31) + b"PAR1"
    path = parquet / "val-0.parquet"
    sparse(path, path.read_bytes(), 2**33)
    with path.open("r+b") as file:
        file.seek(-8, io.SEEK_END)
        file.write(footer)
    for root in (parquet, f"file://{parquet}"):
        with pytest.raises(
            DataFolderError, match=r"val-0.parquet .* its footer has 2,147,483,648 by"
        ):
            open_data(wanted(arguments(root, data_source="parquet")))


def test_a_row_group(parquet, monkeypatch):
    assert open_data(wanted(arguments(parquet, data_source="parquet"))).val_length == 100
    monkeypatch.setattr(tables, "_ROW_GROUP", SizeLimit("a test", 50))
    with pytest.raises(DataFolderError, match=r"parquet cannot be read: row group 0 has \d+ bytes"):
        open_data(wanted(arguments(parquet, data_source="parquet")))
    monkeypatch.undo()
    monkeypatch.setattr(tables, "_MOST_ROWS", 99)
    with pytest.raises(DataFolderError, match="it has 100 rows; the limit is 99"):
        open_data(wanted(arguments(parquet, data_source="parquet")))


# -- arrays ---------------------------------------------------------------------------------


def refused(path):
    with pytest.raises(BrokenImageError) as raised, open_array(str(path)):
        pass
    return str(raised.value)


def test_an_npz_file_that_is_larger_than_it_looks(tmp_path):
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("volume.npy", b"")
    claimed = struct.pack("<I", 2**32 - 2)
    content = path.read_bytes()
    at = content.index(b"PK\1\2")
    path.write_bytes(content[: at + 24] + claimed + content[at + 28 :])
    monkey = SizeLimit("what is decoded as a whole", 2**30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(volumes, "_DECODED", monkey)
        assert re.match(r"volume has 4,294,967,294 bytes; the limit for what is de", refused(path))


def test_the_header_of_an_npy_file(tmp_path):
    path = sparse(tmp_path / "a.npy", b"\x93NUMPY\2\0" + struct.pack("<I", 2**32 - 1))
    assert "its header has 4,294,967,295 bytes; the limit for a file of text" in refused(path)


def test_a_tile_of_a_tiff_file(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.zeros((64, 64), np.uint16), tile=(32, 32), compression="zlib")
    content = bytearray(path.read_bytes())
    for tag in (322, 323):  # width and length of a tile
        at = content.index(struct.pack("<HHI", tag, 4, 1)) if tag else 0
        content[at + 8 : at + 12] = struct.pack("<I", 2**20)
    path.write_bytes(content)
    assert "a tile or strip has 2,199,023,255,552 bytes; the limit for what is" in refused(path)


def test_extensions_of_a_nifti_header(tmp_path):
    """They are not read, whatever they claim; the values after them are."""
    array = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    image = nibabel.Nifti1Image(array.T, np.eye(4))
    image.header.extensions.append(nibabel.nifti1.Nifti1Extension("comment", b"x" * 1000))
    image.to_filename(tmp_path / "a.nii")
    content = bytearray((tmp_path / "a.nii").read_bytes())
    content[352:356] = struct.pack("<i", -8)  # nibabel would read all that follows
    (tmp_path / "a.nii.gz").write_bytes(gzip.compress(content))
    with open_array(str(tmp_path / "a.nii.gz")) as opened:
        np.testing.assert_array_equal(opened.read((slice(0, 2), slice(0, 3), slice(0, 4))), array)
