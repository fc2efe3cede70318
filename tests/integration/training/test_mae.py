"""``--objective mae``: against an independent one in plain PyTorch, on every form; masks; files."""

import io
import json
import math

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from data.batch import BatchShard
from data.open import open_data
from features.mae.model import images_of, patches_of
from features.mae.objective import ranks_of
from tests.references import plain_mae
from tests.references.plain_checkpoint import convert
from tests.support.cli import TINY_SIZES, need_xla, run_program, tiny, train_tiny, train_tiny_gpu
from tests.support.mae import MAE, SMALL
from tests.support.marks import long
from tests.support.resolved import on_gpus
from tests.support.resuming import EPOCHS_OF_5, assert_resumes_at_step_7
from tests.support.steady import STEADY, assert_steady_state
from tests.support.tensorboard_files import events_in
from tests.support.usage_error import told_in_one_line
from tools.convert import main as to_other_form
from training.data import dataset_request

PICTURE = "reconstructions.png"
PREPROCESSING = "--mean 0.485 0.456 0.406 --std 0.229 0.224 0.225 --crop_pct 0.875".split()


@pytest.fixture(scope="module")
def expected():
    return plain_mae.train(SMALL)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory):
    """A finished run in two processes."""
    flags = "--ckpt_step_interval 3 --model_ema".split()
    return train_tiny_gpu(tmp_path_factory.mktemp("mae"), *MAE, *flags, processes=2)


def assert_same(result, expected):
    for name in ("loss", "grad_norm"):
        assert result.column(name) == pytest.approx(expected[name], rel=1e-5)
    assert result.evaluations[-1]["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    assert "Involuntary full rematerialization" not in result.stderr


# -- losses and gradients -------------------------------------------------------------


def test_two_processes(on_gpu, expected):
    assert_same(on_gpu, expected[0])


@pytest.mark.parametrize(
    ("devices", "flags"),
    [
        (4, "--mesh_dcn 2 --mesh_fsdp 2"),
        long(1, ""),
        long(2, "--grad_ckpt selective --grad_accum_steps 4"),
        long(2, "--no-scan_blocks"),
        long(1, "--xla_fsdp nested --grad_accum_steps 2"),
    ],
)
def test_on_xla(devices, flags, expected, on_gpu, tmp_path):
    assert_same(train_tiny(tmp_path, *MAE, *flags.split(), devices=devices), expected[0])


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("flags", ["--fsdp megatron", "--grad_accum_steps 2"])
def test_on_gpus(flags, processes, expected, tmp_path):
    assert_same(train_tiny_gpu(tmp_path, *MAE, *flags.split(), processes=processes), expected[0])


@pytest.mark.long
def test_other_settings(tmp_path):
    flags = "--no-norm_pix_loss --mask_ratio 0.5 --seed 7".split()
    expected, _ = plain_mae.train([*SMALL, *flags])
    assert_same(train_tiny_gpu(tmp_path, *MAE, *flags), expected)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["lion", "muon"])
def test_optimizers(optimizer, tmp_path):
    flags = [*MAE, "--optimizer", optimizer, "--layer_decay", "0.8", "--lr", "1e-3"]
    flags += "--no_decay norms biases embeddings".split()
    xla = train_tiny(tmp_path / "xla", *flags, devices=2)
    gpu = train_tiny_gpu(tmp_path / "gpu", *flags)
    assert xla.column("loss") == pytest.approx(gpu.column("loss"), rel=1e-4)


# -- masks ----------------------------------------------------------------------------


def key_of(number):
    return torch.tensor([number], dtype=torch.int32)


