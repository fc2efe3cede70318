"""The moving average of the weights against timm's own, fed with the weights of each step."""

import re
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from timm.utils import ModelEmaV3

from features.weight_average import warnings
from run_vit_training import read_flags
from tests.references.plain_checkpoint import convert, tiny_timm_model
from tests.references.plain_steps import evaluate
from tests.support.cli import (
    DIGITS,
    TINY_MODEL,
    TINY_RUN,
    tiny,
    train_tiny,
    train_tiny_gpu,
)
from tests.support.marks import long
from tests.support.resolved import on_xla
from tools.plan.stacks import PyTorchXla
from tools.plan.tpu import compile_words
from tools.plan.tpu_search import TpuCandidate
from training.config import EmaConfig
from training.errors import UsageError
from training.evaluation.trained import find_trained
from training.optimizers import share_of_first
from training.step_sizes import step_sizes
from xla_fsdp.resolve_xla import resolve_for_slice
from xla_fsdp.tpu import parse_topology

EACH_STEP = (
    "--model_ema --ckpt_step_interval 1 --test_step_interval 3 --batch_size 64 --lr 0.1".split()
)
ROUNDED = {"rtol": 1e-6, "atol": 2e-8}
BAD = {2, 4, 5}
"""The steps that are not finite where ``tests.fakes.bad_step`` is told so."""


def read(folder, part):
    """The weights, or their average, of a checkpoint, as timm's model, by PyTorch's own reader."""
    model = tiny_timm_model()
    dcp.load({part: model.state_dict()}, checkpoint_id=folder)
    return model.eval()


def average_by_timm(ckpt_dir, skipped=(), last=6, **how):
    """What ModelEmaV3 makes of the weights of all steps, as timm's train.py updates it."""
    average, updates = ModelEmaV3(read(ckpt_dir / "step_1", "model"), **how), 0
    for step in range(1, last + 1):
        if step not in skipped:
            updates += 1
            average.update(read(ckpt_dir / f"step_{step}", "model"), step=updates)
    return average.module


def assert_same(found, expected, *, rtol=0.0, atol=0.0):
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=rtol, atol=atol)


def plain_run():
    source = ["--data_dir", str(DIGITS), "--hflip", "0"]
    return on_xla([*source, *TINY_MODEL, *TINY_RUN])


XLA = [("--grad_accum_steps 2 --precision bf16 --optimizer_dtype bf16", 2, {"decay": 0.9}, BAD)]
XLA_LONG = [
    ("--flatten_parameters --model_ema_warmup", 1, {"decay": 0.5, "use_warmup": True}, ()),
    ("--no-scan_blocks --mesh_tensor 2", 4, {"decay": 0.99999}, ()),
]
GPU = [
    ("--fsdp megatron", 2, {"decay": 0.9}, BAD),
    (
        "--dp_outer 2 --grad_accum_steps 2 --optimizer_dtype bf16 --model_ema_warmup",
        4,
        {"decay": 0.99999, "use_warmup": True},
        BAD,
    ),
    ("--fsdp megatron --zero_dp_strategy 2 --precision bf16", 2, {"decay": 0.9}, ()),
]


@pytest.mark.parametrize(
    ("train", "flags", "devices", "how", "bad"),
    [
        *((train_tiny, *case) for case in XLA),
        *(long(train_tiny, *case) for case in XLA_LONG),
        *(long(train_tiny_gpu, *case) for case in GPU),
    ],
)
def test_as_timm(train, flags, devices, how, bad, tmp_path, monkeypatch):
    on_gpu, spoils = train is train_tiny_gpu, bad or "megatron" in flags
    monkeypatch.setenv("BAD_STEPS", "2:loss 4:norm 5:loss" if bad else "")
    module = (
        {True: "tests.fakes.bad_step_gpu", False: "tests.fakes.bad_step"}[on_gpu] if spoils else ""
    )
    count = {"processes": devices} if on_gpu else {"devices": devices}
    flags = [*EACH_STEP, "--model_ema_decay", str(how["decay"]), *flags.split()]
    run = train(tmp_path, *flags, program=module, **count)

    expected = average_by_timm(tmp_path, skipped=bad, **how)
    found = read(tmp_path / "step_6", "ema")
    assert_same(found, expected, **ROUNDED)
    off = 1e-3 if "--precision bf16" in " ".join(flags) else 1e-5
    for evaluation in run.evaluations:
        folder = tmp_path / f"step_{evaluation['step']}"
        losses = [evaluate(read(folder, part), plain_run())[0] for part in ("model", "ema")]
        found = [evaluation["val_loss"], evaluation["ema_val_loss"]]
        assert found == pytest.approx(losses, rel=off)
        assert found[0] - found[1] == pytest.approx(losses[0] - losses[1], rel=0.2), losses
    assert len(run.evaluations) == 2
    sizes = run.run_file["state_bytes_per_device"]
    assert sizes["ema"] == sizes["parameters"]
    if not on_gpu:
        steps = run.steps
        graphs = 3 if "--grad_accum_steps" in flags else 1
        assert steps[3]["executions"] - steps[2]["executions"] == graphs
        if devices > 1:  # nested FSDP's steps may compile anew after an evaluation, with or without
            assert steps[6]["compilations"] == steps[4]["compilations"]


