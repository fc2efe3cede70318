"""SimpleFSDP on the CPU with gloo, run operation by operation or as one graph per step: losses of
FSDP2, its checkpoints, and bit for bit the same after a stop."""

import json
import re
import shutil

import pytest

import run_vit_training
from tests.support.cli import DIGITS, run_program, train_tiny_gpu
from tests.support.curves import (
    assert_same_curves,
    assert_same_evaluations,
    assert_same_training,
)
from tests.support.dino import DINO
from tests.support.mae import MAE
from tests.support.marks import long
from tests.support.masked_images import write_masked
from tests.support.pairs import PAIR_FLAGS
from tests.support.resuming import DROPOUT
from tests.support.usage_error import told_in_one_line
from torch_fsdp.step_graph import StepGraphs

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
MUON = "--optimizer muon --layer_decay 0.5 --no_decay norms biases".split()
CASES = [
    # Three processes divide neither the width nor the number of classes.
    (3, [*PADDED, "--grad_ckpt", "selective"], 1e-5),
    long(2, [*AVERAGED, "--optimizer_dtype", "bf16", "--reduce_dtype", "bf16"], 1e-2),
    (3, [*MUON, "--batch_size", "18", "--grad_accum_steps", "2"], 1e-5),
    long(4, [*MUON, "--dp_outer", "2", "--zero_dp_strategy", "2"], 1e-5),
    long(2, [*MUON, "--run_without_fsdp"], 1e-5),
    long(2, [*MUON, *AVERAGED], 1e-2),
    long(2, [*MAE, "--optimizer", "muon"], 1e-5),
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


@pytest.mark.parametrize("processes", [3, long(2), long(4)])
def test_matrices_over_processes(processes):
    """Of both orientations, and of rows that the processes do not divide."""
    program = "tests.fakes.orthogonalized_over_processes"
    done = run_program("-m", program, "cuda", processes=processes)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 8
    assert max(errors) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_checkpoint_moves_to_fsdp2_and_back(optimizer, tmp_path):
    flags = ["--batch_size", "48", "--model_ema", "--optimizer", optimizer, "--max_steps"]
    reference = train_tiny_gpu(tmp_path / "reference", *flags, "8")
    run = tmp_path / "run"
    train_tiny_gpu(run, *flags, "2", processes=2)
    moved = train_tiny_gpu(run, *TRACED, *flags, "4", processes=3)
    assert "at step 2" in moved.stdout
    train_tiny_gpu(run, *flags, "6", processes=4)
    moved = train_tiny_gpu(run, *EAGER, *flags, "8", processes=2)
    assert_same_curves(moved, reference, rel=2e-5)


@pytest.mark.parametrize(
    "form",
    [long(EAGER), TRACED, long([*TRACED, *MUON])],
    ids=["eager", "traced", "muon"],
)
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


@pytest.mark.parametrize("optimizer", ["adamw", long("muon")])
def test_bad_step_is_skipped_by_the_graph(optimizer, tmp_path):
    flags = ["--mixup", "0.8", "--model_ema", "--optimizer", optimizer]
    how = {"program": "tests.fakes.spoiled_mix"}
    fsdp2, traced = (
        train_tiny_gpu(tmp_path / form[1], *form, *flags, **how)
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


def test_what_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = ["--backend", "cuda", "--fsdp", "simple", "--ckpt_dir", tmp_path / "x"]
    line = told_in_one_line(capsys, *flags, "--zero_dp_strategy", "1", "--fake_data")
    assert line == "--fsdp simple does not support --zero_dp_strategy 1: use 2 or 3"
    assert not (tmp_path / "x").exists()


# -- evaluations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "traces"),
    [("", 1), long("--knn --rank --probe", 2), long("--segment_probe --segment_dir masked", 2)],
)
def test_evaluations_are_those_without_a_graph(
    asked, traces, tiny_on_gpu, tmp_path, monkeypatch, capsys
):
    """Of the same weights. Each split of the images is traced once; the last batch is padded."""
    monkeypatch.chdir(tmp_path)
    write_masked(tmp_path / "masked", "ade20k", [(20, 24)] * 20, [(24, 30)] * 6)
    traced = []
    trace = StepGraphs._trace
    monkeypatch.setattr(StepGraphs, "_trace", lambda *how: traced.append(how) or trace(*how))
    how = "--backend cuda --eval_only --json --num_workers 0 --batch_size 16 --data_dir".split()
    how += [str(DIGITS), "--resume", str(tiny_on_gpu.ckpt_dir / "step_6"), *asked.split()]
    found = []
    for form in ([*EAGER, "--no-compile"], TRACED):
        assert run_vit_training.main([*how, *form]) == 0
        values = json.loads(capsys.readouterr().out)
        found.append({name: x for name, x in values.items() if isinstance(x, float)})
    assert found[0]
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert len(traced) == traces


EVERY_KIND = (
    "--model_ema --model_ema_decay 0.5 --test_step_interval 2 --knn_every 2 --rank_every 2 "
    "--probe_every 6"
).split()


@pytest.mark.long
@pytest.mark.parametrize(
    "flags", [EVERY_KIND, [*MAE, *EVERY_KIND[:5]], [*PAIR_FLAGS, *EVERY_KIND[:5]]]
)
def test_evaluations_follow_the_weights(flags, tmp_path):
    eager, traced = (
        train_tiny_gpu(tmp_path / form[-1], *form, *flags, processes=2) for form in (EAGER, TRACED)
    )
    expected, found = (
        [record for record in run.records if "loss" not in record] for run in (eager, traced)
    )
    names = {
        name
        for record in expected
        for name in record
        if name.startswith(("val_", "ema_", "train_"))
    }
    assert len(names) > 1
    for mine, other in zip(found, expected, strict=True):
        for name in names & other.keys():
            assert mine[name] == pytest.approx(other[name], rel=2e-5), name
