"""Stopping and resuming, by the real command line: the same run as without the stop."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from data.pack import pack
from data.source import open_data
from tests.cli import (
    DIGITS,
    TINY_MODEL,
    TINY_RUN,
    Result,
    run_program,
    tiny,
    train_tiny,
    train_tiny_gpu,
)
from tests.references.plain_checkpoint import convert, tiny_timm_model
from tests.resolved import on_gpus
from tests.short_runs import QUICK
from tests.support.curves import assert_same_curves
from tests.support.resuming import DROPOUT, EPOCHS_OF_5
from tests.usage_error import told_in_one_line
from training.backend import dataset_request
from training.checkpoints.compatible import other_order
from training.checkpoints.format import read_saved_run
from training.schedule import Position, Schedule

RUN_5 = [*EPOCHS_OF_5, *DROPOUT]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    flags = [*RUN_5, "--ckpt_step_interval", "7", "--max_steps", "12"]
    return train_tiny(folder, *flags, devices=2)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Stopped in the middle of the second epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    return train_tiny(folder, *EPOCHS_OF_5, *DROPOUT, "--max_steps", "7", devices=2)


@pytest.fixture
def copy_of_stopped(stopped, tmp_path):
    return shutil.copytree(stopped.ckpt_dir, tmp_path / "run")


def test_mid_epoch_resume_is_exact(uninterrupted, tmp_path):
    shutil.copytree(uninterrupted.ckpt_dir / "step_7", tmp_path / "step_7")
    resumed = train_tiny(tmp_path, *RUN_5, "--max_steps", "12", devices=2)
    assert "at step 7, epoch 2" in resumed.stdout
    assert list(resumed.steps) == list(range(8, 13))
    for name in ("loss", "grad_norm", "lr"):
        assert resumed.column(name) == uninterrupted.column(name)[7:]
    assert resumed.evaluations[-1] == uninterrupted.evaluations[-1]
    assert sorted(p.name for p in tmp_path.glob("step_*")) == [
        "step_10",
        "step_12",
        "step_7",
    ]


@pytest.mark.long
def test_the_model_is_the_checkpoints(tmp_path):
    """Without flags of the model, dropout among them; in the run's own folder and in another."""
    flags = [*EPOCHS_OF_5[2:], "--max_steps", "8"]
    whole = train_tiny_gpu(tmp_path / "whole", *RUN_5, *flags, "--ckpt_step_interval", "7")
    step_7 = whole.ckpt_dir / "step_7"
    shutil.copytree(step_7, tmp_path / "own" / "step_7")
    own = train_without_model(tmp_path / "own", *flags)
    other = train_without_model(tmp_path / "other", *flags, "--resume", step_7)
    assert own.steps[8]["loss"] == other.steps[8]["loss"] == whole.steps[8]["loss"]
    model = ("patch_size", "embed_dim", "drop_path_rate", "num_classes")
    arguments = {name: own.run_file["arguments"][name] for name in model}
    assert arguments == {name: whole.run_file["arguments"][name] for name in model}
    again = train_without_model(tmp_path / "own", *flags, "--drop_path_rate", "0")
    assert again.run_file["arguments"]["drop_path_rate"] == 0  # what may change, does


def train_without_model(ckpt_dir, *flags):
    words = ["--data_dir", DIGITS, "--hflip", "0", *TINY_RUN, "--ckpt_dir", ckpt_dir, *flags]
    done = run_program("run_vit_training.py", *map(str, words), "--backend", "cuda")
    assert done.returncode == 0, done.stderr
    return Result(ckpt_dir, done.stdout, done.stderr)


@pytest.mark.long
def test_gradient_checkpointing_repeats_the_dropout(tmp_path):
    flags = [*DROPOUT, "--batch_size", "64", "--max_steps", "3"]
    again = train_tiny(tmp_path / "again", *flags, "--no-scan_blocks", devices=2)
    kept = train_tiny(tmp_path / "kept", *flags, "--no_grad_ckpt", "--no-scan_blocks", devices=2)
    assert_same_curves(kept, again, rel=1e-5)


@pytest.mark.long
def test_dropout_differs_from_step_to_step_and_seed_to_seed(tmp_path):
    """With a learning rate of 0 and one and the same batch, only the masks change the loss."""
    flags = "--fake_data --batch_size 500 --lr 0 --max_steps 4 --pos_dropout 0.5".split()
    flags += ["--image_size", "8", "--eval_batches", "1"]  # of 50,000 images
    runs = [train_tiny(tmp_path / seed, *flags, "--seed", seed).column("loss") for seed in "01"]
    assert len(set(runs[0] + runs[1])) == 8