@pytest.mark.long
def test_goes_on_and_moves(tmp_path):
    flags = [*EACH_STEP, "--model_ema_decay", "0.8", "--model_ema_warmup"]
    whole = train_tiny(tmp_path / "whole", *flags, devices=2)
    shutil.copytree(tmp_path / "whole" / "step_3", tmp_path / "again" / "step_3")
    train_tiny(tmp_path / "again", *flags, devices=2)
    for part in ("model", "ema"):
        found = read(tmp_path / "again" / "step_6", part)
        assert_same(found, read(whole.ckpt_dir / "step_6", part))

    how = ["--resume", str(whole.ckpt_dir / "step_3")]
    moved = train_tiny_gpu(tmp_path / "on_gpu", *flags, *how, processes=4)
    for step in (1, 2, 3):
        shutil.copytree(whole.ckpt_dir / f"step_{step}", moved.ckpt_dir / f"step_{step}")
    expected = average_by_timm(moved.ckpt_dir, decay=0.8, use_warmup=True)
    assert_same(read(moved.ckpt_dir / "step_6", "ema"), expected, **ROUNDED)


@pytest.mark.long
def test_begins_and_ends(tmp_path):
    train_tiny_gpu(tmp_path / "old", "--max_steps", "3")
    flags = [*EACH_STEP, "--model_ema_decay", "0.9", "--resume", str(tmp_path / "old")]
    begun = train_tiny_gpu(tmp_path / "begun", *flags)
    notes = [line for line in begun.stdout.splitlines() if "EMA" in line and "note:" in line]
    assert notes == [
        "note: the checkpoint has no EMA of the weights: the EMA starts from the current weights"
    ]
    average, weights = ModelEmaV3(read(tmp_path / "old" / "step_3", "model"), decay=0.9), {}
    for step in (4, 5, 6):
        weights[step] = read(tmp_path / "begun" / f"step_{step}", "model")
        average.update(weights[step], step=step - 3)
    assert_same(read(tmp_path / "begun" / "step_6", "ema"), average.module, **ROUNDED)

    left = ["--max_steps", "7", "--resume", str(tmp_path / "begun")]
    ended = train_tiny_gpu(tmp_path / "ended", *left)
    (note,) = [line for line in ended.stdout.splitlines() if "EMA" in line]
    assert note == ("note: dropping the checkpoint's EMA of the weights: --model_ema is not set")
    assert "ema" not in convert(tmp_path / "ended" / "step_7", tmp_path / "ended.pt")
    with pytest.raises(
        UsageError, match="use a checkpoint of a run with --model_ema, or drop --use_ema"
    ):
        find_trained(read_flags(["--use_ema", "--eval_only", *tiny(tmp_path / "ended")]).run)


# -- runs that are too short for the decay ------------------------------------------------


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9998, 0.9999999])
def test_what_is_left_of_the_first_weights_is_as_in_timm(decay, warmup):
    weights = torch.nn.Linear(1, 1, bias=False).requires_grad_(False)
    weights.weight.fill_(1.0)
    average = ModelEmaV3(weights, decay=decay, use_warmup=warmup)
    config = EmaConfig(True, decay, warmup)
    for update in range(1, 60):
        average.update(weights, step=update)
        left = average.module.weight.item()
        assert share_of_first(config, update) == pytest.approx(left, rel=1e-4, abs=1e-6)
        weights.weight.fill_(0.0)


@pytest.mark.parametrize(
    ("config", "updates", "told"),
    [
        (EmaConfig(True), 450, "after the 450 steps of this run, 91% of the EMA of the weights"),
        (EmaConfig(True), 450, "use --model_ema_decay 0.99 or less"),
        (EmaConfig(True), 450, "add --model_ema_warmup, or use"),
        (EmaConfig(True), 11_500, "10% of the EMA"),
        (EmaConfig(True), 11_600, ""),
        (EmaConfig(True, 0.9998, True), 450, ""),
        (EmaConfig(True, 0.9998, True), 3, "says little: use --model_ema_decay 0.1 or less"),
        (EmaConfig(True, 0.0), 2, ""),
        (EmaConfig(True), 1, ""),
        (EmaConfig(True), 2, "use --model_ema_decay 0 or less"),
    ],
)
def test_a_decay_too_slow_for_the_run_is_warned_of(config, updates, told):
    found = warnings(config, updates)
    assert len(found) == bool(told)
    for warning in found:
        assert told in warning
        faster = re.search(r"use --model_ema_decay (\S+) or less", warning)[1]
        assert not warnings(replace(config, model_ema_decay=float(faster)), updates)


def test_the_warning_comes_before_the_first_step(tmp_path):
    lines = train_tiny_gpu(tmp_path, "--model_ema").stdout.splitlines()
    (at,) = [n for n, line in enumerate(lines) if line.startswith("warning: after the 6 steps")]
    assert at < next(n for n, line in enumerate(lines) if line.startswith("epoch 1 step 1,"))
    again = train_tiny_gpu(tmp_path, "--model_ema").stdout  # nothing is left to train
    assert "warning: after the 6 steps" not in again
    last = lines[-1]
    values = re.search(r"val top-1 (.*) % \(weights\), (.*) % \(EMA\), checkpoint", last)
    assert values, last


PLANNED = "--model vit_tiny_patch16_224 --batch_size 64"
"""On 8 devices the EMA is 4 bytes a parameter more, in all arithmetic and in the traced step."""


def test_what_is_planned():
    over, sizes = 8, {}
    for ema in ("", "--model_ema"):
        flags = f"{PLANNED} {ema} --compile_only --tpu_topology v5e:2x4".split()
        asked = read_flags(flags)
        topology = parse_topology("v5e:2x4")
        run = resolve_for_slice(asked.run, asked.xla, topology)
        (shape,) = step_sizes(run.model)
        candidate = TpuCandidate(run.mesh, "full", 1, "sdpa", topology)
        sizes[ema] = candidate.estimate(shape, run.config).peak_bytes
        words = compile_words(run.config, PyTorchXla(run.backend_config), candidate)
        assert ("--model_ema" in words) == bool(ema)
    more = sizes["--model_ema"] - sizes[""]
    assert more == pytest.approx(4 * shape.parameters / over)
