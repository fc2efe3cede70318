"""Images of more than 8 bits, of several bands, and of DICOM: against the formula of a range, and
pydicom's own look-up tables and windows."""

import io

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.dataset import Dataset
from pydicom.pixels import apply_modality_lut, apply_voi_lut, pixel_array
from pydicom.uid import (
    MPEG2MPML,
    DeflatedExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLossless,
    JPEGLSLossless,
    RLELossless,
)

from data import decode, image_folder
from data import dicom as dicom_files
from data.config import DataConfig
from data.decode import MAX_PIXELS, Reading, image_size, open_image, read_image
from data.files import BrokenImageError, DataFolderError
from data.intensity import Intensity, measure
from data.open import open_data
from data.raw_images import gray_of_pillow
from data.source import DatasetRequest
from tests.support.deep_files import data_set, dicom, png_of_16_bits, tiff, written

pytestmark = pytest.mark.fast

RANDOM = np.random.default_rng(0)
TWELVE = RANDOM.integers(0, 4096, (17, 23)).astype(np.uint16)


TOGETHER = {"photometric": "minisblack", "planarconfig": "contig"}
"""How tifffile stores the last axis as bands."""


def opened(encoded, words, channels=3):
    return open_image(encoded, Reading(channels, Intensity.parse(words))).pixels()


def ranged(values, low, high):
    """The definition, in double precision."""
    share = (values.astype(np.float64) - low) / (high - low)
    return np.rint(255 * share.clip(0, 1))


def check(found, expected, channels=3):
    """Within the rounding of half a step."""
    assert found.dtype == np.uint8
    if expected.ndim == 2:
        expected = np.stack([expected] * 3, axis=-1)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1
    assert (found == expected).mean() > 0.99


def pillow(values, kind, **options):
    file = io.BytesIO()
    Image.fromarray(values).save(file, kind, **options)
    return file.getvalue()


GRAY = {
    "png": lambda values: png_of_16_bits(values),
    "tiff": lambda values: tiff(values, compression="zlib"),
    "big-endian": lambda values: tiff(values, byteorder=">"),
    "lzw": lambda values: pillow(values, "TIFF", compression="tiff_lzw"),
    "pgm": lambda values: pillow(values, "PPM"),
    "dicom": lambda values: dicom(values),
}


@pytest.mark.parametrize("kind", GRAY)
def test_gray_values_become_a_share_of_their_range(kind):
    encoded = GRAY[kind](TWELVE)
    check(opened(encoded, ["0", "4095"]), ranged(TWELVE, 0, 4095))
    check(opened(encoded, ["100", "200"]), ranged(TWELVE, 100, 200))
    check(opened(encoded, ["auto", "-5", "2000.5"]), ranged(TWELVE, -5, 2000.5))
    check(opened(encoded, "full"), ranged(TWELVE, 0, 65535))
    low, high = np.percentile(TWELVE, (0.5, 99.5))
    check(opened(encoded, ["0.5%", "99.5%"]), ranged(TWELVE, low, high))
    assert image_size(encoded) == TWELVE.shape


@pytest.mark.parametrize("words", ["auto", "full", ["0", "4095"], ["1%", "99%"]], ids=str)
def test_8_bits_stay_as_they_are(words):
    gray = RANDOM.integers(0, 256, (9, 11)).astype(np.uint8)
    color = RANDOM.integers(0, 256, (9, 11, 3)).astype(np.uint8)
    for values in (gray, color):
        in_color = np.stack([values] * 3, axis=-1) if values.ndim == 2 else values
        colors = "RGB" if values.ndim == 3 else "MONOCHROME2"
        for encoded in (
            pillow(values, "PNG"),
            pillow(values, "TIFF"),
            tiff(values, photometric="rgb" if values.ndim == 3 else "minisblack"),
            dicom(values, colors=colors),
        ):
            assert np.array_equal(opened(encoded, words), in_color)


