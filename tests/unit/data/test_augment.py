"""Augmentations of one image: timm's own transforms, of the same numbers, on photographs."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from timm.data import create_transform
from timm.data.distributed_sampler import RepeatAugSampler

from data.batch import BatchShard, SampleIndex, collate
from data.config import DataConfig
from data.decode import Pixels
from data.files import DataFolderError
from data.loader import GlobalBatchSampler
from data.open import open_data
from data.transforms import TrainTransform, seeded
from features.dino.config import DinoConfig
from tests.support.cli import ROOT
from tests.support.loading import (
    arguments,
    check_same,
    check_same_epochs,
    concatenated,
    loaders,
)
from tests.support.resolved import on_xla
from tests.support.usage_error import told_in_one_line
from tools.show_augmentations import DRAWS, columns, images_of_classes, main, read_run
from training.data import dataset_request
from training.extensions import use_extensions

pytestmark = pytest.mark.fast

PHOTOGRAPHS = [np.array(each) for each in load_sample_images().images]  # 427 x 640
SIZE = (64, 80)
TRIES = 12
POLICIES = [
    "rand-m9-mstd0.5-inc1",
    "rand-m15-n3-p0.9-mmax30-mstd101-tweights",
    "original-mstd0.5",
    "originalr",
    "v0",
    "v0r-mstd1",
    "3a",
    "augmix-m5-w4-d2",
    "augmix-b1-mstd1",
]


def timms_seed():
    """What the program seeds Python's and NumPy's generators with, before timm draws from them."""
    seed = int(torch.randint(2**32, ()))
    random.seed(seed)
    np.random.seed(seed)


def posterized(image, bits):
    """As Pillow's own, before it refused to keep 0 bits and fewer, as timm's policies ask."""
    return image.point([value & ~(2 ** (8 - bits) - 1) for value in range(256)] * 3)


def by_timm(config, pixels, seed):
    """The crop of this program, which test_decode.py compares; then timm's stages, in fp32."""
    how = config.preprocessing
    plain = DataConfig(vflip=config.vflip, train_interpolation=config.train_interpolation)
    _, recoloured, finished = create_transform(
        (3, *SIZE),
        is_training=True,
        separate=True,
        interpolation=config.train_interpolation or how.interpolation,
        auto_augment=config.aa,
        color_jitter=config.color_jitter or None,
        re_prob=config.reprob,
        re_mode=config.remode,
        re_count=config.recount,
        mean=how.mean,
        std=how.std,
    )
    torch.manual_seed(seed)
    image = TrainTransform(plain, SIZE, 3)(Pixels(pixels))
    image = Image.fromarray(image.permute(1, 2, 0).numpy())
    if config.aa or config.color_jitter:
        timms_seed()
        image = recoloured(image)
    if config.reprob:
        timms_seed()
    return finished(image)


@pytest.mark.parametrize(
    "flags",
    [
        *({"aa": policy} for policy in POLICIES),
        {"aa": "3a", "color_jitter": 0.3, "vflip": 0.5},
        {"color_jitter": (0.4, 0.2, 0.1, 0.5), "train_interpolation": "random"},
        {"reprob": 1.0, "remode": "const", "recount": 3},
        {"aa": "rand-m9-mstd0.5-inc1", "reprob": 0.5, "train_interpolation": "random"},
    ],
    ids=str,
)
def test_images_are_timms(flags, monkeypatch):
    """Bytes are timm's; noise is what a byte can be: half a grey level off, or black or white."""
    config = DataConfig(**flags)
    how, ours = config.preprocessing, TrainTransform(config, SIZE, 3)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (how.mean, how.std))
    monkeypatch.setattr("timm.data.auto_augment.ImageOps.posterize", posterized)
    changed = 0
    for number in range(TRIES):
        pixels = PHOTOGRAPHS[number % 2].copy()
        torch.manual_seed(number)
        random.seed(1)
        np.random.seed(1)
        before = random.getstate(), np.random.get_state()[1].tolist()
        made = ours(Pixels(pixels))
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
        assert made.dtype == torch.uint8
        assert np.array_equal(pixels, PHOTOGRAPHS[number % 2])
        theirs = (by_timm(config, pixels, number) * std + mean).clamp(0, 1) * 255
        assert (made - theirs).abs().max() < 0.501
        torch.manual_seed(number)
        changed += not torch.equal(made, TrainTransform(DataConfig(), SIZE, 3)(Pixels(pixels)))
    assert changed > TRIES / 2


def test_pixels_that_are_not_resized_are_not_written_to():
    pixels = np.full((8, 8, 3), 7, np.uint8)
    config = DataConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0, reprob=1.0)
    assert (TrainTransform(config, (8, 8), 3)(Pixels(pixels)) != 7).any()
    assert (pixels == 7).all()


