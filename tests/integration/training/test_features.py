"""--features: against timm's forward_features in plain PyTorch, on each form of sharding."""

import json
import os
import resource
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

import run_vit_training
from models.hybrid_vit import HybridViT, HybridVitConfig
from tests.support.cli import TINY_SIZES
from tests.support.features import (
    FEATURES,
    FLAGS,
    FORMS,
    LOADER,
    MEAN,
    SIZES,
    STD,
    TRAIN,
    VAL,
    backbone,
    changed,
    pixels_of,
    read,
    run_form,
    tokens_of,
)
from tests.support.marks import long
from tests.support.usage_error import told_in_one_line
from training.evaluation.features import components

PREFIX = 3


def expected(tokens, prefix=PREFIX):
    return {
        "class": tokens[:, 0],
        "mean": tokens[:, prefix:].mean(dim=1),
        "patches": tokens[:, prefix:],
    }


def assert_are(found, tokens, of=FEATURES, rel=1e-5, prefix=PREFIX):
    for kind in of:
        theirs = expected(tokens, prefix)[kind]
        ours = torch.from_numpy(np.stack(found[kind])).view(theirs.shape)
        assert (ours - theirs).abs().max() <= rel * theirs.abs().max()
    assert {*FEATURES}.intersection(found) == {*of}


def write_here(capsys, out, *flags):
    """The same in this process, on FSDP2, which starts no other one."""
    words = ["--backend", "cuda", "--features", out, *LOADER, *flags]
    assert run_vit_training.main(list(map(str, words))) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "form", ["SPMD, four devices", *(long(form) for form in FORMS if form != "SPMD, four devices")]
)
def test_features_are_timms(form, images, weights, tmp_path):
    asked = ("--features", tmp_path / "out", "--pca", "--features_of", *FEATURES)
    said = run_form(form, *asked, *FLAGS, "--init_from", weights, "--data_dir", images).stdout
    assert said.count(f"{images}/train/3/broken.png cannot be read") == 1
    description = json.loads((tmp_path / "out" / "features.json").read_text())
    assert description["images"] == {"train": TRAIN, "val": VAL}
    assert description["classes"] == [str(digit) for digit in range(10)]
    assert not (tmp_path / "out.partial").exists()
    assert_pca(tmp_path / "out" / "pca.png", images, most=40 if "bf16" in form else 2)
    for split in ("train", "val"):
        paths = sorted(path for path in (images / split).glob("*/*") if path.stem != "broken")
        found = read(tmp_path / "out", split)
        assert found["path"] == [str(path) for path in paths]
        assert found["label"] == [int(path.parent.name) for path in paths]
        assert_are(found, tokens_of(backbone(), paths), rel=3e-2 if "bf16" in form else 1e-5)