def test_masks_are_uniform():
    images, patches = 20_000, 16
    of_images = ranks_of(torch.arange(images), key_of(12345), patches)
    steps = [ranks_of(torch.arange(20), key_of(key), patches) for key in range(1000)]
    for ranks in (of_images, torch.cat(steps)):
        assert (ranks.sort(1).values == torch.arange(patches)).all()  # each place once
        for place in range(patches):
            counts = (ranks == place).sum(0).double()
            share, deviation = images / patches, math.sqrt(images * (1 - 1 / patches) / patches)
            assert ((counts - share).abs() < 5 * deviation).all()
        # Two patches of an image are masked together as often as in a random choice.
        hidden = (ranks >= patches // 4).double()
        together = (hidden.T @ hidden / images)[~torch.eye(patches, dtype=torch.bool)]
        chance = (12 / 16) * (11 / 15)
        assert ((together - chance).abs() < 5 * math.sqrt(chance * (1 - chance) / images)).all()


def test_masks_differ_and_depend_on_the_image_alone():
    whole = ranks_of(torch.arange(64), key_of(1), 196)
    assert len(whole.unique(dim=0)) == 64
    parts = [ranks_of(numbers, key_of(1), 196) for numbers in torch.arange(64).split(16)]
    assert torch.equal(torch.cat(parts), whole)
    assert not (ranks_of(torch.arange(64), key_of(2), 196) == whole).all(1).any()


def test_images_are_put_together_as_they_were_cut():
    images = torch.randn(3, 2, 8, 12)
    patches = patches_of(images, (4, 2))
    assert patches.shape == (3, 12, 16)
    assert torch.equal(patches[1, 7], images[1, :, 4:8, 2:4].permute(1, 2, 0).flatten())
    assert torch.equal(images_of(patches, (4, 2), (2, 6)), images)


# -- what a run writes, and what becomes of its weights ---------------------------------


def test_reports_have_no_accuracy(on_gpu):
    (record,) = on_gpu.evaluations
    assert record.keys() == {"step", "epoch", "val_loss", "val_images", "ema_val_loss"}
    both = f"val loss {record['val_loss']:.4f} (weights), {record['ema_val_loss']:.4f} (EMA)"
    assert f"{both}, checkpoint" in on_gpu.stdout.splitlines()[-1]
    assert (on_gpu.ckpt_dir / "curves.png").exists()


def test_pictures(on_gpu):
    picture = np.asarray(Image.open(on_gpu.ckpt_dir / PICTURE))
    times, side, gap = 6, 96, 2
    assert picture.shape == (8 * side + 7 * gap, 3 * side + 2 * gap, 3)
    request = dataset_request(on_gpus([*tiny(on_gpu.ckpt_dir), *MAE, *PREPROCESSING]))
    data = open_data(request)
    images = torch.cat([batch["image"] for batch in data.val_loader(16, BatchShard()).epoch(0)])
    numbers = [i * data.val_length // 8 for i in range(8)]
    assert len({data.splits["val"].labels[number] for number in numbers}) > 5
    rows = [picture[i * (side + gap) :][:side] for i in range(8)]
    for image, row in zip(images[numbers], rows, strict=True):
        whole, seen, painted = (
            row[:, j * (side + gap) :][:, :side][::times, ::times] for j in range(3)
        )
        pixels = image.permute(1, 2, 0).numpy().astype(int)
        assert abs(whole.astype(int) - pixels).max() <= 1
        same = (abs(seen.astype(int) - pixels) <= 1).all(2)
        grey = (seen == 128).all(2)
        assert (same | grey).all()
        assert grey.sum() >= 12 * 16 - 16  # a digit's own grey may be the same
        assert (abs(painted.astype(int) - pixels)[~grey] <= 1).all()
    ((step, image),) = (
        (event.step, value.image)
        for event in events_in(on_gpu.ckpt_dir / "tensorboard")
        for value in event.summary.value
        if value.image.height
    )
    assert step == 6
    assert np.array_equal(Image.open(io.BytesIO(image.encoded_image_string)), picture)


@pytest.mark.long
def test_resumed_in_mid_epoch_bit_for_bit(tmp_path):
    flags = [*MAE, *EPOCHS_OF_5, "--mlp_dropout", "0.1", "--max_steps", "9"]
    whole, resumed = assert_resumes_at_step_7(train_tiny_gpu, tmp_path, *flags)
    assert resumed.evaluations[-1] == whole.evaluations[-1]


def test_backbone_is_timms(on_gpu, tmp_path):
    assert to_other_form([str(on_gpu.ckpt_dir), str(tmp_path / "b.safetensors")]) == 0
    how = {"global_pool": "avg", "fc_norm": False, "num_classes": 0}
    model = timm.create_model(
        "vit_base_patch16_224", **TINY_SIZES, **how, checkpoint_path=str(tmp_path / "b.safetensors")
    )
    trained = weights_of(on_gpu.ckpt_dir)
    state = model.state_dict()
    assert state.keys() == {n for n in trained if not n.startswith(("decoder", "mask_token"))}
    assert all(torch.equal(values, trained[name]) for name, values in state.items())
    assert torch.equal(state["pos_embed"], plain_mae.positions(4, 32))  # fixed

    # A folder as on Hugging Face holds all that timm needs to make it.
    words = [str(on_gpu.ckpt_dir), str(tmp_path / "b"), "--to", "safetensors"]
    assert to_other_form(words) == 0
    made = timm.create_model(f"local-dir:{tmp_path / 'b'}", pretrained=True).eval()
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(made(images), model.eval()(images))
    with_head = timm.create_model(f"local-dir:{tmp_path / 'b'}", pretrained=True, num_classes=7)
    assert torch.equal(with_head.pos_embed, model.pos_embed)
    assert with_head.eval()(images).shape == (2, 7)


def weights_of(ckpt_dir):
    return convert(ckpt_dir / "step_6", ckpt_dir / "plain.pt")["model"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "devices", "graphs"),
    [("", 2, 1), ("--xla_fsdp nested", 1, 1), ("--grad_accum_steps 2 --precision bf16", 2, 3)],
)
def test_steady_state(flags, devices, graphs, tmp_path):
    result = train_tiny(tmp_path, *MAE, *STEADY, *flags.split(), devices=devices)
    assert_steady_state(result, graphs)


@pytest.mark.long
def test_by_the_tpu_compiler():
    flags = "--compile_only --json --tpu_topology v5e:2x2 --objective mae --precision bf16".split()
    flags += "--model vit_base_patch16_224 --num_blocks 2 --batch_size 64".split()
    done = run_program("run_vit_training.py", *flags, "--decoder_depth", "2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    encoder, decoder, outside = 7_087_872, 3_152_384, 1_533_440
    assert found["parameters"] == 2 * encoder + 2 * decoder + outside
    assert "Involuntary full rematerialization" not in done.stderr


# -- mistakes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--model timm/eva02_tiny_patch14_224", "requires a VisionTransformer model of timm"),
        ("--pos_embed none", "--objective mae requires --pos_embed learn"),
        ("--mask_ratio 0", "--mask_ratio 0 of 16 patches masks no patch"),
        ("--decoder_embed_dim 18", "--decoder_embed_dim 18 must be a multiple of 4"),
        ("--decoder_num_heads 3", "is not a multiple of --decoder_num_heads 3"),
    ],
)
def test_mistakes(flags, line, capsys, tmp_path):
    need_xla()
    words = [*tiny(tmp_path / "run"), *MAE, "--cpu_devices", "2", *flags.split()]
    assert line in told_in_one_line(capsys, *words)
    assert not (tmp_path / "run").exists()