def test_colors_of_16_bits_share_one_range():
    values = RANDOM.integers(0, 30000, (9, 11, 3)).astype(np.uint16)
    alpha = np.concatenate([values, np.full((9, 11, 1), 65535, np.uint16)], axis=2)
    for encoded in (
        png_of_16_bits(values),
        png_of_16_bits(alpha),
        tiff(values, photometric="rgb"),
        tiff(alpha, photometric="rgb", extrasamples=["unassalpha"]),
        dicom(values, colors="RGB"),
    ):
        check(opened(encoded, ["1000", "20000"]), ranged(values, 1000, 20000))
        low, high = np.percentile(values, (10, 90))
        check(opened(encoded, ["10%", "90%"]), ranged(values, low, high))
    # As before the flag: Pillow keeps the high byte.
    assert np.array_equal(opened(png_of_16_bits(values), "full"), values >> 8)


@pytest.mark.parametrize(
    "dtype", [np.int16, np.uint32, np.int32, np.float32, np.float64, np.float16]
)
def test_tiffs_of_any_numbers(dtype):
    base = 0 if dtype in (np.int16, np.float16) else 1_000_000_000
    values = (base + RANDOM.integers(0, 300, (9, 11))).astype(dtype)
    encoded = tiff(values)
    low, high = float(values.min()), float(values.max())
    check(opened(encoded, [f"{low}", f"{high}"]), ranged(values, low, high))
    if np.dtype(dtype).kind == "f":
        values[2, 3], values[0] = np.nan, np.inf
        found = opened(tiff(values), [f"{low}", f"{high}"])
        assert not found[2, 3].any()
        assert (found[0] == 255).all()
        check(found[3:], ranged(values[3:], low, high))
    else:
        info = np.iinfo(dtype)
        check(opened(encoded, [f"{info.min}", f"{info.max}"]), ranged(values, info.min, info.max))


def test_white_as_zero():
    check(
        opened(tiff(TWELVE, photometric="miniswhite"), ["0", "65535"]),
        ranged(65535 - TWELVE, 0, 65535),
    )
    with Image.open(io.BytesIO(tiff(TWELVE, photometric="miniswhite"))) as image:  # as of masks
        assert np.array_equal(gray_of_pillow(image).values[..., 0], 65535 - TWELVE)
    encoded = dicom(TWELVE, 12, "MONOCHROME1")
    for words in ("full", ["0", "4095"]):
        check(opened(encoded, words), 255 - ranged(TWELVE, 0, 4095))


