"""Mean, deviation, crop and interpolation: those of the weights, against timm's own transforms."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images
from timm.data import create_transform, resolve_data_config
from torchvision.transforms import v2

import run_vit_training
from data.config import INTERPOLATIONS, Preprocessing
from data.decode import Pixels
from data.transforms import val_transform
from run_vit_training import read_flags
from tests.support.resolved import on_xla
from tests.support.usage_error import told_in_one_line
from training.weights.describe import take_over_described
from training.weights.source import Source

NAME = "vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """A picture with edges and gradients, no square."""
    path = tmp_path_factory.mktemp("picture") / "picture.png"
    y, x = np.mgrid[:300, :400]
    colours = [np.sin(x / 9) * 90 + 120, (x * y / 500) % 255, (x // 40 + y // 30) % 2 * 200]
    Image.fromarray(np.stack(colours, axis=-1).astype(np.uint8)).save(path)
    return path


@pytest.fixture(scope="module")
def timms(tmp_path_factory):
    """timm's model with weights as timm fills them, and a file of these."""
    torch.manual_seed(0)
    model = timm.create_model(NAME).eval()
    with torch.no_grad():
        model.head.weight.normal_(std=0.3)  # so that classes differ
    path = tmp_path_factory.mktemp("timm") / "weights.safetensors"
    save_file(model.state_dict(), path)
    return model, path


def timms_top5(model, picture, **changes):
    config = resolve_data_config({}, model=model) | changes
    image = create_transform(**config)(Image.open(picture))
    with torch.no_grad():
        values, labels = model(image[None]).softmax(-1).topk(5)
    return dict(zip(labels[0].tolist(), values[0].tolist(), strict=True))


def predicted(capsys, picture, weights, *flags):
    """The likeliest classes with their probabilities, and what was said on stderr."""
    command = ["--predict", picture, "--json", "--model", NAME, "--resume", weights, *flags]
    assert run_vit_training.main(list(map(str, command))) == 0
    out, err = capsys.readouterr()
    return {entry["index"]: entry["probability"] for entry in json.loads(out)[0]["top5"]}, err


@pytest.mark.parametrize("size", [(64, 64), (40, 64), (96, 64)])
@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 1.0])
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_validation_images_are_timms(size, crop_pct, interpolation, picture):
    how = Preprocessing((0.5, 0.4, 0.3), (0.2, 0.3, 0.4), crop_pct, interpolation)
    theirs = create_transform(
        (3, *size), mean=how.mean, std=how.std, crop_pct=crop_pct, interpolation=interpolation
    )
    image = Image.open(picture)
    ours = val_transform(how, size, 3)(Pixels(np.asarray(image)))
    assert ours.dtype == torch.uint8
    ours = v2.functional.normalize(ours / 255, list(how.mean), list(how.std))
    torch.testing.assert_close(ours, theirs(image))
    other = "nearest" if interpolation == "bicubic" else "bicubic"
    apart = replace(how, interpolation=other, test_interpolation=interpolation)
    again = val_transform(apart, size, 3)(Pixels(np.asarray(image)))
    torch.testing.assert_close(
        v2.functional.normalize(again / 255, list(how.mean), list(how.std)), ours
    )


@functools.cache
def photographs():
    """scikit-learn's two, whole and cut into shapes with odd sides, two of them long and thin."""
    china, flower = load_sample_images().images
    found = [china, flower, china[:301, :173], flower[:97, :401], flower[11:400, 200:431]]
    return [*found, china[:2, :600], flower[:427, 5:6], china[:31, :27]]


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("crop_pct", [0.73, 0.95, 1.0])
@pytest.mark.parametrize("size", [(64, 64), (33, 65)])
def test_crop_modes_are_timms(size, crop_pct, crop_mode):
    for interpolation in ("bilinear", "bicubic"):
        how = Preprocessing(
            (0.5, 0.123, 0.3), crop_pct=crop_pct, interpolation=interpolation, crop_mode=crop_mode
        )
        changes = {"crop_mode": crop_mode, "interpolation": interpolation, "normalize": False}
        theirs = create_transform((3, *size), mean=how.mean, crop_pct=crop_pct, **changes)
        ours = val_transform(how, size, 3)
        for image in photographs():
            if crop_mode == "border" and min(image.shape[:2]) < 3:
                continue  # see below
            assert torch.equal(ours(Pixels(image)), theirs(Image.fromarray(image)))


