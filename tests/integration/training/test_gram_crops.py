"""``--gram_crop_factor``: a Gram teacher that sees larger crops, against plain PyTorch."""

import pytest
import timm
import torch
import torch.nn.functional as F

from features.dino.model import Compared, Crops
from models.positions import Resampling
from tests.fakes.filled import filled
from tests.references import plain_dino
from tests.support.cli import DIGITS, run_program, tiny, train_tiny, train_tiny_gpu
from tests.support.crop_sizes import FORMS, PAIRS
from tests.support.dino import DINO, SMALL, WITHOUT_CLASS_TOKEN, assert_same, of_backbone
from tests.support.resolved import on_gpus

TWICE = "--gram_crop_factor 2".split()
DINOV3 = [*WITHOUT_CLASS_TOKEN, "--model", "timm/vit_small_patch16_dinov3", "--koleo_weight", "0"]


@pytest.fixture(scope="module")
def anchor(tmp_path_factory):
    """The flags of a Gram teacher whose weights are not the student's."""
    folder = tmp_path_factory.mktemp("anchor")
    weights = filled(on_gpus([*tiny(folder), *DINO]).model, seed=7).state_dict()
    torch.save(of_backbone(weights), folder / "anchor.pt")
    return ["--gram_weights", str(folder / "anchor.pt")]


@pytest.fixture(scope="module")
def expected(anchor):
    return plain_dino.train([*SMALL, *anchor, *TWICE])


# -- parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "grid"), [((8, 8), (4, 4)), ((6, 9), (4, 6)), ((32, 32), (16, 16)), ((5, 8), (4, 7))]
)
def test_features_are_resampled_as_pytorch_does(own, grid):
    torch.manual_seed(0)
    features = torch.randn(3, 2, own[0] * own[1], 24)
    images = features.flatten(0, 1).transpose(1, 2).unflatten(2, own)
    expected = F.interpolate(images, size=grid, mode="bicubic", align_corners=False)
    expected = expected.flatten(2).transpose(1, 2).unflatten(0, (3, 2))
    resampled = Resampling(own, grid, lambda values: values, antialias=False)
    found = resampled(features)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # Also inside of autocast, and of features in bf16, in fp32.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = resampled(features.bfloat16())
    assert again.dtype == torch.float32
    torch.testing.assert_close(again, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("size", [(16, 16), (16, 24)])
def test_rotary_positions_are_those_of_the_larger_crop(size, tmp_path):
    words = [*tiny(tmp_path), *DINOV3, *TWICE, "--gram_weights", "x", "--image_size"]
    run = on_gpus([*words, *map(str, size)])
    model = filled(run.model, seed=3).eval()
    theirs = timm.create_model(
        "vit_small_patch16_dinov3",
        **{"img_size": tuple(2 * side for side in size), "patch_size": 4, "num_classes": 0},
        **{"embed_dim": 32, "depth": 2, "num_heads": 2},
    )
    left = theirs.load_state_dict(of_backbone(model.state_dict()), strict=False)
    assert not left.missing_keys
    theirs.eval()
    images = torch.randn(2, 2, 3, *(2 * side for side in size))
    patches = 4 * size[0] * size[1] // 16
    mask = torch.zeros(2, patches, dtype=torch.bool)
    found = Compared(*model(Crops(images, None, mask, 1, hides=False))).patch_tokens
    expected = theirs.forward_features(images.flatten(0, 1))[:, theirs.num_prefix_tokens :]
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=1e-5, atol=1e-5)


# -- trainings ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("train", "flags", "how"), FORMS)
def test_losses_are_the_plain_ones(train, flags, how, anchor, expected, tmp_path):
    result = train(tmp_path, "--objective", "dino", *SMALL, *anchor, *TWICE, *flags.split(), **how)
    assert_same(result, expected)
    assert min(result.column("loss_gram")) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(("train", "how"), [(train_tiny_gpu, {}), (train_tiny, {"devices": 2})])
def test_each_pair_of_crop_sizes_has_larger_ones(train, how, anchor, tmp_path):
    flags = [*SMALL, *PAIRS, *anchor, "--gram_crop_factor", "1.5"]
    result = train(tmp_path, "--objective", "dino", *flags, **how)
    assert_same(result, plain_dino.train(flags))


@pytest.mark.long
def test_the_teacher_is_evaluated_without_it(anchor, tmp_path):
    train_tiny_gpu(tmp_path, *DINO, *anchor, *TWICE, "--gram_weight", "1.5", "--max_steps", "1")
    words = "run_vit_training.py --eval_only --knn --use_ema --backend cuda --batch_size 48".split()
    words += ["--data_dir", str(DIGITS), "--resume", str(tmp_path)]
    done = run_program(*words)
    assert done.returncode == 0, done.stderr
    assert "k-NN" in done.stdout
    done = run_program(*words, *anchor)
    assert done.returncode == 2
    assert "is incompatible with --eval_only" in done.stderr