@pytest.mark.parametrize(
    "options",
    [
        {"photometric": "minisblack", "planarconfig": "contig"},
        {
            "photometric": "minisblack",
            "planarconfig": "contig",
            "tile": (16, 16),
            "compression": "zlib",
        },
        {"photometric": "minisblack", "planarconfig": "separate"},
        {"photometric": "minisblack", "planarconfig": "separate", "tile": (16, 32)},
        {"imagej": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_bands_of_a_tiff(options, dtype):
    """In one page, together or apart, or in a page each, as ImageJ writes the channels."""
    values = RANDOM.integers(0, 200, (19, 41, 5)).astype(dtype)
    apart = options.get("planarconfig") != "contig"
    encoded = tiff(np.moveaxis(values, 2, 0) if apart else values, **options)
    found = opened(encoded, ["auto", *"0 200 0 100 50 100 0 400 10 20".split()], channels=5)
    if dtype == np.uint8:
        assert np.array_equal(found, values)
        return
    expected = [
        ranged(values[..., band], low, high)
        for band, (low, high) in enumerate([(0, 200), (0, 100), (50, 100), (0, 400), (10, 20)])
    ]
    check(found, np.stack(expected, axis=-1))
    check(opened(encoded, ["5", "195"], channels=5), ranged(values, 5, 195))
    of_each = opened(encoded, ["5%", "95%"], channels=5)
    for band in range(5):
        one = values[..., band]
        check(of_each[..., [band] * 3], ranged(one, *np.percentile(one, (5, 95))))


# -- DICOM, against pydicom ------------------------------------------------------------


def by_pydicom(encoded):
    """The image as pydicom shows it, from 0 to 255."""
    made = pydicom.dcmread(io.BytesIO(encoded))
    values = apply_modality_lut(pixel_array(made), made)
    shown = apply_voi_lut(values, made).astype(np.float64)
    if "VOILUTSequence" in made:
        low, high = 0, 2 ** made.VOILUTSequence[0].LUTDescriptor[2] - 1
    else:
        bits, signed = made.BitsStored, made.PixelRepresentation
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        if "ModalityLUTSequence" in made:
            low, high = 0, 2 ** made.ModalityLUTSequence[0].LUTDescriptor[2] - 1
        if "RescaleSlope" in made:
            low, high = (end * made.RescaleSlope + made.RescaleIntercept for end in (low, high))
    whole = 255 * (shown - low) / (high - low)
    return 255 - whole if made.PhotometricInterpretation == "MONOCHROME1" else whole


def lut(values, first, bits):
    made = Dataset()
    made.LUTDescriptor = [len(values), first, bits]
    made.LUTData = values.astype("<u2").tobytes()
    return made


SIGNED = RANDOM.integers(-2048, 2048, (17, 23)).astype(np.int16)
HOUNSFIELD = {"RescaleSlope": 1, "RescaleIntercept": -1024, "RescaleType": "HU"}
SHOWN = {
    "window": (TWELVE, 12, {"WindowCenter": 1000, "WindowWidth": 500}),
    "several windows": (TWELVE, 12, {"WindowCenter": [40, 600], "WindowWidth": [400, 1500]}),
    "Hounsfield": (TWELVE, 12, HOUNSFIELD | {"WindowCenter": -600, "WindowWidth": 1500}),
    "slope": (
        TWELVE,
        12,
        {"RescaleSlope": 0.37, "RescaleIntercept": 5, "WindowCenter": 300, "WindowWidth": 900},
    ),
    "signed": (SIGNED, 12, {"WindowCenter": -100, "WindowWidth": 700}),
    "exact": (
        TWELVE,
        12,
        {"WindowCenter": 900, "WindowWidth": 333, "VOILUTFunction": "LINEAR_EXACT"},
    ),
    "sigmoid": (
        TWELVE,
        12,
        {"WindowCenter": 2000, "WindowWidth": 1000, "VOILUTFunction": "SIGMOID"},
    ),
    "step": (TWELVE, 12, {"WindowCenter": 2000, "WindowWidth": 1}),
    "8 bits": ((TWELVE >> 4).astype(np.uint8), 8, {"WindowCenter": 100, "WindowWidth": 40}),
    "VOI LUT": (TWELVE, 12, {"VOILUTSequence": [lut(np.arange(1024) ** 2 // 16, 500, 16)]}),
    "modality LUT": (
        TWELVE,
        12,
        {
            "ModalityLUTSequence": [lut(np.arange(4096) * 15, 0, 16)],
            "WindowCenter": 20000,
            "WindowWidth": 9000,
        },
    ),
}


@pytest.mark.parametrize("colors", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize("kind", SHOWN)
def test_what_a_file_says_is_shown_as_pydicom_shows_it(kind, colors):
    values, bits, elements = SHOWN[kind]
    encoded = dicom(values, bits, colors, **elements)
    found = opened(encoded, "auto")
    expected = by_pydicom(encoded)
    assert np.abs(found[..., 0] - expected).max() < 1
    assert np.array_equal(found, opened(encoded, ["auto", "0", "1"])), "the window comes first"
    assert len(np.unique(found)) > (1 if kind == "step" else 20)


def test_ranges_of_dicom_are_in_its_unit():
    encoded = dicom(TWELVE, 12, **HOUNSFIELD)
    check(opened(encoded, ["-500", "1500"]), ranged(TWELVE - 1024.0, -500, 1500))
    check(opened(encoded, "full"), ranged(TWELVE, 0, 4095))
    check(opened(dicom(SIGNED, 12), "full"), ranged(SIGNED, -2048, 2047))
    low, high = np.percentile(TWELVE, (2, 98))
    check(opened(encoded, ["2%", "98%"]), ranged(TWELVE, low, high))
    few = RANDOM.integers(0, 64, (8, 8)).astype(np.uint8)
    check(opened(dicom(few, 6), "full"), ranged(few, 0, 63))
    floats = data_set(TWELVE, 12)
    del floats.PixelData, floats.BitsStored, floats.HighBit, floats.PixelRepresentation
    floats.BitsAllocated, floats.FloatPixelData = 32, TWELVE.astype(np.float32).tobytes()
    check(opened(written(floats), ["0", "4095"]), ranged(TWELVE, 0, 4095))


@pytest.mark.parametrize(
    "syntax", [RLELossless, JPEG2000Lossless, JPEGLSLossless], ids=lambda syntax: syntax.name
)
def test_compressed_dicom(syntax):
    large = RANDOM.integers(0, 4096, (64, 80)).astype(np.uint16)
    made = data_set(large, 12, WindowCenter=1000, WindowWidth=500)
    plain = opened(written(made), "auto")
    made.compress(syntax)
    assert np.array_equal(opened(written(made), "auto"), plain)


# -- what cannot be read ---------------------------------------------------------------


def without(made, *names):
    for name in names:
        del made[name]
    return written(made)


def deflated():
    made = data_set(TWELVE, 12)
    made.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    return written(made)


def compressed(syntax, content, **elements):
    made = data_set(TWELVE, 12, **elements)
    made.file_meta.TransferSyntaxUID = syntax
    made.PixelData = pydicom.encaps.encapsulate([content])
    made["PixelData"].VR = "OB"
    return written(made)


JPEG_OF_GIGAPIXELS = b"\xff\xd8\xff\xc3\x00\x0b\x10\xff\xff\xff\xff\x01\x01\x11\x00\xff\xd9"
BROKEN = {
    "no pixels": (without(data_set(TWELVE), "PixelData"), r"no pixels \(Secondary Capture"),
    "frames": (dicom(TWELVE, NumberOfFrames=3), "3 frames: save each as a file"),
    "size": (dicom(TWELVE, Rows=40000, Columns=40000), "more than 178,956,970 pixels"),
    "short": (dicom(TWELVE, Rows=400), "it is damaged"),
    "cut": (dicom(TWELVE)[:400], "it is damaged|no pixels"),
    "film": (compressed(MPEG2MPML, b"\0" * 64), "is not supported"),
    "codestream": (compressed(JPEGLossless, JPEG_OF_GIGAPIXELS), "more than 178,956,970 pixels"),
    "other size": (
        compressed(JPEGLossless, JPEG_OF_GIGAPIXELS.replace(b"\xff" * 4, b"\0\x09" * 2)),
        "its compressed pixels 9 x 9",
    ),
    "no size": (compressed(JPEGLossless, b"\xff\xd8" + bytes(20)), "its JPEG has no size"),
    "padded": (compressed(RLELossless, b"\0" * 2**17), "larger than the image"),
    "deflated": (deflated(), "deflated as a whole"),
    "tiff": (tiff(TWELVE)[:-200], "it is truncated"),
    "tiff of bands": (
        tiff(np.zeros((5, 6, 4), np.uint16), **TOGETHER),
        "it has 4 bands",
    ),
    "png": (png_of_16_bits(np.zeros((5, 6, 3), np.uint16))[:-30], "."),
    "floats": (tiff(TWELVE.astype(np.complex64)), "complex64, not numbers"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_reason_for_each_that_cannot_be_read(name, capfd):
    encoded, reason = BROKEN[name]
    with pytest.raises(BrokenImageError, match=reason) as error:
        opened(encoded, ["0", "4095"])
    assert len(str(error.value).splitlines()) == 1
    assert capfd.readouterr() == ("", "")


def test_a_tiff_of_giant_tiles_is_refused():
    encoded = bytearray(tiff(TWELVE, tile=(16, 16), compression="zlib"))
    import tifffile

    with tifffile.TiffFile(io.BytesIO(encoded)) as file:
        tags = file.pages.first.tags
        places = [tags[name].valueoffset for name in ("TileWidth", "TileLength")]
    for place in places:
        encoded[place : place + 2] = (65520).to_bytes(2, "little")
    with pytest.raises(BrokenImageError):
        opened(bytes(encoded), ["0", "4095"])


def test_what_is_unknown_is_not_guessed():
    with pytest.raises(BrokenImageError, match="none of the sampled images"):
        opened(png_of_16_bits(TWELVE), "auto")
    with pytest.raises(BrokenImageError, match="have no full range"):
        open_image(
            tiff(np.zeros((4, 4, 5), np.float32), **TOGETHER), Reading(5, Intensity.parse("full"))
        )
    with pytest.raises(BrokenImageError, match="both 7"):
        opened(png_of_16_bits(np.full((8, 8), 7, np.uint16)), ["1%", "99%"])
    for channels, values in ((4, np.zeros((8, 8, 5), np.uint16)), (5, np.zeros((8, 8), np.uint16))):
        with pytest.raises(BrokenImageError, match=f"bands, but --in_chans is {channels}"):
            opened(tiff(values, **(TOGETHER if values.ndim == 3 else {})), ["0", "1"], channels)
    with pytest.raises(BrokenImageError, match="it has 3 bands, but --in_chans is 4"):
        opened(pillow(np.zeros((8, 8, 3), np.uint8), "JPEG"), "full", 4)


def test_packages_that_are_missing(monkeypatch):
    import builtins

    imported = builtins.__import__

    def refuse(name, *others, **named):
        if name.startswith("pydicom"):
            raise ImportError(name)
        return imported(name, *others, **named)

    dicom_files._pydicom.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(
        DataFolderError, match="require the package pydicom: python3 -m pip install"
    ):
        opened(dicom(TWELVE), "auto")
    monkeypatch.undo()
    dicom_files._pydicom.cache_clear()

    made = data_set(TWELVE, 12)
    made.compress(JPEGLSLossless)
    monkeypatch.setattr("pydicom.pixels.decoders.base.Decoder.is_available", False)
    with pytest.raises(DataFolderError, match=r"compressed as JPEG-LS Lossless .* require"):
        opened(written(made), "auto")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["5", "5"], "the first number, 5, must be below the second, 5"),
        (["9", "-2"], "must be below"),
        (["99%", "1%"], "the first number, 99, must be below"),
        (["5"], "it takes auto"),
        (["1", "2", "3"], "it takes auto"),
        (["1%", "2"], "it takes auto"),
        (["1%", "2%", "3%", "4%"], "it takes auto"),
        (["full", "1", "2"], "it takes auto"),
        (["auto", "1"], "it takes auto"),
        (["auto", "auto"], "it takes auto"),
        ([], "it takes auto"),
    ],
)
def test_words_that_do_not_belong_together(words, reason):
    with pytest.raises(ValueError, match=reason):
        Intensity.parse(words)


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, ">u2"])
def test_large_images(dtype):
    """Which a table maps."""
    values = RANDOM.integers(0, 32768, (300, 400)).astype(dtype)
    check(opened(tiff(values), ["1000", "20000"]), ranged(values, 1000, 20000))
    in_bands = np.stack([values, values[::-1]], axis=-1)
    found = opened(tiff(in_bands, **TOGETHER), "1 32000 500 900".split(), 2)
    expected = ranged(in_bands[..., 0], 1, 32000), ranged(in_bands[..., 1], 500, 900)
    check(found, np.stack(expected, axis=-1))


# -- the sample ------------------------------------------------------------------------


def raws(*encoded):
    return [decode.read_raw(each, Reading(3, Intensity.parse("auto"))).sample() for each in encoded]


def test_auto_is_the_percentiles_of_the_sample():
    images = [RANDOM.integers(100, 4000, (16, 16)).astype(np.uint16) for _ in range(20)]
    found = measure(
        20, 0, Intensity.parse("auto"), lambda numbers: raws(*(tiff(images[n]) for n in numbers))
    )
    low, high = np.percentile(np.stack(images), (0.5, 99.5))
    assert found.words == ("auto", str(int(np.floor(low))), str(int(np.ceil(high))))
    assert "warning" not in found.remark
    # Files with a window of their own are in another unit.
    shown = raws(dicom(images[0] + 9000, WindowCenter=9100, WindowWidth=200))
    mixed = measure(
        21,
        0,
        Intensity.parse("auto"),
        lambda numbers: [*raws(*(tiff(images[n]) for n in numbers if n < 20)), *shown],
    )
    assert mixed.words == found.words
    assert "have a window" in mixed.remark
    same = measure(
        20, 0, Intensity.parse("full"), lambda numbers: raws(*(tiff(images[n]) for n in numbers))
    )
    assert same.words is None
    assert "warning: in 20 sampled images of more than 8 bits, 99 % of the values" in same.remark
    sparse = np.zeros((100, 100), np.uint16)
    sparse[3, 4] = 900
    spots = measure(
        1, 0, Intensity.parse("auto"), lambda numbers: raws(tiff(sparse)) if numbers else []
    )
    assert spots.words == ("auto", "0", "900")
    with pytest.raises(ValueError, match="single value 7"):
        measure(
            1,
            0,
            Intensity.parse("full"),
            lambda n: raws(tiff(np.full((4, 4), 7, np.uint16)))[: len(n)],
        )
    assert measure(5, 0, Intensity.parse("auto"), lambda numbers: []).words is None


def test_pixels_of_masks_and_older_runs_are_unchanged():
    assert np.array_equal(
        np.asarray(read_image(png_of_16_bits(TWELVE)))[..., 0], ranged(TWELVE, 0, 65535)
    )
    assert MAX_PIXELS == 178956970


def in_folder(root, encoded, suffix):
    """A request for four images in two classes."""
    for split in ("train", "val"):
        for number in range(4):
            path = root / split / f"class{number % 2}" / f"{number}{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded)
    config = DataConfig(data_dir=str(root), batch_size=2, num_workers=0)
    return DatasetRequest(config, 3, (16, 16), 2, seed=0)


def test_a_source_is_opened_once(tmp_path, monkeypatch):
    opened_times, find = [], image_folder.index_folders
    monkeypatch.setattr(
        image_folder, "index_folders", lambda request: [opened_times.append(1), find(request)][1]
    )
    source = open_data(in_folder(tmp_path, tiff(TWELVE), ".tif"))
    low, high = np.percentile(np.stack([TWELVE] * 4), (0.5, 99.5))
    chosen = ("auto", str(int(np.floor(low))), str(int(np.ceil(high))))
    assert opened_times == [1]
    assert source.intensity == chosen
    assert {split.request.config.intensity for split in source.splits.values()} == {chosen}
    assert "--intensity auto: " in str(source)


@pytest.mark.parametrize(("suffix", "bytes_read"), [(".JPG", {}), (".png", {"most": 65536})])
def test_what_is_read_of_images_of_8_bits_before_training(
    suffix, bytes_read, tmp_path, monkeypatch
):
    """Nothing where the name says it, otherwise the first bytes."""
    kind = "JPEG" if suffix == ".JPG" else "PNG"
    request, sizes = in_folder(tmp_path, pillow(np.zeros((8, 8), np.uint8), kind), suffix), []
    read = image_folder.read_bytes

    def counted(path, first, most, **how):
        sizes.append(most)
        return read(path, first, most, **how)

    monkeypatch.setattr(image_folder, "read_bytes", counted)
    assert open_data(request).intensity is None
    assert sizes == 4 * [*bytes_read.values()]
