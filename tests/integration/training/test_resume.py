"""Stopping and resuming, by the real command line: the same run as without the stop."""

import json
import shutil

import numpy as np
import pytest
import torch

from data.config import DataConfig
from data.open import open_data
from data.pack import pack
from data.source import FILES, DatasetRequest
from tests.references.plain_checkpoint import convert, tiny_timm_model
from tests.support.cli import DIGITS, TINY_MODEL, train_tiny, train_tiny_gpu
from tests.support.curves import assert_same_curves
from tests.support.mixing import BOTH, HOST, assert_steady
from tests.support.resuming import DROPOUT, EPOCHS_OF_5
from tests.support.short_runs import QUICK

RUN_5 = [*EPOCHS_OF_5, *DROPOUT, *HOST, *BOTH.split()]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    flags = [*RUN_5, "--ckpt_step_interval", "7", "--max_steps", "12"]
    return train_tiny(folder, *flags, devices=2)


def test_mid_epoch_resume_is_exact(uninterrupted, tmp_path):
    """With all that is drawn at random, on the host and on devices; by other loaders."""
    assert_steady(uninterrupted)
    shutil.copytree(uninterrupted.ckpt_dir / "step_7", tmp_path / "step_7")
    flags = [*RUN_5, "--max_steps", "12", "--num_workers", "2"]
    resumed = train_tiny(tmp_path, *flags, devices=2)
    assert "at step 7, epoch 2" in resumed.stdout
    assert list(resumed.steps) == list(range(8, 13))
    for name in ("loss", "grad_norm", "lr"):
        assert resumed.column(name) == uninterrupted.column(name)[7:]
    assert resumed.evaluations[-1] == uninterrupted.evaluations[-1]
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_10", "step_12", "step_7"]


@pytest.mark.long
def test_gradient_checkpointing_repeats_the_dropout(tmp_path):
    flags = [*DROPOUT, "--batch_size", "64", "--max_steps", "3"]
    again = train_tiny(tmp_path / "again", *flags, "--no-scan_blocks", devices=2)
    kept = train_tiny(tmp_path / "kept", *flags, "--no_grad_ckpt", "--no-scan_blocks", devices=2)
    assert_same_curves(kept, again, rel=1e-5)


@pytest.mark.long
def test_dropout_differs_from_step_to_step_and_seed_to_seed(tmp_path):
    flags = "--fake_data --batch_size 500 --lr 0 --max_steps 4 --pos_dropout 0.5".split()
    flags += ["--image_size", "8", "--eval_batches", "1"]  # of 50,000 images
    runs = [train_tiny(tmp_path / seed, *flags, "--seed", seed).column("loss") for seed in "01"]
    assert len(set(runs[0] + runs[1])) == 8


def test_rerun_of_a_finished_run_changes_nothing(run, trained):
    again = train_tiny_gpu(run, *QUICK, "--max_steps", "5")
    assert "nothing left to train: step 10 is reached" in again.stdout
    assert again.records == trained.records
    told = f"val top-1 {trained.evaluations[-1]['val_top1']:.2f} %, checkpoint {run}/step_10"
    assert f"training completed: step 10, {told}" in again.stdout
    assert len(list(run.glob("step_*"))) == 2


@pytest.mark.long
def test_checkpoint_moves_between_forms_and_device_counts(tmp_path):
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


def test_pytorch_converts_the_checkpoint(uninterrupted, tmp_path):
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


def test_the_order_that_a_source_reports(tmp_path):
    folder, tars = shutil.copytree(DIGITS, tmp_path / "digits"), tmp_path / "tars"
    pack(str(folder), str(tars), 400_000, 1)

    def opened(data_dir, **changes):
        config = DataConfig(data_dir=str(data_dir), batch_size=16, **changes)
        return open_data(DatasetRequest(config, 3, (16, 16), 10, 0))

    order, shards = opened(folder).order(), opened(tars, data_source="webdataset")
    assert {name for name, value in shards.order().items() if order[name] != value} == {FILES}
    shards.splits["train"].labels = np.roll(shards.splits["train"].labels, 1)
    assert "the checksum of the training images' labels" in {
        name for name, value in shards.order().items() if order[name] != value
    }
    image = min((folder / "train" / "3").iterdir())
    renamed = image.rename(image.with_stem("0"))
    assert {n for n, v in opened(folder).order().items() if order[n] != v} == {FILES}
    renamed.unlink()
    assert "the number of training images" in opened(folder).order()
    assert opened(folder).order()["the number of training images"] == 1437