def test_flips_and_grey():
    ramp = np.arange(64, dtype=np.uint8).reshape(8, 8, 1).repeat(3, 2)
    config = DataConfig(scale=(1.0, 1.0), ratio=(1.0, 1.0), hflip=0, vflip=1.0)
    made = seeded(TrainTransform(config, (8, 8), 3), Pixels(ramp), 0, 0, 0)
    assert torch.equal(made, torch.from_numpy(ramp[::-1].copy()).permute(2, 0, 1))
    for pixels in (ramp, PHOTOGRAPHS[0]):  # gray images stay as they are
        gray = np.array(Image.fromarray(pixels).convert("L"))
        config = DataConfig(scale=(1.0, 1.0), ratio=(0.1, 10.0), hflip=0)
        made = TrainTransform(config, gray.shape, 1)(Pixels(pixels))
        assert torch.equal(made, torch.from_numpy(gray)[None])
    config = DataConfig(aa="3a", color_jitter=(0.3, 0.3, 0.3, 0.5), reprob=1.0)
    made = seeded(TrainTransform(config, SIZE, 1), Pixels(PHOTOGRAPHS[0]), 0, 0, 0)
    assert made.shape == (1, *SIZE)


@pytest.mark.parametrize("policy", ["v0", "rand-m10-inc1-p1", "rand-m30-mmax30-inc1-p1"])
def test_posterized_to_nothing(policy):
    """Timm's own operation ends with Pillow's ValueError; with --aa such an image is black."""
    made = TrainTransform(DataConfig(aa=policy), SIZE, 3)
    images = [seeded(made, Pixels(PHOTOGRAPHS[0]), 0, 0, n) for n in range(40)]
    assert any(image.max() == 0 for image in images)


def test_policies_that_cannot_be_drawn():
    with pytest.raises(DataFolderError, match="--aa rand-n99-tweights is invalid: "):
        TrainTransform(DataConfig(aa="rand-n99-tweights"), SIZE, 3)


# -- repeated augmentation ------------------------------------------------------------


@pytest.mark.parametrize(
    ("repeats", "batch_size"),
    [
        (3, 12),
        (3, 8),
    ],
)
def test_repeats_are_timms(repeats, batch_size):
    length, epoch = 103, 5
    timms = [
        RepeatAugSampler(range(length), 4, rank, num_repeats=repeats, selected_round=0)
        for rank in range(4)
    ]
    for each in timms:
        each.set_epoch(epoch)  # is its seed, and ours with --seed 0
    joined = [index for together in zip(*timms, strict=True) for index in together]
    sampler = GlobalBatchSampler(length, batch_size, shuffle=True, repeats=repeats)
    sampler.set_position(epoch)
    batches = list(sampler)
    assert len(batches) == length // batch_size
    for number, batch in enumerate(batches):
        theirs = joined[number * batch_size : (number + 1) * batch_size]
        assert sorted(at.index for at in batch) == sorted(theirs)
        # Repeats are apart, and each is drawn anew.
        part = batch_size // repeats
        parts = [batch[start : start + part] for start in range(0, part * repeats, part)]
        if batch_size % repeats == 0:
            assert all(len({at.index for at in each}) == part for each in parts)
        assert len(set(batch)) == batch_size
    indices = [at for batch in batches for at in batch]
    assert len(set(indices)) == len(indices)
    sampler.set_position(epoch + 1)
    assert not set(indices) & {at for batch in sampler for at in batch}


ALL = {
    "aa": "rand-m9-mstd0.5-inc1",
    "reprob": 0.5,
    "aug_repeats": 3,
    "vflip": 0.3,
    "train_interpolation": "random",
}


@pytest.mark.parametrize("source", ["folder", "digits"])
def test_the_same_for_any_number_of_workers_and_processes_and_after_a_resume(source, digits):
    flags = ALL | {"batch_size": 60, "data_source": source}
    plain, val = loaders(arguments(digits, **flags))
    torch.manual_seed(0)
    expected = list(itertools.islice(plain.epoch(2), 9))
    check_same(next(val.epoch(0)), next(loaders(arguments(digits, batch_size=60))[1].epoch(0)))
    workers, _ = loaders(arguments(digits, **flags, num_workers=2))
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    check_same_epochs(itertools.islice(workers.epoch(2, 5), 4), expected[5:])
    parts = [
        loaders(arguments(digits, **flags), BatchShard(rank, 3))[0].epoch(2) for rank in range(3)
    ]
    check_same(concatenated([*map(next, parts)]), expected[0])
    copies = expected[0]["image"].unflatten(0, (3, 20))
    assert expected[0]["target"].view(3, 20).unique(dim=0).shape == (1, 20)
    assert not copies[0].equal(copies[1])


# -- the picture ----------------------------------------------------------------------