@pytest.mark.long
def test_resume_epoch_and_keep_checkpoints(uninterrupted, copy_of_stopped):
    flags = ["--resume_epoch", "1", "--keep_checkpoints", "2", "--max_steps", "12"]
    resumed = train_tiny(copy_of_stopped, *EPOCHS_OF_5, *DROPOUT, *flags, devices=2)
    aside = copy_of_stopped / "set_aside_1"
    assert f"note: this run goes back: step_7 set aside in {aside}" in resumed.stdout
    assert "step_5 at step 5, epoch 2" in resumed.stdout
    assert resumed.column("loss") == uninterrupted.column("loss")
    assert sorted(p.name for p in copy_of_stopped.glob("step_*")) == ["step_10", "step_12"]
    assert sorted(p.name for p in aside.iterdir()) == ["metrics.jsonl", "step_7"]


def test_rerun_of_a_finished_run_changes_nothing(run, trained):
    """Nor with a --max_steps below what is reached."""
    for max_steps in ("10", "5"):
        again = train_tiny_gpu(run, *QUICK, "--max_steps", max_steps)
        assert "nothing is left to train: step 10 is reached" in again.stdout
        assert again.records == trained.records
        told = f"val top-1 {trained.evaluations[-1]['val_top1']:.2f} %, checkpoint {run}/step_10"
        assert f"training completed: step 10, {told}" in again.stdout
        assert len(list(run.glob("step_*"))) == 2


@pytest.mark.long
def test_checkpoint_moves_between_forms_and_device_counts(tmp_path):
    """Flat nested shards, 4 SPMD devices, blocks as one stack on 2, plain nested shards."""
    flags = [*EPOCHS_OF_5, "--max_steps"]
    reference = train_tiny(tmp_path / "reference", *flags, "6").column("loss")
    run = tmp_path / "run"
    train_tiny(run, *flags, "2", "--flatten_parameters")
    train_tiny(run, *flags, "3", "--no-scan_blocks", devices=4)
    moved = train_tiny(run, *flags, "5", devices=2).column("loss")
    assert (run / "step_3").is_dir()
    elsewhere = tmp_path / "elsewhere"
    last = train_tiny(elsewhere, *flags, "6", "--xla_fsdp", "nested", "--resume", str(run))
    assert moved + last.column("loss") == pytest.approx(reference, rel=1e-5)


@pytest.mark.long
def test_changed_batch_size_keeps_place_in_data_and_schedule(copy_of_stopped):
    """Step 7 at 5 steps an epoch is 512 images into epoch 2, where a run of 11 an epoch is after
    15. Steps are counted on; then the larger batch again, and each time the newest is resumed."""
    flags = [*EPOCHS_OF_5, *DROPOUT, "--num_workers", "0"]
    smaller = train_tiny(copy_of_stopped, *flags, "--batch_size", "128", "--max_steps", "8")
    assert "step_7 at step 7, epoch 2" in smaller.stdout
    assert "--batch_size was 256 before" in smaller.stdout
    assert list(smaller.steps) == list(range(1, 9))
    schedule = Schedule(1e-2, 4, 4 * 11)
    assert smaller.steps[8]["lr"] == pytest.approx(schedule.lr(15))
    assert smaller.steps[8]["epoch"] == 2
    larger = train_tiny(copy_of_stopped, *flags, "--batch_size", "300", "--max_steps", "9")
    assert "step_8 at step 8, epoch 2" in larger.stdout
    assert larger.steps[9]["lr"] == pytest.approx(Schedule(1e-2, 4, 4 * 4).lr(4 + 640 // 300))
    again = train_tiny(copy_of_stopped, *flags, "--batch_size", "300", "--max_steps", "999")
    assert "step_9 at step 9, epoch 2" in again.stdout
    steps = 9 + (4 * 4 - (4 + 3))  # what is left of 4 epochs of 4 steps
    assert list(again.steps) == list(range(1, steps + 1))
    assert again.steps[steps]["epoch"] == 4
    assert [e["step"] for e in again.evaluations] == [7, 8, 9, steps]


def test_unfinished_checkpoint_is_not_resumed(run):
    """A crash while writing leaves one without a manifest; the older, complete one counts."""
    for step, lacks in ((11, ".metadata"), (12, "manifest.json")):
        broken = run / f"step_{step}"
        shutil.copytree(run / "step_10", broken)
        (broken / lacks).unlink()
    (run / "step_11" / "manifest.json").unlink()
    again = train_tiny_gpu(run, *QUICK, "--max_steps", "10")
    assert "step_10 at step 10" in again.stdout


def test_pytorch_converts_the_checkpoint(uninterrupted, tmp_path):
    """PyTorch's own tool makes one plain file of it, with timm's names and all arguments."""
    state = convert(uninterrupted.ckpt_dir / "step_7", tmp_path / "plain.pt")
    model = tiny_timm_model(patch_size=8)
    model.load_state_dict(state["model"])
    assert set(state["optimizer"]["state"]) == set(dict(model.named_parameters()))
    for entry in state["optimizer"]["state"].values():
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq"}
        assert entry["step"] == 7
    training = state["training"]
    assert (int(training["step"]), int(training["epoch"])) == (7, 1)
    assert int(training["images_in_epoch"]) == 2 * 256
    arguments = json.loads(bytes(training["arguments"].tolist()))
    assert arguments["embed_dim"] == int(TINY_MODEL[TINY_MODEL.index("--embed_dim") + 1])
    torch.Generator().set_state(training["rng"])  # a valid state


# -- the order of images --------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--seed 1", "--seed was 0, is 1"),
        ("--aug_repeats 2", "--aug_repeats was 1, is 2"),
        ("--buckets 16x16", "--buckets was none, is 16x16"),
        ("--data_source digits", "--data_source was folder, is digits"),
    ],
)
def test_another_order_in_mid_epoch_is_refused(flags, told, run, capsys):
    """Ten batches of eleven were trained on: another order would repeat most images."""
    words = [*tiny(run), *QUICK, "--backend", "cuda", *flags.split()]
    said = told_in_one_line(capsys, *words)
    assert f"{run}/step_10 was written in the middle of epoch 1" in said
    assert f"({told})" in said
    assert "--restart_epoch to restart that epoch" in said


