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

from data.batch import BatchShard, Field
from data.config import DataConfig
from data.decode import Pixels, open_image
from data.open import open_data
from data.source import DatasetRequest, View
from data.transforms import seeded
from features.dino import crops as crops_module
from features.dino.crops import (
    FIRST,
    LOCAL,
    SECOND,
    CropView,
    Distortion,
    MultiCrop,
    block_mask,
    distort,
    draw_distortion,
    max_masked,
)
from tests.support.jpegs import GUARD, as_pillow, jpeg
from tests.support.loading import check_same, check_same_epochs, concatenated

pytestmark = pytest.mark.fast

PHOTOGRAPHS = load_sample_images().images  # 427 x 640
CROPS = CropView((32, 24), 3, (0.32, 1.0), (0.05, 0.32), (4, 5), (0.1, 0.5))
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
    box, distortion = crops_module.random_box, crops_module.draw_distortion
    monkeypatch.setattr(
        crops_module, "random_box", lambda *how: boxes.append(eights(box(*how))) or boxes[-1]
    )
    monkeypatch.setattr(
        crops_module,
        "draw_distortion",
        lambda kind: distortions.append((kind, distortion(kind))) or distortions[-1][1],
    )
    view = replace(CROPS, gram_factor=factor)
    fields = seeded(MultiCrop(DataConfig(**flags), (channels, *SIZE), view), image, 3, 1, 5)
    monkeypatch.undo()
    grams = [*fields.get("gram_crops", ())]
    crops, of_gram = [*fields["global_crops"], *fields["local_crops"], *grams], len(grams)
    mask = fields["mask"]
    return crops, boxes + boxes[:of_gram], distortions + distortions[:of_gram], mask


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
        expected = functional.pil_to_tensor(expected.convert("L") if channels == 1 else expected)
        expected = recolored(expected / 255, how, factor if number >= 5 else 1) * 255
        assert (crop - expected).abs().mean() < (GUARD if larger > 1 else 0.5)
        shares.append(box[2] * box[3] / math.prod(whole.size))
    assert min(shares[:2]) > 0.25
    assert max(shares[2:5]) < 0.33


def test_the_gram_teacher_sees_the_same_part_of_the_image(monkeypatch):
    none = Distortion((), False, None, False)
    monkeypatch.setattr(crops_module, "draw_distortion", lambda kind: none)
    across = np.broadcast_to(np.arange(250, dtype=np.uint8), (200, 250))
    down = np.broadcast_to(np.arange(200, dtype=np.uint8)[:, None], (200, 250))
    image = Pixels(np.stack([across, down, across], 2))
    transforms = [
        MultiCrop(DataConfig(), (3, *SIZE), replace(CROPS, gram_factor=factor))
        for factor in (2.0, 1.0)
    ]
    flipped = Counter()
    for index in range(40):
        made, plain = (seeded(transform, image, 3, 1, index) for transform in transforms)
        globals_, grams = made["global_crops"], made.pop("gram_crops")
        check_same(made, plain)
        halved = torch.nn.functional.avg_pool2d(grams.float(), 2)
        inside = (halved - globals_.float())[:, :, 2:-2, 2:-2]
        assert inside.abs().max() < 1.01  # three roundings to a byte
        for small, large in zip(globals_, grams, strict=True):
            signs = [bool(each[0, 0, 0] > each[0, 0, -1]) for each in (small, large)]
            assert signs[0] == signs[1]
            flipped[signs[0]] += 1
    assert min(flipped.values()) > 20


# -- fields ---------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize(
    ("changes", "shapes"),
    [
        ({}, {"local_crops": (3, 32, 24)}),
        ({"gram_factor": 1.25}, {"local_crops": (3, 32, 24), "gram_crops": (2, 80, 100)}),
        ({"gram_factor": 1.25, "local_number": 0}, {"gram_crops": (2, 80, 100)}),
        ({"local_number": 1}, {"local_crops": (1, 32, 24)}),
    ],
    ids=str,
)
def test_the_fields_that_are_declared_are_those_of_the_crops(changes, shapes, channels):
    view = replace(CROPS, **changes)
    request = DatasetRequest(DataConfig(), channels, SIZE, 10, 3, view=view)
    shapes = {"global_crops": (2, *SIZE)} | shapes
    expected = {
        name: Field((number, channels, *size), torch.uint8)
        for name, (number, *size) in shapes.items()
    }
    declared = view.fields(request, torch.uint8, is_train=True)
    assert declared == expected | {"mask": Field((20,), torch.bool)}
    made = seeded(view.transforms(request)["train"], Pixels(PHOTOGRAPHS[0]), 3, 1, 5)
    assert made.keys() == declared.keys()
    for name, field in declared.items():
        assert (tuple(made[name].shape), made[name].dtype) == (field.shape, field.dtype)
    of_others = [each.fields(request, torch.uint8, is_train=False) for each in (view, View())]
    assert of_others[0] == of_others[1]
    assert of_others[0]["image"] == Field((channels, *SIZE), torch.uint8, rows=1)


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


