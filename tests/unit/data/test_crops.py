"""DINO's crops: each against torchvision's own operations of the same numbers; masks; batches."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import ks_2samp
from sklearn.datasets import load_sample_images
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from data import transforms
from data.batch import BatchShard
from data.config import DataConfig
from data.crops import (
    FIRST,
    LOCAL,
    SECOND,
    Distortion,
    MultiCrop,
    block_mask,
    distort,
    draw_distortion,
    max_masked,
)
from data.decode import Pixels, open_image
from data.source import CropLayout, CropRequest, DatasetRequest, open_data
from data.transforms import seeded
from tests.support.jpegs import GUARD, as_pillow, jpeg

pytestmark = pytest.mark.fast

PHOTOGRAPHS = load_sample_images().images  # 427 x 640
CROPS = CropRequest((32, 24), 3, (0.32, 1.0), (0.05, 0.32), (4, 5), (0.1, 0.5))
SIZE = (64, 80)
ROUNDED = 0.56
"""Of 255: half a gray level, and the weights of the blur that are left out."""
AT_THRESHOLD = 1.0
"""The same of solarized crops: of 127.9, torchvision makes 127.9, and a byte is 128, so 127."""


def recolored(image, how, scale=1):
    """A crop from 0 to 1 in fp32, or in bytes, after torchvision's operations; of one that has
    ``scale`` times as many pixels a side, the blur has so, too."""
    operations = {
        "brightness": functional.adjust_brightness,
        "contrast": functional.adjust_contrast,
        "saturation": functional.adjust_saturation,
        "hue": functional.adjust_hue,
    }
    for name, factor in how.jitter:
        image = operations[name](image, factor)
    if how.gray:
        image = functional.rgb_to_grayscale(image, num_output_channels=len(image))
    if how.sigma is not None:
        weights = 2 * round(4 * scale) + 1
        image = functional.gaussian_blur(image, [weights] * 2, [how.sigma * scale] * 2)
    if how.solarized:
        image = functional.solarize(image, 128 / 255 if image.is_floating_point() else 128)
    return image


def part(number, height=64, width=80):
    pixels = PHOTOGRAPHS[number % 2][3 * number : 3 * number + height, number : number + width]
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


@pytest.mark.parametrize("kind", [FIRST, SECOND, LOCAL])
@pytest.mark.parametrize("channels", [1, 3])
def test_distortions_are_torchvisions(kind, channels):
    """In fp32 to the rounding of a byte; on bytes, torchvision rounds down after each of them."""
    torch.manual_seed(0)
    seen, off = Counter(), []
    for number in range(60):
        how, image = draw_distortion(kind), part(number)[:channels]
        made = distort(image, how)
        assert (made.dtype, made.shape) == (torch.uint8, image.shape)
        expected = recolored(image / 255, how) * 255
        assert (made - expected).abs().max() < (AT_THRESHOLD if how.solarized else ROUNDED)
        off.append((made.float() - recolored(image, how).float()).abs().mean().item())
        seen.update(jitter=bool(how.jitter), gray=how.gray, blur=how.sigma is not None)
        assert torch.equal(image, part(number)[:channels])
    assert max(off) < 2.5
    assert 0 < seen["jitter"] < 60
    assert 0 < seen["gray"] < 60
    assert seen["blur"] == 60 or kind is not FIRST


@pytest.mark.parametrize("shift", [-1 / 6, -0.1, 0.1, 1 / 6])
def test_hues_of_all_colors(shift):
    levels = torch.tensor([0, 1, 31, 127, 128, 254, 255], dtype=torch.uint8)
    image = torch.cartesian_prod(levels, levels, levels).T.reshape(3, 7, 49)
    how = Distortion((("hue", shift),), False, None, False)
    expected = functional.adjust_hue(image / 255, shift) * 255
    assert (distort(image, how) - expected).abs().max() < 0.502


def test_draws_are_torchvisions():
    torch.manual_seed(0)
    drawn = [draw_distortion(kind) for kind in (FIRST, SECOND, LOCAL) for _ in range(1500)]
    jitters = [each.jitter for each in drawn if each.jitter]
    theirs = v2.ColorJitter(0.4, 0.4, 0.2, 0.1)
    params = [theirs.make_params([]) for _ in range(1500)]
    for name in ("brightness", "contrast", "saturation", "hue"):
        ours = [dict(jitter)[name] for jitter in jitters]
        assert ks_2samp(ours, [float(each[f"{name}_factor"]) for each in params]).pvalue > 1e-3
    orders = Counter(tuple(name for name, _ in jitter) for jitter in jitters)
    assert len(orders) == 24
    assert max(orders.values()) < 2 * min(orders.values())
    assert len(jitters) / len(drawn) == pytest.approx(0.8, abs=0.03)
    assert np.mean([each.gray for each in drawn]) == pytest.approx(0.2, abs=0.03)
    sigmas = [each.sigma for each in drawn if each.sigma is not None]
    blur = v2.GaussianBlur(9, (0.1, 2.0))
    params = [blur.make_params([])["sigma"][0] for _ in range(1500)]
    assert ks_2samp(sigmas, params).pvalue > 1e-3
    for kind, blurred, solarized in ((0, 1.0, 0.0), (1, 0.1, 0.2), (2, 0.5, 0.0)):
        these = drawn[1500 * kind : 1500 * (kind + 1)]
        assert np.mean([e.sigma is not None for e in these]) == pytest.approx(blurred, abs=0.04)
        assert np.mean([e.solarized for e in these]) == pytest.approx(solarized, abs=0.04)


# -- whole crops ----------------------------------------------------------------------


def whole_crops(image, monkeypatch, channels, factor=1.0, **flags):
    """The crops of an image, each with the box and the distortion that were drawn for it; those of
    the Gram teacher at the end."""
    boxes, distortions = [], []
    box, distortion = transforms.random_box, transforms.draw_distortion
    monkeypatch.setattr(
        transforms, "random_box", lambda *how: boxes.append(eights(box(*how))) or boxes[-1]
    )
    monkeypatch.setattr(
        transforms,
        "draw_distortion",
        lambda kind: distortions.append((kind, distortion(kind))) or distortions[-1][1],
    )
    layout = CropLayout((channels, *SIZE), replace(CROPS, gram_factor=factor))
    packed = seeded(MultiCrop(DataConfig(**flags), layout), image, 3, 1, 5)
    monkeypatch.undo()
    assert packed.shape == (layout.length,)
    globals_, grams, locals_, mask = layout.unpack(packed[None])
    crops = [*globals_[:, 0], *locals_[:, 0], *grams[:, 0]]
    of_gram = len(grams)
    return crops, boxes + boxes[:of_gram], distortions + distortions[:of_gram], mask[0]


def eights(box):
    """The box with whole pixels where the image is decoded at an eighth of its size, too."""
    return tuple(side // 8 * 8 for side in box)


@pytest.mark.parametrize(
    ("channels", "flags", "larger", "factor"),
    [
        (3, {"hflip": 0.0}, 1, 1.0),
        (1, {"hflip": 1.0}, 1, 2.0),
        (3, {"hflip": 0.0, "interpolation": "lanczos"}, 1, 2.0),
        (3, {"hflip": 1.0}, 4, 2.0),
    ],
    ids=str,
)
def test_crops_are_torchvisions(channels, flags, larger, factor, monkeypatch):
    picture = Image.fromarray(PHOTOGRAPHS[1]).resize((640 * larger, 427 * larger))
    encoded = jpeg(np.asarray(picture), quality=95)
    image = open_image(encoded) if larger > 1 else Pixels(as_pillow(encoded).copy())
    crops, boxes, drawn, mask = whole_crops(image, monkeypatch, channels, factor, **flags)
    assert [each.shape for each in crops[:5]] == [(channels, *SIZE)] * 2 + [(channels, 32, 24)] * 3
    assert sorted(kind.blurred for kind, _ in drawn[:5]) == [0.1, 0.5, 0.5, 0.5, 1.0]
    assert len(crops) == (5 if factor == 1 else 7)
    for each in crops[5:]:  # the global crops again, of more pixels
        assert each.shape[1:] == (round(factor * SIZE[0]), round(factor * SIZE[1]))
    assert drawn[0][0] in (FIRST, SECOND)
    assert 2 <= int(mask.sum()) <= 10
    whole = Image.fromarray(as_pillow(encoded))
    mode = v2.InterpolationMode(flags.get("interpolation", "bicubic"))
    shares = []
    for number, (crop, box, (_, how)) in enumerate(zip(crops, boxes, drawn, strict=True)):
        expected = functional.resized_crop(whole, *box, list(crop.shape[1:]), mode)
        if flags["hflip"]:
            expected = functional.horizontal_flip(expected)
        expected = functional.pil_to_tensor(expected)
        if channels == 1:
            expected = functional.rgb_to_grayscale(expected)
        expected = recolored(expected / 255, how, factor if number >= 5 else 1) * 255
        assert (crop - expected).abs().mean() < (GUARD if larger > 1 else 0.5)
        shares.append(box[2] * box[3] / math.prod(whole.size))
    assert min(shares[:2]) > 0.25
    assert max(shares[2:5]) < 0.33


def test_the_gram_teacher_sees_the_same_part_of_the_image(monkeypatch):
    none = Distortion((), False, None, False)
    monkeypatch.setattr(transforms, "draw_distortion", lambda kind: none)
    across = np.broadcast_to(np.arange(250, dtype=np.uint8), (200, 250))
    down = np.broadcast_to(np.arange(200, dtype=np.uint8)[:, None], (200, 250))
    image = Pixels(np.stack([across, down, across], 2))
    layout, plain = (CropLayout((3, *SIZE), replace(CROPS, gram_factor=f)) for f in (2.0, 1.0))
    flipped = Counter()
    for index in range(40):
        made, of_plain = (
            each.unpack(seeded(MultiCrop(DataConfig(), each), image, 3, 1, index)[None])
            for each in (layout, plain)
        )
        globals_, grams, *others = made
        assert torch.equal(globals_, of_plain[0])
        assert all(map(torch.equal, others, of_plain[2:]))
        halved = torch.nn.functional.avg_pool2d(grams[:, 0].float(), 2)
        inside = (halved - globals_[:, 0].float())[:, :, 2:-2, 2:-2]
        assert inside.abs().max() < 1.01  # three roundings to a byte
        for small, large in zip(globals_[:, 0], grams[:, 0], strict=True):
            signs = [bool(each[0, 0, 0] > each[0, 0, -1]) for each in (small, large)]
            assert signs[0] == signs[1]
            flipped[signs[0]] += 1
    assert min(flipped.values()) > 20


# -- layout ---------------------------------------------------------------------------


def test_unpacked_is_what_was_packed():
    layout = CropLayout((3, *SIZE), replace(CROPS, gram_factor=1.25))
    torch.manual_seed(0)
    images = [
        (
            torch.randint(256, (2, 3, *SIZE), dtype=torch.uint8),
            torch.randint(256, (2, 3, 80, 100), dtype=torch.uint8),
            torch.randint(256, (3, 3, 32, 24), dtype=torch.uint8),
            torch.rand(20) < 0.5,
        )
        for _ in range(4)
    ]
    packed = torch.stack([layout.pack(*image) for image in images])
    of_globals, of_grams, of_locals = 2 * 3 * 64 * 80, 2 * 3 * 80 * 100, 3 * 3 * 32 * 24
    assert packed.shape == (4, layout.length) == (4, of_globals + of_grams + of_locals + 20)
    for found, given in zip(layout.unpack(packed), zip(*images, strict=True), strict=True):
        dimension = 0 if found.dtype == torch.bool else 1
        assert torch.equal(found, torch.stack(given, dimension))


# -- masks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "ratio", "least", "most"),
    [
        ((16, 16), (0.1, 0.5), 26, 128),
        ((16, 16), (1.0, 1.0), 256, 256),
        ((1, 1), (0.1, 0.5), 1, 1),
        ((1, 9), (0.5, 1.0), 4, 9),
    ],
)
def test_masks_have_their_number(grid, ratio, least, most):
    torch.manual_seed(0)
    masks = torch.stack([block_mask(grid, ratio) for _ in range(300)])
    assert masks.shape == (300, math.prod(grid))
    counts = masks.sum(1)
    assert (int(counts.min()), int(counts.max())) == (
        pytest.approx(least, abs=2),
        pytest.approx(most, abs=2),
    )
    assert least <= counts.min()
    assert counts.max() <= max_masked(grid, ratio) == most


def test_masks_are_blocks_that_are_everywhere():
    torch.manual_seed(0)
    masks = torch.stack([block_mask((16, 16), (0.3, 0.3)) for _ in range(2000)]).view(-1, 16, 16)
    assert (masks.flatten(1).sum(1) == 76).all()
    both = (masks[:, 1:] & masks[:, :-1]).sum() + (masks[:, :, 1:] & masks[:, :, :-1]).sum()
    pairs = 2 * 15 * 16 * len(masks)
    assert both / pairs > 2.2 * 0.3**2
    shares = masks.float().mean(0)
    assert 0.1 < shares.min() < 0.3 < shares.max() < 0.45
    assert shares.flip(0).sub(shares).abs().max() < 0.06
    assert shares.T.sub(shares).abs().max() < 0.06
    ratios = torch.stack([block_mask((10, 10), (0.1, 0.5)) for _ in range(2000)]).sum(1) / 100
    assert ks_2samp(ratios, np.random.default_rng(0).uniform(0.1, 0.5, 2000)).pvalue > 1e-3


# -- batches --------------------------------------------------------------------------


SMALL = CropRequest((8, 8), 2, (0.32, 1.0), (0.05, 0.32), (4, 4), (0.25, 0.5))


def opened(top, crops=SMALL, size=(16, 16), channels=3, augment=True, **flags):
    values = {"data_dir": str(top), "batch_size": 24, "num_workers": 0}
    config = DataConfig(**values | flags)
    return open_data(DatasetRequest(config, channels, size, 10, 3, augment=augment, crops=crops))


@pytest.mark.parametrize("source", ["folder", "digits"])
def test_the_same_for_any_number_of_workers_and_processes_and_after_a_resume(source, digits):
    layout = CropLayout((3, 16, 16), SMALL)
    whole = opened(digits, data_source=source)
    expected = list(itertools.islice(whole.train_loader(24, BatchShard()).epoch(2), 9))
    images, labels = expected[0]
    assert images.shape == (24, layout.length)
    assert images.dtype == torch.uint8
    assert layout.unpack(images)[-1].sum(1).tolist() == pytest.approx([6] * 24, abs=2)
    torch.manual_seed(1)
    workers = opened(digits, data_source=source, num_workers=2).train_loader(24, BatchShard())
    for (a, x), (b, y) in zip(expected[5:], workers.epoch(2, 5), strict=False):
        assert a.equal(b)
        assert x.equal(y)
    parts = [next(whole.train_loader(24, BatchShard(rank, 3)).epoch(2)) for rank in range(3)]
    assert torch.cat([each for each, _ in parts]).equal(images)
    assert torch.cat([each for _, each in parts]).equal(labels)
    empty = next(whole.train_loader(24, BatchShard(loads=False)).epoch(2))[0]
    assert empty.shape == (0, layout.length)
    assert not next(whole.train_loader(24, BatchShard()).epoch(3))[0].equal(images)


def test_images_that_are_not_augmented_are_as_before(digits):
    with_crops, without = opened(digits), opened(digits, crops=None)
    for each in (with_crops, without):
        each.batch = next(each.val_loader(24, BatchShard()).epoch(0))[0]
    assert torch.equal(with_crops.batch, without.batch)
    found = [
        next(opened(digits, crops=crops, augment=False).train_loader(24, BatchShard()).epoch(0))[0]
        for crops in (SMALL, None)
    ]
    assert torch.equal(*found)


def test_fake_crops():
    layout = CropLayout((3, 16, 16), SMALL)
    fake = opened("", data_source="fake")
    images, _ = next(fake.train_loader(24, BatchShard(1, 2)).epoch(0))
    assert images.shape == (12, layout.length)
    assert images.dtype == torch.uint8
    assert not images.any()
    assert next(fake.val_loader(24, BatchShard()).epoch(0))[0].shape == (24, 3, 16, 16)
