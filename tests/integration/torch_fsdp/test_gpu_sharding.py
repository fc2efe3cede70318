"""FSDP2 on the CPU, under torchrun: however the model is sharded, the same training."""

import pytest

from tests.support.cli import train_tiny, train_tiny_gpu
from tests.support.curves import assert_same_curves, assert_same_training
from tests.support.marks import long


@pytest.mark.long
def test_same_losses_as_xla(tmp_path):
    """The same seed and data on both backends, 20 steps."""
    steps = ("--max_steps", "20")
    xla = train_tiny(tmp_path / "xla", *steps, devices=2)
    gpu = train_tiny_gpu(tmp_path / "gpu", *steps, processes=2)
    assert len(gpu.steps) == 20
    assert_same_curves(gpu, xla, rel=1e-4)
    assert gpu.column("lr") == xla.column("lr")
    assert gpu.evaluations[0]["val_loss"] == pytest.approx(xla.evaluations[0]["val_loss"], rel=1e-4)
    assert "FSDP2 ZeRO-3" in gpu.run_file["backend"]


@pytest.mark.parametrize(
    ("processes", "flags", "told"),
    [
        (1, "--grad_ckpt selective", "activation checkpointing selective"),
        long(2, "", "ZeRO-3, one unit per block, mesh fsdp 2"),
        long(2, "--zero_dp_strategy 2 --forward_prefetch 0 --backward_prefetch 0", "ZeRO-2"),
        (2, "--no_reshard_after_forward --no_grad_ckpt", "ZeRO-2"),
        long(2, "--zero_dp_strategy no_shard", "(no sharding), mesh dcn 2"),
        (2, "--run_without_fsdp --channels_last", "channels last"),
        long(2, "--forward_prefetch 2 --backward_prefetch 2", "mesh fsdp 2"),
        long(4, "--dp_outer 2", "mesh dcn 2 x fsdp 2"),
        # Accumulating over micro-batches equals the large batch, too.
        long(2, "--grad_accum_steps 4", "ZeRO-3"),
        long(2, "--zero_dp_strategy 2 --grad_accum_steps 2", "ZeRO-2"),
        long(2, "--run_without_fsdp --grad_accum_steps 2", "data parallel (no sharding)"),
        (4, "--dp_outer 2 --grad_accum_steps 2", "mesh dcn 2 x fsdp 2"),
    ],
)
def test_form(processes, flags, told, tiny_on_gpu, tmp_path):
    result = train_tiny_gpu(tmp_path, *flags.split(), processes=processes)
    assert told in result.run_file["backend"]
    assert result.run_file["devices"] == processes
    assert_same_training(result, tiny_on_gpu)


def test_state_is_sharded_evenly(tiny_on_gpu, tmp_path):
    """Parameters and AdamW of the fullest process; rows are not always divisible."""
    part = train_tiny_gpu(tmp_path, processes=4).run_file["state_bytes_per_device"]
    whole = tiny_on_gpu.run_file["state_bytes_per_device"]
    assert whole["optimizer"] == pytest.approx(2 * whole["parameters"], rel=0.01)
    for name in ("parameters", "optimizer"):
        assert 0.25 * whole[name] <= part[name] <= 0.27 * whole[name]


@pytest.mark.long
def test_compiled_blocks(tiny_on_gpu, tmp_path):
    result = train_tiny_gpu(tmp_path, "--compile", processes=1)
    assert_same_training(result, tiny_on_gpu)
    counts = result.column("compilations")
    assert counts[0] > 0
    assert len(set(counts)) == 1  # all in the first step


def test_bf16_is_near_fp32(tiny_on_gpu, tmp_path):
    flags = "--param_dtype bf16".split()
    lower = train_tiny_gpu(tmp_path / "lower", *flags, "--reduce_dtype", "bf16", processes=2)
    higher = train_tiny_gpu(tmp_path / "higher", *flags, "--grad_reduce_in_fp32", processes=2)
    for result in (lower, higher):
        assert result.column("loss") != pytest.approx(tiny_on_gpu.column("loss"), rel=1e-6)
        assert result.column("loss") == pytest.approx(tiny_on_gpu.column("loss"), rel=0.03)
    assert lower.column("grad_norm") != higher.column("grad_norm")


def test_evaluation_between_steps(tiny_on_gpu, tmp_path):
    """ZeRO-2 keeps the weights gathered; stale ones must not be used after a step."""
    flags = "--zero_dp_strategy 2 --test_step_interval 2 --ckpt_step_interval 3".split()
    result = train_tiny_gpu(tmp_path, *flags, processes=2)
    assert [record["step"] for record in result.evaluations] == [2, 4, 6]
    assert result.column("loss") == pytest.approx(tiny_on_gpu.column("loss"), rel=1e-5)
