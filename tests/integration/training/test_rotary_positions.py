"""``--rope_rescale_coords``: against timm's random factor, a formula, and whole plain trainings."""

import math

import numpy as np
import pytest
import timm
import torch

from features.dino.model import Crops
from models.positions import set_rope_factors
from models.registry import open_model
from run_vit_training import read_flags
from tests.fakes.filled import SMALL
from tests.references import plain_steps
from tests.support.cli import DIGITS, TINY_SIZES, tiny, train_tiny, train_tiny_gpu
from tests.support.dino import HEADS
from tests.support.marks import long
from tests.support.resolved import on_xla
from tests.support.steady import READ_PER_LOG, STEADY, assert_steady_state
from tests.support.usage_error import told_in_one_line
from tools.self_check.small_run import first_weights
from training.schedule import RopeFactors, rope_factors
from training.weights.describe import take_over_described
from training.weights.find import find
from xla_fsdp.resolve_xla import resolve

DINOV3 = "vit_small_patch16_dinov3"
# A layer scale by which blocks count: DINOv3's own is 1e-5.
RUN = f"--model timm/{DINOV3} --init_values 0.5 --rope_rescale_coords 2".split()
DINO = f"--objective dino {HEADS} --local_crops 2 --local_crop_size 8 --koleo_weight 0".split()
DINO += ["--warmup_steps", "0", "--lr", "1e-3"]


def table(rope, rows, columns, factor):
    """The sines, then cosines, that DINOv3's positions are, (rows x columns, 2 x head width)."""
    periods = [rope.temperature ** (4 * i / rope.dim) for i in range(rope.dim // 4)]
    found = []
    for row in range(rows):
        for column in range(columns):
            places = ((row + 0.5) / rows, (column + 0.5) / columns)
            angles = [2 * math.pi * factor * (2 * p - 1) / each for p in places for each in periods]
            found.append([math.sin(a) for a in angles * 2] + [math.cos(a) for a in angles * 2])
    return torch.tensor(found)


def with_weights(spec):
    """The model with weights by which its positions count. (First ones for a training are small:
    all keys are nearly alike.)"""
    model = spec.build()
    first_weights(1, model, "")
    return model


# -- the model -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [DINOV3, "eva02_base_patch14_224", "vit_small_patch16_rope_mixed_224"]
)
def test_as_timm_with_the_same_factor(name):
    how = SMALL | {"rope_rescale_coords": 3.0}
    model = with_weights(open_model(f"timm/{name}", how)).train()
    theirs = timm.create_model(name, **how).train()
    theirs.load_state_dict(model.state_dict())
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 32)
    torch.manual_seed(4)
    limit = math.log(3.0)
    factor = torch.empty(1).uniform_(-limit, limit).exp()
    set_rope_factors(model, torch.cat([factor, torch.tensor([5.0])]))
    torch.manual_seed(4)
    rescaled = theirs(images)
    torch.testing.assert_close(model(images), rescaled, rtol=1e-5, atol=1e-6)
    assert (rescaled - theirs.eval()(images)).abs().max() > 1e-3
    torch.testing.assert_close(model.eval()(images), theirs.eval()(images), rtol=1e-5, atol=1e-6)


def test_timms_own_factor_is_this_one():
    """Sapiens2 has one without a flag: timm would draw it in each process for itself."""
    spec = open_model("timm/vit_base_patch16_sapiens2", {})
    assert spec.rope_rescale == 2
    assert spec.build().rope.rescale_coords is None
    assert open_model(spec.name, {"rope_rescale_coords": 1.0}).rope_rescale == 1