def test_columns_show_what_is_trained_on(tmp_path):
    still = "--scale 1 1 --ratio 1 1 --hflip 0 --cutmix 1".split()
    size = "--image_size 16 --patch_size 4 --num_classes 10".split()
    flags = ["--data_source", "digits", "--model", "vit_tiny_patch16_224", *size, *still]
    picture = tmp_path / "picture.png"
    run = read_run(flags)
    whole, *cut = columns(run, open_data(dataset_request(run)))
    assert len(cut) == DRAWS
    for column in cut:
        share = float(column.title.removeprefix("cutmix, "))
        own = (column.images == whole.images).all(1)
        assert (own | (column.images == whole.images.flip(0)).all(1)).all()
        assert (own.float().mean((1, 2)) >= share - 0.01).all()
        digits = [label.partition(":")[0] for label in whole.labels]
        for label, digit, other in zip(column.labels, digits, digits[::-1], strict=True):
            found = {part.partition(": ")[0]: float(part[-4:]) for part in label.split(" + ")}
            expected = {digit: 1.0} if digit == other else {digit: share, other: 1 - share}
            assert found == pytest.approx(expected, abs=0.011)
    assert main([*flags, str(picture)]) == 0
    assert main(["--help"]) == 0
    with Image.open(picture) as drawn:
        assert min(drawn.size) > 300


def test_flags_of_an_extension(digits, tmp_path):
    extension = tmp_path / "tilted.py"
    extension.write_text(EXTENSION)
    flags = ["--data_dir", str(digits), *"--image_size 16 --patch_size 4 --num_classes 10".split()]
    try:
        own = ["--extension", str(extension), "--tilted"]
        assert main([*flags, *own, str(tmp_path / "picture.png")]) == 0
    finally:
        use_extensions([])
    assert (tmp_path / "picture.png").exists()


EXTENSION = """
from dataclasses import dataclass
from typing import ClassVar
from config_fields import flag
from training.feature import Feature

@dataclass(frozen=True)
class TiltedConfig:
    group: ClassVar[str] = "data"
    tilted: bool = flag(False, "tilt images")

class Tilted(Feature):
    flags = TiltedConfig
"""


@pytest.mark.parametrize(
    ("flags", "local"), [("--local_crops 2", 2), ("--local_crops 1 --crop_sizes 16x8 24x12", 1)]
)
def test_columns_of_crops(flags, local, tmp_path):
    words = "--data_source digits --model vit_tiny_patch16_224 --image_size 16 --patch_size 4"
    words += " --objective dino --class_token --koleo_weight 0 --local_crop_size 8 --hflip 0"
    run = read_run([*words.split(), *flags.split()])
    data = open_data(dataset_request(run))
    whole, first, second, *others = columns(run, data)
    titles = ["image", "global, masked", "global", *(f"local {n + 1}" for n in range(local))]
    assert [each.title for each in (whole, first, second, *others)] == titles
    plain = replace(
        run, config=run.config.with_flags(replace(run.config.of(DinoConfig), crop_sizes=None))
    )
    train = open_data(dataset_request(plain)).splits["train"]
    numbers = images_of_classes(data, run.config.seed)
    batch = collate([train[SampleIndex(0, number)].fields for number in numbers])
    crops = batch["global_crops"] / 255
    assert second.images.equal(crops[:, 1])
    hidden = batch["mask"].view(-1, 4, 4).repeat_interleave(4, 1).repeat_interleave(4, 2)[:, None]
    shown = torch.where(hidden, crops[:, 0] / 4 + 0.375, crops[:, 0])
    torch.testing.assert_close(first.images, shown)
    assert first.labels == [f"{100 * each:.0f} % masked" for each in batch["mask"].float().mean(1)]
    for number, column in enumerate(others):
        assert column.images.equal(batch["local_crops"][:, number] / 255)


def test_the_policy_of_a_recipe_can_be_left_out():
    recipe = f"@{ROOT / 'recipes/vit_s16_imagenet_90ep.args'}"
    assert on_xla(f"{recipe} --fake_data --aa none").config.data.aa is None


# -- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--aa rand-magnitude9", "argument --aa: 'rand-magnitude9' is not an augmentation policy"),
        ("--aug_repeats 17 --batch_size 16", "--aug_repeats 17 exceeds --batch_size 16: each"),
        ("--color_jitter 0.4 0.4", "--color_jitter takes 1 number, 3"),
        ("--color_jitter 0 0 0 0.6", "--color_jitter: hue 0.6 must be at most 0.5"),
        ("--color_jitter 0.4 --aa v0", "--color_jitter is incompatible with --aa v0, which"),
        ("--data_source digits --aa rand-n99-t3aw", "--aa rand-n99-t3aw is invalid: "),
    ],
)
def test_refused(flags, told, capsys, tmp_path):
    flags = ["--ckpt_dir", tmp_path, "--model", "vit_tiny_patch16_224", *flags.split()]
    line = told_in_one_line(capsys, "--backend", "xla", *flags)
    assert line.startswith(told)
    assert not any(tmp_path.iterdir())
