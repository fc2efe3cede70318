"""Stopping, resuming and moving between backends, with FSDP2 on the CPU under torchrun."""

import pytest
import torch

from tests.references.plain_checkpoint import convert, tiny_timm_model
from tests.support.cli import train_tiny, train_tiny_gpu
from tests.support.curves import assert_same_curves
from tests.support.resuming import DROPOUT, EPOCHS_OF_5, assert_resumes_at_step_7


@pytest.mark.long
def test_mid_epoch_resume_is_exact(tmp_path):
    """Dropout everywhere, accumulation, HSDP: bit for bit the run that was not stopped."""
    flags = [*EPOCHS_OF_5, *DROPOUT, *"--dp_outer 2 --dp_shard 1 --grad_accum_steps 2".split()]
    flags += ["--max_steps", "12"]
    whole, resumed = assert_resumes_at_step_7(train_tiny_gpu, tmp_path, *flags, processes=2)
    assert "at step 7, epoch 2" in resumed.stdout
    assert list(resumed.steps) == list(range(8, 13))
    assert resumed.evaluations[-1] == whole.evaluations[-1]


@pytest.mark.long
def test_checkpoint_moves_between_backends_and_process_counts(tmp_path):
    """XLA on 2, 4 GPU processes with HSDP, 3 with ZeRO-2, XLA on 4 and on 1: no loss changes."""
    flags = ["--batch_size", "48", "--max_steps"]
    reference = train_tiny(tmp_path / "reference", *flags, "10")
    run = tmp_path / "run"
    train_tiny(run, *flags, "2", devices=2)
    train_tiny_gpu(run, *flags, "4", "--dp_outer", "2", processes=4)
    train_tiny_gpu(run, *flags, "6", "--zero_dp_strategy", "2", processes=3)
    train_tiny(run, *flags, "8", devices=4)
    moved = train_tiny(run, *flags, "10")
    assert_same_curves(moved, reference, rel=2e-5)


@pytest.mark.long
def test_best_checkpoint_is_kept_and_resumed(tmp_path):
    """The learning rate changes no weight: all are equally good, and the first one counts."""
    flags = "--test_step_interval 2 --ckpt_best --keep_checkpoints 1 --lr 1e-30 --max_steps".split()
    run = train_tiny_gpu(tmp_path, *flags, "12", "--ckpt_step_interval", "5")
    assert [record["step"] for record in run.evaluations] == [2, 4, 6, 8, 10, 12]
    assert len({record["val_top1"] for record in run.evaluations}) == 1
    kept = {path.name for path in tmp_path.glob("step_*")}
    assert kept == {"step_2", "step_12"}
    train_tiny_gpu(tmp_path, *flags, "13")  # a start later it is still the best one
    kept = {path.name for path in tmp_path.glob("step_*")}
    assert kept == {"step_2", "step_13"}
    resumed = train_tiny_gpu(tmp_path, *flags, "14", "--resume", "best")
    assert "step_2 at step 2" in resumed.stdout
    # 12 is gone from the record; with no better evaluation the best one is still protected.
    again = train_tiny_gpu(tmp_path, *flags, "15", "--resume", "lowest_loss")
    losses = {record["step"]: record["val_loss"] for record in resumed.evaluations}
    kept = {int(path.name[5:]) for path in tmp_path.glob("step_*")} | {14}
    chosen = min(sorted(losses.keys() & kept), key=lambda step: losses[step])
    assert f"step_{chosen} at step {chosen}" in again.stdout


@pytest.mark.long
def test_pytorch_reads_the_checkpoint(tmp_path):
    """Full tensors under timm's names, from uneven parts in 3 processes."""
    run = train_tiny_gpu(tmp_path, "--max_steps", "2", "--batch_size", "48", processes=3)
    state = convert(run.ckpt_dir / "step_2", tmp_path / "plain.pt")
    model = tiny_timm_model()
    model.load_state_dict(state["model"])
    for name, parameter in model.named_parameters():
        entry = state["optimizer"]["state"][name]
        assert entry["exp_avg"].shape == entry["exp_avg_sq"].shape == parameter.shape
        assert entry["step"] == 2


@pytest.mark.long
def test_fp16_loss_scale(tmp_path):
    """Steps that overflow change nothing and halve the scale; a resume goes on with it."""
    flags = "--precision fp16 --warmup_steps 0 --lr 1e-3".split()
    fp16 = {"processes": 2, "program": "tests.fakes.fp16_on_cpu"}
    plain = train_tiny_gpu(tmp_path / "fp32", "--warmup_steps", "0", "--lr", "1e-3", processes=2)
    whole = train_tiny_gpu(tmp_path / "whole", *flags, "--max_steps", "12", **fp16)
    losses = whole.column("loss")
    assert whole.column("grad_norm")[0] is None  # not finite, so skipped ...
    assert torch.tensor(whole.column("grad_norm")[-6:]).isfinite().all()
    assert losses[0] == pytest.approx(plain.column("loss")[0], rel=0.01)
    assert torch.tensor(losses).isfinite().all()  # ... with the weights unharmed
    assert set(whole.column("skipped_steps")) == {0}  # loss scaling at work is no fault
    run = tmp_path / "run"
    train_tiny_gpu(run, *flags, "--max_steps", "6", **fp16)
    resumed = train_tiny_gpu(run, *flags, "--max_steps", "12", **fp16)
    assert resumed.column("loss") == losses
