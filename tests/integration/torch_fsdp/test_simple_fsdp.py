"""SimpleFSDP on the CPU with gloo, run operation by operation or as one graph per step: losses of
FSDP2, its checkpoints, and bit for bit the same after a stop."""

import re
import shutil

import pytest

from tests.support.cli import train_tiny_gpu
from tests.support.curves import (
    assert_same_curves,
    assert_same_evaluations,
    assert_same_training,
)
from tests.support.dino import DINO
from tests.support.mae import MAE
from tests.support.marks import long
from tests.support.pairs import PAIR_FLAGS
from tests.support.resuming import DROPOUT
from tests.support.usage_error import told_in_one_line

EAGER, TRACED = ["--fsdp", "simple"], ["--fsdp", "simple", "--compile"]


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        long(1, EAGER),
        (1, [*TRACED, "--grad_ckpt", "selective"]),
        # 3 divides neither the batch nor the width: padded shards, in both forms.
        long(4, [*EAGER, "--dp_outer", "2", "--no_grad_ckpt"]),
        (4, [*TRACED, "--dp_outer", "2", "--grad_accum_steps", "2"]),
        long(2, [*TRACED, "--no_grad_ckpt", "--grad_accum_steps", "4"]),
        long(2, [*TRACED, "--grad_ckpt", "offload"]),
    ],
)
def test_form(processes, flags, tiny_on_gpu, tmp_path):
    result = train_tiny_gpu(tmp_path, *flags, processes=processes)
    assert "SimpleFSDP ZeRO-3, one unit per block" in result.run_file["backend"]
    graph = "one graph per step, blocks unrolled (--grad_ckpt " in result.run_file["backend"]
    graph |= "one graph per step, blocks as one loop" in result.run_file["backend"]
    assert graph == ("--compile" in flags)
    assert_same_training(result, tiny_on_gpu)


KEPT, WHOLE = "SimpleFSDP ZeRO-2, one unit per block", "SimpleFSDP as data parallel (no sharding)"


@pytest.mark.parametrize(
    ("processes", "flags", "form"),
    [
        (2, [*TRACED, "--zero_dp_strategy", "2", "--grad_accum_steps", "2"], KEPT),
        long(4, [*EAGER, "--no_reshard_after_forward", "--grad_ckpt", "selective"], KEPT),
        (4, [*TRACED, "--run_without_fsdp"], WHOLE),
    ],
)
def test_what_is_sharded(processes, flags, form, tiny_on_gpu, tmp_path):
    result = train_tiny_gpu(tmp_path, *flags, processes=processes)
    assert f"{form}, " in result.run_file["backend"]
    assert_same_training(result, tiny_on_gpu)


PADDED = "--batch_size 18 --optimizer lion --lr 1e-3 --mixup 0.8 --layer_decay 0.75".split()
AVERAGED = "--model_ema --model_ema_decay 0.9 --clip_grad_norm 0.3 --precision bf16".split()
CASES = [
    # Three processes divide neither the width nor the number of classes.
    (3, [*PADDED, "--grad_ckpt", "selective"], 1e-5),
    long(2, [*AVERAGED, "--optimizer_dtype", "bf16", "--reduce_dtype", "bf16"], 1e-2),
    long(2, MAE, 1e-5),
    long(2, DINO, 2e-5),
    long(2, [*PAIR_FLAGS, "--grad_accum_steps", "2"], 2e-5),
    long(2, ["--teacher", "vit_10b", "--distillation_type", "soft"], 1e-5),
]


@pytest.mark.parametrize(("processes", "flags", "rel"), CASES)
def test_same_as_fsdp2(processes, flags, rel, tmp_path):
    """Optimizers, dtypes and objectives, with values from the host that change in each step."""
    if "--teacher" in flags:
        taught = train_tiny_gpu(tmp_path / "teacher")
        flags = [*flags, "--teacher_weights", str(taught.ckpt_dir)]
    fsdp2 = train_tiny_gpu(tmp_path / "fsdp2", *flags, processes=processes)
    simple = train_tiny_gpu(tmp_path / "simple", *TRACED, *flags, processes=processes)
    assert_same_curves(simple, fsdp2, rel)
    assert_same_evaluations(simple, fsdp2, rel)


