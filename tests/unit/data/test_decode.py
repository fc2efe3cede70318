"""Decoding and crops: against Pillow's pixels and torchvision's transforms, on photographs."""

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image
from scipy.stats import ks_2samp
from sklearn.datasets import load_sample_images
from torchvision.transforms import v2

from data import transforms
from data.config import DataConfig
from data.decode import open_image
from data.files import BrokenImageError
from data.transforms import seeded
from tests.support.jpegs import GUARD, as_pillow, jpeg

pytestmark = pytest.mark.fast

PHOTOGRAPHS = load_sample_images().images  # 427 x 640
SIZE = (64, 80)


@pytest.mark.parametrize(
    "options",
    [
        {"quality": 60},
        {"quality": 95, "subsampling": 0},
        {"progressive": True},
        {"mode": "L"},
        {"mode": "CMYK"},
        {"keep_rgb": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("sides", [(427, 640), (9, 7), (1, 1)])
def test_pixels_are_pillows(options, sides):
    encoded = jpeg(PHOTOGRAPHS[0][: sides[0], : sides[1]], **options)
    image = open_image(encoded)
    assert image.size == sides
    assert np.array_equal(image.pixels(), as_pillow(encoded))
    for shrink in image.shrinks:
        height, width = (-(-side // shrink) for side in sides)
        assert image.pixels(shrink).shape == (height, width, 3)


@pytest.mark.parametrize("colors", ["444", "422", "420", "440", "411", "Gray"])
def test_the_first_rows_alone_are_those_of_the_whole_image(colors):
    """With every way to store colors for several pixels together, and at each fraction."""
    pixels = PHOTOGRAPHS[0][:100] if colors != "Gray" else PHOTOGRAPHS[0][:100, :, :1]
    pixels, space = np.ascontiguousarray(pixels), "GRAY" if colors == "Gray" else "RGB"
    image = open_image(simplejpeg.encode_jpeg(pixels, 90, space, colorsubsampling=colors))
    for shrink in (1, *image.shrinks):
        whole = image.pixels(shrink)
        for rows in range(1, len(whole) + 1):
            first = image.pixels(shrink, rows)
            assert rows <= len(first) <= rows + 32
            assert np.array_equal(first[:rows], whole[:rows])


@pytest.mark.parametrize("options", [{"progressive": True}, {"restart_marker_rows": 1}], ids=str)
def test_first_rows_of_jpegs_that_are_decoded_whole(options):
    image = open_image(jpeg(PHOTOGRAPHS[0], **options))
    assert np.array_equal(image.pixels(1, 100), image.pixels())


def test_a_jpeg_that_is_damaged_in_its_first_rows_is_read_as_a_whole():
    encoded = jpeg(PHOTOGRAPHS[0])
    place = len(encoded) // 4
    for damaged in (
        encoded[:place] + b"\xff\xd9",  # the mark of the end
        encoded[:place] + b"\xff\xd0" * 8 + encoded[place:],
    ):
        image = open_image(damaged)
        assert np.array_equal(image.pixels(1, 300), image.pixels())


def test_a_jpeg_that_is_cut_off_is_broken():
    encoded = jpeg(PHOTOGRAPHS[0])
    for length in (3, 30, 700, len(encoded) // 2, len(encoded) - 30):
        with pytest.raises(BrokenImageError):
            open_image(encoded[:length]).pixels()
        with pytest.raises(BrokenImageError):
            open_image(encoded[:length]).pixels(2)
        with pytest.raises(BrokenImageError):
            open_image(encoded[:length]).pixels(1, 100)
    with pytest.raises(BrokenImageError, match="no image of a known format"):
        open_image(b"")
    with pytest.raises(BrokenImageError, match="1 x 1001 pixels, exceeds"):
        open_image(jpeg(np.zeros((1001, 1, 3), np.uint8)))


def flips(_):
    return bool(torch.rand(()) < 0.5)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear", "lanczos"])
@pytest.mark.parametrize("larger", [1, 3])
def test_crops_are_torchvisions(interpolation, larger, monkeypatch):
    drawn, boxes = transforms.random_box, []

    def of_eights(*arguments):
        boxes.append(tuple(side // 8 * 8 for side in drawn(*arguments)))
        return boxes[-1]

    monkeypatch.setattr(transforms, "random_box", of_eights)
    ours = transforms.TrainTransform(DataConfig(interpolation=interpolation), SIZE, 3)
    mode = v2.InterpolationMode(interpolation)
    off = []
    for index in range(24):
        picture = Image.fromarray(PHOTOGRAPHS[index % 2])
        picture = picture.resize((640 * larger, 427 * larger), Image.Resampling.BICUBIC)
        encoded = jpeg(np.asarray(picture), quality=90)
        made = seeded(ours, open_image(encoded), 0, 1, index)
        whole = Image.fromarray(as_pillow(encoded))
        expected = v2.functional.resized_crop(whole, *boxes[-1], SIZE, mode)
        if seeded(flips, None, 0, 1, index):
            expected = v2.functional.horizontal_flip(expected)
        expected = v2.functional.pil_to_tensor(expected)
        assert made.dtype == torch.uint8
        assert made.shape == expected.shape == (3, *SIZE)
        off.append((made.float() - expected.float()).abs().mean().item())
    assert max(off) < GUARD, off


@pytest.mark.parametrize(
    ("size", "scale", "ratio"),
    [
        ((375, 500), (0.08, 1.0), (3 / 4, 4 / 3)),
        ((500, 100), (0.3, 1.0), (3 / 4, 4 / 3)),  # often nothing fits
        ((40, 1000), (0.9, 1.0), (1.0, 1.0)),  # never
    ],
)
def test_boxes_are_drawn_as_torchvision_draws_them(size, scale, ratio):
    torch.manual_seed(0)
    ours = np.array([transforms.random_box(size, scale, ratio) for _ in range(3000)])
    crop = v2.RandomResizedCrop(SIZE, scale, ratio)
    image = torch.empty(1, *size, device="meta")
    drawn = [crop.make_params([image]) for _ in range(3000)]
    names = ("top", "left", "height", "width")
    for column, name in zip(ours.T, names, strict=True):
        theirs = [each[name] for each in drawn]
        assert ks_2samp(column, theirs).pvalue > 1e-3, name
        assert (column.min(), column.max()) == pytest.approx((min(theirs), max(theirs)), abs=8)
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, :2] + ours[:, 2:] <= size).all()