def test_global_and_local_crops_have_factors_of_their_own(tmp_path):
    run = on_xla([*tiny(tmp_path), *RUN, *DINO])
    model = with_weights(run.model).train()
    size = {"images": 3, "crops": 2, "channels": 3}.values()
    crops = Crops(
        torch.randn(*size, 16, 16), torch.randn(*size, 8, 8), torch.zeros(3, 16) > 0, 4, True
    )
    set_rope_factors(model, torch.tensor([0.7, 1.8]))
    found = model(crops)
    run = on_xla([*tiny(tmp_path), *RUN, *DINO, "--rope_rescale_coords", "1"])
    plain = with_weights(run.model)
    for rope, side, factor in ((plain.rope, 4, 0.7), (plain.other_ropes["4"], 2, 1.8)):
        rope.pos_embed_cached = table(rope, side, side, factor)
    for one, other in zip(found, plain.train()(crops), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_factors_are_uniform_in_their_logarithm():
    factors = RopeFactors(2.0, seed=3)
    logs = np.log2([factors.at(step) for step in range(4000)])
    assert abs(logs).max() <= 1
    for of_size in logs.T:
        counts, _ = np.histogram(of_size, bins=8, range=(-1, 1))
        assert counts == pytest.approx(500, rel=0.15)
    assert abs(np.corrcoef(logs.T)[0, 1]) < 0.05
    assert abs(np.corrcoef(logs[1:, 0], logs[:-1, 0])[0, 1]) < 0.05
    assert factors.at(7) == RopeFactors(2.0, seed=3).at(7) != RopeFactors(2.0, seed=4).at(7)
    assert RopeFactors(1.0, seed=3).at(0) is None


def test_linear_probe_has_none(tmp_path):
    probe = [*tiny(tmp_path), "--linear_probe", "--model", "timm/vit_base_patch16_sapiens2"]
    probe += "--embed_dim 768 --num_heads 12 --num_blocks 12 --patch_size 16".split()
    assert rope_factors(on_xla(probe)).at(0) is None


# -- trainings -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The flags of a training that begins with such weights."""
    folder = tmp_path_factory.mktemp("weights")
    model = with_weights(on_xla([*tiny(folder), *RUN]).model)
    torch.save(model.state_dict(), folder / "weights.pt")
    return ["--init_from", str(folder / "weights.pt")]


@pytest.fixture(scope="module")
def expected(weights):
    """Losses of timm's model, whose table of positions is another one in each step."""
    flags = read_flags(["--data_dir", str(DIGITS), "--hflip", "0", *tiny("none")[4:], *RUN])
    config, _ = take_over_described(flags.run, find(weights[1], "--init_from"), keeps_head=False)
    run = resolve(config, flags.xla)
    sizes = TINY_SIZES | {"num_classes": 10, "init_values": 0.5}
    model = timm.create_model(DINOV3, **sizes, dynamic_img_size=False)  # with a table
    model.load_state_dict(torch.load(weights[1]))
    how, steps = run.config.optimizer, iter(range(6))

    def rescale(*_):
        factor, _ = rope_factors(run).at(next(steps))
        model.rope.pos_embed_cached = table(model.rope, 4, 4, factor)

    model.register_forward_pre_hook(rescale)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=how.weight_decay)
    return plain_steps.train(model, optimizer, run, 6, plain_steps.warm_cosine(how))


@pytest.mark.parametrize(
    ("train", "flags", "how"),
    [
        (train_tiny, "", {"devices": 4}),
        long(train_tiny_gpu, "", {"processes": 2}),
        long(train_tiny, "--xla_fsdp nested", {}),
        long(train_tiny, "--mesh_domain 2 --grad_accum_steps 2", {"devices": 4}),
        long(train_tiny_gpu, "--mesh_domain 2 --grad_ckpt selective", {"processes": 2}),
        long(train_tiny_gpu, "--compile --grad_accum_steps 2", {"processes": 2}),
        long(train_tiny_gpu, "--precision bf16", {"processes": 2}),
        long(train_tiny_gpu, "--fsdp megatron", {"processes": 2}),
    ],
)
def test_losses_and_gradients(train, flags, how, weights, expected, tmp_path):
    result = train(tmp_path, *RUN, *weights, *flags.split(), **how)
    rel = 0.03 if "bf16" in flags else 1e-5
    for name, values in zip(("loss", "grad_norm"), expected, strict=True):
        assert result.column(name) == pytest.approx(values, rel=rel), name


@pytest.mark.long
@pytest.mark.parametrize("flags", ["--no-scan_blocks", "--xla_fsdp nested"])
def test_dino_on_forms(flags, weights, tmp_path):
    dino = [*RUN, *DINO, *weights]
    gpu = train_tiny_gpu(tmp_path / "gpu", *dino, processes=2)
    nested = "nested" in flags
    xla = train_tiny(tmp_path / "x", *dino, *flags.split(), devices=1 if nested else 2)
    assert xla.column("loss") == pytest.approx(gpu.column("loss"), rel=1e-5)
    off = train_tiny_gpu(tmp_path / "off", *dino, "--rope_rescale_coords", "1")
    assert off.column("loss") != pytest.approx(gpu.column("loss"), rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "flags", "graphs"),
    [
        (RUN, DINO, 1),
        (RUN, ["--grad_accum_steps", "2", "--precision", "bf16"], 3),
        (["--model", "timm/vit_small_patch16_rope_mixed_224", *RUN[-2:]], [], 1),
    ],
)
def test_steady_state(model, flags, graphs, tmp_path):
    result = train_tiny(tmp_path, *model, *flags, *STEADY, devices=2)
    assert_steady_state(result, graphs, READ_PER_LOG + 4 * (flags == DINO))  # parts of the loss
    assert result.steps[6]["compilations"] == result.steps[1]["compilations"]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            "--model timm/vit_base_patch16_224",
            "does not accept --rope_rescale_coords (it is timm's",
        ),
        ("--model vit_10b", "vit_10b does not accept --rope_rescale_coords; it accepts"),
        ("--model timm/eva_giant_patch14_224", "--rope_rescale_coords requires a model with"),
    ],
)
def test_mistakes(flags, line, capsys, tmp_path):
    words = [*tiny(tmp_path / "run"), *RUN[-2:], "--backend", "cuda", *flags.split()]
    assert line in told_in_one_line(capsys, *words)
    assert not (tmp_path / "run").exists()
