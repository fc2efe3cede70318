"""--mesh_tensor with --fsdp simple, on the CPU with gloo: one graph per step, the losses of one
process and of FSDP2, and bit for bit the same after a stop."""

import shutil

import pytest
import torch.distributed.checkpoint as dcp

from tests.support.cli import train_tiny_gpu
from tests.support.curves import (
    assert_same_curves,
    assert_same_evaluations,
    assert_same_training,
)
from tests.support.divided_blocks import DROPOUT, MODELS, PACKED, SPLIT, flags_of
from tests.support.marks import long, spread
from tests.support.pairs import PAIR_FLAGS
from tests.support.usage_error import told_in_one_line

SIMPLE = ["--fsdp", "simple", "--compile"]
TENSOR = [*SIMPLE, "--mesh_tensor", "2"]


@pytest.mark.parametrize(
    ("processes", "flags", "form"),
    [
        (2, [], "blocks as one loop, mesh tensor 2"),
        long(4, ["--dp_outer", "2", "--grad_accum_steps", "2"], "mesh dcn 2 x tensor 2"),
        (4, ["--grad_ckpt", "selective"], "mesh fsdp 2 x tensor 2"),
        long(4, ["--zero_dp_strategy", "2", "--grad_accum_steps", "2"], "mesh fsdp 2 x tensor 2"),
        long(4, ["--no_grad_ckpt"], "mesh fsdp 2 x tensor 2"),
    ],
)
def test_form(processes, flags, form, tiny_on_gpu, tmp_path):
    result = train_tiny_gpu(tmp_path, *TENSOR, *flags, processes=processes)
    assert form in result.run_file["backend"]
    assert_same_training(result, tiny_on_gpu)


@pytest.mark.long
@pytest.mark.parametrize(("model", "grad_ckpt"), spread(MODELS, ["full", "none"], every=2))
def test_every_block(model, grad_ckpt, tmp_path):
    """As without "tensor": as many parts of a batch, each of which drops patches of its own."""
    flags = [*flags_of(model), "--grad_ckpt", grad_ckpt]
    plain = train_tiny_gpu(tmp_path / "plain", *SIMPLE, *flags, processes=2)
    assert_same_training(train_tiny_gpu(tmp_path / "tensor", *TENSOR, *flags, processes=4), plain)


DROPS = [
    (PACKED, DROPOUT),
    (SPLIT, [*DROPOUT, "--no_grad_ckpt", "--grad_accum_steps", "2"]),
]


@pytest.mark.parametrize(("model", "flags"), [DROPS[0], long(*DROPS[1])])
def test_what_is_dropped(model, flags, tmp_path):
    """The same heads' weights, columns and tokens as by a process that has all of them."""
    flags = [*flags_of(model), *flags, "--max_steps", "3"]
    plain = train_tiny_gpu(tmp_path / "plain", *SIMPLE, *flags)
    tensor = train_tiny_gpu(tmp_path / "tensor", *TENSOR, *flags, processes=2)
    assert_same_curves(tensor, plain, rel=1e-5)


LOWER = "--precision bf16 --reduce_dtype bf16 --optimizer_dtype bf16 --model_ema".split()


@pytest.mark.parametrize(
    ("flags", "rel"),
    [
        long([*PAIR_FLAGS, "--grad_accum_steps", "2"], 2e-5),
        long([*LOWER, "--model_ema_decay", "0.9", "--clip_grad_norm", "0.3"], 2e-2),
        ("--optimizer lion --lr 1e-3 --mixup 0.8 --layer_decay 0.75 --model_ema".split(), 1e-5),
    ],
)
def test_same_as_fsdp2(flags, rel, tmp_path):
    """As many parts of a batch: optimizers, numbers of fewer bits, an objective with two towers."""
    fsdp2 = train_tiny_gpu(tmp_path / "fsdp2", *flags, processes=2)
    tensor = train_tiny_gpu(tmp_path / "tensor", *TENSOR, *flags, processes=4)
    assert_same_curves(tensor, fsdp2, rel)
    assert_same_evaluations(tensor, fsdp2, rel)


@pytest.mark.long
def test_checkpoint_moves_between_meshes_and_to_fsdp2(tmp_path):
    """Biases that 3 processes do not divide, and both halves of a packed SwiGLU."""
    flags = [*flags_of(PACKED), "--batch_size", "48", "--model_ema", "--max_steps"]
    reference = train_tiny_gpu(tmp_path / "reference", *flags, "8")
    run = tmp_path / "run"
    train_tiny_gpu(run, *TENSOR, *flags, "2", processes=6)
    found = dcp.FileSystemReader(run / "step_2").read_metadata().state_dict_metadata
    fc1 = found["model.blocks.1.mlp.fc1.weight"]
    assert fc1.size == (384, 48)
    # 3 processes have 64 rows each of 2 x 96, which the first and the second half have.
    assert sorted(tuple(chunk.sizes) for chunk in fc1.chunks) == [(32, 48)] * 4 + [(64, 48)] * 4
    train_tiny_gpu(run, *SIMPLE, *flags, "4", processes=3)
    train_tiny_gpu(run, *TENSOR, *flags, "6", processes=2)
    moved = train_tiny_gpu(run, *flags, "8", processes=2)
    assert_same_curves(moved, reference, rel=2e-5)


@pytest.mark.long
def test_resume_is_exact(tmp_path):
    flags = [*TENSOR, *DROPOUT, "--grad_accum_steps", "2"]
    whole = train_tiny_gpu(tmp_path / "whole", *flags, "--ckpt_step_interval", "3", processes=4)
    run = tmp_path / "run"
    shutil.copytree(whole.ckpt_dir / "step_3", run / "step_3")
    resumed = train_tiny_gpu(run, *flags, processes=4)
    for name in ("loss", "grad_norm", "lr"):
        assert resumed.column(name) == whole.column(name)[3:]
    assert resumed.evaluations == whole.evaluations


REFUSED = {
    "--num_heads 3 --embed_dim 48": "--mesh_tensor 2 does not divide --num_heads 3",
    "--model timm/vit_dlittle_patch16_reg1_gap_256": "--mesh_tensor 2 is incompatible with --model "
    "timm/vit_dlittle_patch16_reg1_gap_256: its attention is timm's DiffAttention",
    "--zero_dp_strategy 0": "--mesh_tensor 2 with --fsdp simple is incompatible with "
    "--zero_dp_strategy 0: drop one of the two",
    "--optimizer muon": "--mesh_tensor 2 with --fsdp simple is incompatible with "
    "--optimizer muon: drop one of the two",
    "--fsdp fsdp2": "--mesh_tensor 2 requires --fsdp simple or --backend xla",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_is_refused(flags, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = ["--backend", "cuda", *TENSOR, "--ckpt_dir", tmp_path / "x", "--fake_data"]
    assert told_in_one_line(capsys, *given, *flags.split()) == REFUSED[flags]
    assert not (tmp_path / "x").exists()