def test_border_around_a_long_thin_image():
    """timm fails where the longer side leaves no pixel of the shorter one; here one is left."""
    how = Preprocessing((1.0, 0.0, 0.0), crop_pct=1.0, crop_mode="border")
    image = np.zeros((2, 1000, 3), np.uint8)
    with pytest.raises(ValueError, match="height and width must be > 0"):
        create_transform((3, 8, 8), crop_pct=1.0, crop_mode="border")(Image.fromarray(image))
    ours = val_transform(how, (8, 8), 3)(Pixels(image))
    assert ours.shape == (3, 8, 8)
    assert ours[0].unique(return_counts=True)[1].tolist() == [8, 56]


@pytest.mark.parametrize("name", ["vit_large_patch14_clip_336", "eva02_large_patch14_448"])
def test_models_whose_images_are_squashed(name):
    """timm has them so, and so has a run with a file of their weights."""
    expected = resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    assert expected["crop_mode"] == "squash"
    config = read_flags(["--model", f"timm/{name}"]).run
    config, _ = take_over_described(config, Source(Path("none.pt"), tensors={}), keeps_head=False)
    assert config.data.preprocessing.crop_mode == "squash"
    assert config.data.crop_pct == expected["crop_pct"]


def test_weights_of_timm(timms, picture, capsys):
    model, path = timms
    found, said = predicted(capsys, picture, path)
    assert found == pytest.approx(timms_top5(model, picture), rel=1e-4)
    assert said == (
        "preprocessing: mean 0.5 0.5 0.5, std 0.5 0.5 0.5, crop 0.9, bicubic (from timm's "
        "vit_tiny_patch16_224)\n"
    )


@pytest.mark.parametrize("place", ["metadata", "config.json"])
def test_what_the_file_says_itself(place, timms, picture, capsys, tmp_path):
    model, _ = timms
    changes = {"mean": [0.48, 0.45, 0.4], "std": [0.26, 0.26, 0.27], "crop_pct": 1.0}
    told = changes | {"interpolation": "bicubic", "crop_mode": "squash"}
    metadata = {"pretrained_cfg": json.dumps(told)} if place == "metadata" else None
    save_file(model.state_dict(), tmp_path / "model.safetensors", metadata)
    if place == "config.json":
        (tmp_path / place).write_text(json.dumps({"architecture": NAME, "pretrained_cfg": told}))
    found, said = predicted(capsys, picture, tmp_path / "model.safetensors")
    expected = timms_top5(model, picture, **changes, crop_mode="squash")
    assert found == pytest.approx(expected, rel=1e-4)
    assert found != pytest.approx(timms_top5(model, picture, **changes), rel=1e-4)
    assert "crop 1 squash, bicubic (from " in said
    found, _ = predicted(
        capsys, picture, tmp_path / "model.safetensors", "--crop_mode", "border", "--crop_pct", 0.9
    )
    changes |= {"crop_pct": 0.9, "crop_mode": "border"}
    assert found == pytest.approx(timms_top5(model, picture, **changes), rel=1e-4)


def test_another_architecture_than_the_presets_has_new_weights_preprocessing():
    run = on_xla(["--model", NAME, "--num_blocks", "3"])
    assert run.config.data.preprocessing == Preprocessing()
    assert run.config.data.mean == (0.485, 0.456, 0.406)
    assert run.config.data.crop_pct == 0.875


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"mean": [120, 110, 100]}, "has mean [120, 110, 100], which is not supported: set --m"),
        ({"crop_mode": "fill"}, "has crop_mode 'fill', which is not supported: set --crop_mode"),
    ],
)
def test_what_cannot_be(content, told, timms, picture, capsys, tmp_path):
    path = tmp_path / "model.safetensors"
    path.symlink_to(timms[1])
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert told in told_in_one_line(capsys, "--predict", picture, "--model", NAME, "--resume", path)