@pytest.fixture
def own_digits(tmp_path):
    return shutil.copytree(DIGITS, tmp_path / "digits")


def test_other_images_in_mid_epoch_are_refused(run, own_digits, capsys):
    """One is renamed; one is gone; in a checkpoint of an older version nothing tells that."""
    words = [*tiny(run), *QUICK, "--backend", "cuda", "--data_dir", str(own_digits)]
    image = sorted((own_digits / "train" / "3").iterdir())[0]
    renamed = image.rename(image.with_stem("0"))
    said = told_in_one_line(capsys, *words)
    assert re.search(r"files in train/ was [0-9a-f]{16}, is [0-9a-f]{16}\)", said)
    renamed.unlink()
    said = told_in_one_line(capsys, *words)
    assert "(the number of training images was 1438, is 1437)" in said

    made = on_gpus(words)
    source = open_data(dataset_request(made))
    saved = read_saved_run(run / "step_10")
    assert other_order(saved, made, source)
    older = replace(saved, order=None)
    assert other_order(older, made, source) is None
    read = replace(older, arguments=saved.arguments | {"images_per_read": 64})
    assert other_order(read, made, source) == "--images_per_read was 64, is none"
    assert other_order(replace(saved, position=Position(11, 1, 0)), made, source) is None


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--data_source webdataset", None),
        ("--data_source webdataset --seed 3", "--seed was 0, is 3"),
        ("--batch_size 64", None),
        ("--buckets 16x16 --batch_size 64", "--buckets was none, is 16x16"),
    ],
)
def test_what_leaves_the_order_as_it_is(flags, told, run, tmp_path):
    """The same images from tar files; another batch size, but for buckets."""
    if "webdataset" in flags:
        pack(str(DIGITS), tmp_path / "tars", 400_000, 1)
        flags += f" --data_dir {tmp_path / 'tars'}"
    made = on_gpus([*tiny(run), *QUICK, "--backend", "cuda", *flags.split()])
    saved = read_saved_run(run / "step_10")
    source = open_data(dataset_request(made))
    assert other_order(saved, made, source) == told
    if flags.startswith("--data_source webdataset --data_dir"):  # of the same samples, shuffled
        labels = source.splits["train"].labels
        source.splits["train"].labels = np.roll(labels, 1)
        assert "training images' labels was" in other_order(saved, made, source)
    if "--buckets" in flags:  # each batch is of one bucket: its size decides which images it has
        saved.arguments["buckets"] = ["16x16"]
        found = other_order(saved, made, open_data(dataset_request(made)))
        assert found == "--batch_size was 128, is 64"


def test_an_epoch_begun_anew(run):
    """Steps are counted on; from its own checkpoints in mid-epoch such a run goes on as ever."""
    flags = [*QUICK, "--num_epochs", "1", "--seed", "1", "--restart_epoch", "--max_steps"]
    first = train_tiny_gpu(run, *flags, "15")
    assert "note: --seed was 0, is 1: epoch 1 starts again" in first.stdout
    assert read_saved_run(run / "step_15").position == Position(15, 0, 5 * 128)
    whole = train_tiny_gpu(run, *flags, "99")
    assert "starts again" not in whole.stdout
    assert list(whole.steps) == list(range(1, 10 + 11 + 1))
    assert read_saved_run(run / "step_21").position == Position(21, 1, 0)