@pytest.mark.long
def test_checkpoint_moves_to_fsdp2_and_back(tmp_path):
    flags = ["--batch_size", "48", "--model_ema", "--max_steps"]
    reference = train_tiny_gpu(tmp_path / "reference", *flags, "8")
    run = tmp_path / "run"
    train_tiny_gpu(run, *flags, "2", processes=2)
    moved = train_tiny_gpu(run, *TRACED, *flags, "4", processes=3)
    assert "at step 2" in moved.stdout
    train_tiny_gpu(run, *flags, "6", processes=4)
    moved = train_tiny_gpu(run, *EAGER, *flags, "8", processes=2)
    assert_same_curves(moved, reference, rel=2e-5)


@pytest.mark.parametrize("form", [long(EAGER), TRACED], ids=["eager", "traced"])
def test_resume_is_exact(form, tmp_path):
    """Random numbers follow from the seed and the step, in all that is dropped."""
    flags = [*form, *DROPOUT, "--grad_accum_steps", "2", "--max_steps", "6"]
    whole = train_tiny_gpu(tmp_path / "whole", *flags, "--ckpt_step_interval", "3", processes=2)
    run = tmp_path / "run"
    shutil.copytree(whole.ckpt_dir / "step_3", run / "step_3")
    resumed = train_tiny_gpu(run, *flags, processes=2)
    for name in ("loss", "grad_norm", "lr"):
        assert resumed.column(name) == whole.column(name)[3:]
    assert resumed.evaluations == whole.evaluations


def test_loop_draws_what_unrolled_blocks_do(tmp_path):
    """Dropout and stochastic depth, at a rate of each block's own, with three blocks."""
    flags = [*TRACED, *DROPOUT, "--num_blocks", "3"]
    loop = train_tiny_gpu(tmp_path / "loop", *flags)
    unrolled = train_tiny_gpu(tmp_path / "unrolled", *flags, "--no_grad_ckpt")
    assert "blocks as one loop" in loop.run_file["backend"]
    assert "blocks unrolled (--grad_ckpt none)" in unrolled.run_file["backend"]
    assert_same_curves(loop, unrolled, rel=1e-6)


@pytest.mark.long
def test_blocks_that_differ_are_unrolled(tmp_path):
    flags = ["--model", "timm/vit_dlittle_patch16_reg1_gap_256", "--max_steps", "3"]
    fsdp2 = train_tiny_gpu(tmp_path / "fsdp2", *flags)
    traced = train_tiny_gpu(tmp_path / "traced", *TRACED, *flags)
    assert re.search(
        r"blocks unrolled \(.* in block 1, but .* in block 0\)", traced.run_file["backend"]
    )
    assert_same_curves(traced, fsdp2, rel=1e-5)


def test_bad_step_is_skipped_by_the_graph(tmp_path):
    how = {"program": "tests.fakes.spoiled_mix"}
    fsdp2, traced = (
        train_tiny_gpu(tmp_path / form[1], *form, "--mixup", "0.8", "--model_ema", **how)
        for form in (["--fsdp", "fsdp2"], TRACED)
    )
    for result in (fsdp2, traced):
        assert result.steps[2]["loss"] is None  # NaN
        assert result.steps[6]["skipped_steps"] == 1
    for step in (1, 3, 4, 5, 6):
        assert traced.steps[step]["loss"] == pytest.approx(fsdp2.steps[step]["loss"], rel=1e-5)
    assert traced.evaluations[0]["val_loss"] == pytest.approx(
        fsdp2.evaluations[0]["val_loss"], rel=1e-5
    )


REFUSED = ["--zero_dp_strategy 1", "--optimizer muon", "--mesh_domain 2"]


@pytest.mark.parametrize("flag", REFUSED)
def test_what_is_refused(flag, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = ["--backend", "cuda", "--fsdp", "simple", "--ckpt_dir", tmp_path / "x", *flag.split()]
    line = told_in_one_line(capsys, *flags, "--fake_data")
    assert line == f"--fsdp simple does not support {flag}: use --fsdp fsdp2"
    assert not (tmp_path / "x").exists()