def assert_pca(file, images, most):
    """Each of eight images beside its patches' principal components, of 255 at ``most`` off."""
    paths = sorted((images / "val").glob("*/*"))
    paths = [paths[place * VAL // 8] for place in range(8)]
    rows = tokens_of(backbone(), paths)[:, PREFIX:].reshape(8 * 16, 32).double().numpy()
    rows -= rows.mean(axis=0)
    _, _, directions = np.linalg.svd(rows)
    directions = [each if abs(max(each)) == max(abs(each)) else -each for each in directions[:3]]
    expected = np.stack([rows @ each for each in directions], axis=-1)
    expected = (expected - expected.min(axis=0)) / np.ptp(expected, axis=0)
    picture, side, gap = np.asarray(Image.open(file)).astype(int), 96, 2
    assert picture.shape == (8 * side + 7 * gap, 2 * side + gap, 3)
    mean, std = (torch.tensor(each)[:, None, None] for each in (MEAN, STD))
    for number, colors in enumerate(expected.reshape(8, 4, 4, 3)):
        row = picture[number * (side + gap) :][:side]
        pixels = (pixels_of([paths[number]])[0] * std + mean).permute(1, 2, 0) * 255
        assert abs(row[::6, :side:6] - pixels.numpy()).max() <= 1
        in_patches = row[:, side + gap :].reshape(4, 24, 4, 24, 3)
        assert (in_patches == in_patches[:, :1, :, :1]).all()
        assert abs(in_patches[:, 0, :, 0] - 255 * colors).max() <= most


def test_components_of_few_values():
    (first, second), same = torch.randn(2, 5), torch.ones(2, 5, 7)
    assert not components(same).any()
    found = components(torch.stack([first, first], dim=-1)[None])
    scaled = (first - first.min()) / (first.max() - first.min())
    assert torch.allclose(found[0, :, 0], scaled, atol=1e-6)
    assert found.shape == (1, 5, 3)
    assert components(torch.stack([first, second])[..., None]).shape == (2, 5, 3)


def test_parquet_of_images_without_labels(images, weights, tmp_path, capsys):
    photos = tmp_path / "photos"
    shutil.copytree(images / "val", photos)
    out = tmp_path / "new" / "out.parquet"
    write_here(
        capsys, out, *FLAGS, "--init_from", weights, "--data_dir", photos, "--without_labels"
    )
    found, paths = read(out, "train"), sorted(photos.glob("*/*"))
    assert found["path"] == [str(path) for path in paths]
    assert "label" not in found
    assert_are(found, tokens_of(backbone(), paths), of=("class", "mean"))
    assert sorted(path.name for path in out.iterdir()) == [
        "features.json",
        "train-00000-00000.parquet",
    ]
    assert json.loads((out / "features.json").read_text())["images"] == {"train": VAL}


def test_files_of_a_limited_size(images, weights, tmp_path, capsys, monkeypatch):
    import training.evaluation.features

    monkeypatch.setattr(training.evaluation.features, "_FILE_BYTES", 1)
    out = tmp_path / "out"
    write_here(capsys, out, *FLAGS, "--init_from", weights, "--data_dir", images)
    assert len(list(out.glob("train-*"))) == -(-(TRAIN + 1) // 16)
    assert len(read(out, "train")["path"]) == TRAIN


@pytest.mark.parametrize("flags", ["--global_pool avg --fc_norm", "--model hybrid_vit"])
def test_models_without_a_class_token(flags, images, tmp_path, capsys):
    torch.manual_seed(1)
    if "hybrid" in flags:
        model = HybridViT(HybridVitConfig(**TINY_SIZES | {"img_size": (16, 16)}, num_classes=10))
        model.forward_features = lambda x: model.blocks(model.add_positions(model.patch_embed(x)))
    else:
        model = VisionTransformer(**TINY_SIZES, class_token=False, global_pool="avg", fc_norm=True)
    state = {key: each.contiguous() for key, each in changed(model).state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    given = ["--data_dir", images, "--init_from", tmp_path / "w.safetensors", *SIZES]
    given += [
        *flags.split(),
        *"--mean 0.485 0.456 0.406 --std 0.229 0.224 0.225 --crop_pct 0.875".split(),
    ]
    write_here(capsys, tmp_path / "out", *given, "--interpolation", "bicubic")
    found = read(tmp_path / "out", "val")
    tokens = tokens_of(model, found["path"])
    assert_are(found, tokens, of=("mean",), prefix=0)


# -- mistakes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--features_of", "class"], "--features_of class: vit_10b has no class token"),
        (["--fake_data"], "--features requires images: --fake_data has none"),
        (["--resume", "x"], "--init_from and --resume both name weights: drop one of the two"),
        (["--use_ema"], "--use_ema requires --resume, not --init_from: use --resume PATH"),
        (["--image_size", "24"], None),
    ],
)
def test_mistakes_are_told_in_one_line(flags, message, images, weights, tmp_path, capsys):
    out = tmp_path / "out"
    always = ["--features", out, "--init_from", weights, "--data_dir", images, *LOADER]
    of_class = [] if "--features_of" in flags else FLAGS
    if message is None:  # positions are resampled, as for fine-tuning
        write_here(capsys, out, *of_class, *always[2:], *flags)
        assert len(read(out, "val")["path"]) == VAL
        return
    told = told_in_one_line(capsys, "--backend", "cuda", *SIZES, *of_class, *always, *flags)
    assert message in told
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(images, weights, tmp_path, capsys):
    target = tmp_path / "there"
    target.mkdir()
    link, dangling = tmp_path / "link", tmp_path / "dangling"
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.touch()
    of_link, of_file, of_others = (tmp_path / f"{each}.partial" for each in "abc")
    of_link.symlink_to(target)
    of_file.touch()
    of_others.mkdir()
    (of_others / "photo.jpg").touch()
    for out, message in (
        *((tmp_path / each, f"{each}.partial, the folder for incomplete output") for each in "abc"),
        (images / "train" / "out", f"is inside --data_dir {images}, which is searched"),
        (target, "already exists: choose another name"),
        (link, "already exists: choose another name"),
        (dangling, "already exists: choose another name"),
        (file / "out", "cannot write to --features"),
        ("gs://bucket/out", "is a URL: give a local path"),
    ):
        flags = ["--features", out, "--init_from", weights, "--data_dir", images]
        assert message in told_in_one_line(capsys, "--backend", "cuda", *FLAGS, *flags)
    assert list(target.iterdir()) == []
    assert [path.name for path in of_others.iterdir()] == ["photo.jpg"]
    assert not os.path.lexists(tmp_path / "nowhere")
    assert sys.modules.get("torch_xla") is None


def test_a_full_disk_and_what_is_left_of_it(images, weights, tmp_path, capsys):
    words = [*FLAGS, "--init_from", weights, "--data_dir", images]
    out = tmp_path / "out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # bytes of a file
    try:
        always = ["--backend", "cuda", "--features", out, *LOADER]
        assert run_vit_training.main(list(map(str, [*always, *words]))) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"error: cannot write --features {out}: File too large" in told
    assert not out.exists()
    assert (tmp_path / "out.partial").is_dir()
    write_here(capsys, out, *words)
    assert len(read(out, "train")["path"]) == TRAIN
    assert not (tmp_path / "out.partial").exists()