SMALL = CropView((8, 8), 2, (0.32, 1.0), (0.05, 0.32), (4, 4), (0.25, 0.5))
SHAPES = {"global_crops": (2, 3, 16, 16), "local_crops": (2, 3, 8, 8), "mask": (16,)}
"""The shapes of a sample of SMALL."""


def opened(top, view=SMALL, size=(16, 16), channels=3, augment=True, **flags):
    values = {"data_dir": str(top), "batch_size": 24, "num_workers": 0}
    config = DataConfig(**values | flags)
    return open_data(DatasetRequest(config, channels, size, 10, 3, augment=augment, view=view))


def shapes_of(batch):
    return {name: tuple(values.shape) for name, values in batch.items()}


@pytest.mark.parametrize("source", ["folder", "digits"])
def test_the_same_for_any_number_of_workers_and_processes_and_after_a_resume(source, digits):
    whole = opened(digits, data_source=source)
    expected = list(itertools.islice(whole.train_loader(24, BatchShard()).epoch(2), 9))
    assert shapes_of(expected[0]) == {name: (24, *shape) for name, shape in SHAPES.items()}
    assert expected[0]["mask"].sum(1).tolist() == pytest.approx([6] * 24, abs=2)
    torch.manual_seed(1)
    workers = opened(digits, data_source=source, num_workers=2).train_loader(24, BatchShard())
    check_same_epochs(itertools.islice(workers.epoch(2, 5), 4), expected[5:])
    parts = [next(whole.train_loader(24, BatchShard(rank, 3)).epoch(2)) for rank in range(3)]
    check_same(concatenated(parts), expected[0])
    empty = next(whole.train_loader(24, BatchShard(loads=False)).epoch(2))
    check_same(empty, {name: values[:0] for name, values in expected[0].items()})
    other = next(whole.train_loader(24, BatchShard()).epoch(3))
    assert not any(torch.equal(values, expected[0][name]) for name, values in other.items())


def test_the_numbers_of_images_with_several_sizes_of_crops(digits):
    """The number is that of the image, in whichever size the batch has."""
    view = replace(SMALL, pairs=((16, 8), (32, 12)))
    split = opened(digits, view).splits["train"]
    loader = split.with_index().batches(24, BatchShard())
    sampler, sizes = split.sampler(24, shuffle=True, seed=3), Counter()
    sampler.set_position(1)
    with_numbers = itertools.islice(loader.epoch(1), 6)
    for batch, indices, plain in zip(
        with_numbers, sampler, split.batches(24, BatchShard()).epoch(1), strict=False
    ):
        assert batch.pop("index").tolist() == [at.index for at in indices]
        check_same(batch, plain)
        sizes[batch["global_crops"].shape[-1], batch["local_crops"].shape[-1]] += 1
    assert sizes.keys() == {(16, 8), (32, 12)}


def test_images_that_are_not_augmented_are_as_before(digits):
    for augment, split in ((True, "val"), (False, "train"), (False, "val")):
        with_crops, without = (
            next(
                opened(digits, view, augment=augment)
                .splits[split]
                .batches(24, BatchShard())
                .epoch(0)
            )
            for view in (SMALL, View())
        )
        assert with_crops.keys() == {"image", "target", "index"}
        check_same(with_crops, without)


def test_fake_crops():
    fake = opened("", data_source="fake")
    batch = next(fake.train_loader(24, BatchShard(1, 2)).epoch(0))
    assert shapes_of(batch) == {name: (12, *shape) for name, shape in SHAPES.items()}
    dtypes = {"global_crops": torch.uint8, "local_crops": torch.uint8, "mask": torch.bool}
    assert {name: values.dtype for name, values in batch.items()} == dtypes
    assert not any(values.any() for values in batch.values())
    assert next(fake.val_loader(24, BatchShard()).epoch(0))["image"].shape == (24, 3, 16, 16)
