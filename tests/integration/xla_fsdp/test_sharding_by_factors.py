"""Sizes that the number of devices does not divide: matrices in fewer shards than devices."""

import json

import pytest
import torch.distributed.checkpoint as dcp

from tests.support.cli import TINY_MODEL, run_program, train_tiny
from tests.support.curves import assert_same_curves, assert_same_training
from tests.support.marks import long

# 34, 102 and 10 are no multiples of 4, but of 2.
SIZES = "--embed_dim 34 --mlp_ratio 3".split()
# Parameters: the patch and the position embedding have dimensions of 4 and 16.
QUARTERS = 3 * 4**2 * 34 + 16 * 34
HALVES = 2 * (3 + 1 + 2 * 3) * 34**2 + 10 * 34
VECTORS = 2 * (4 + 3 + 1 + 3 + 1) * 34 + 34 + 2 * 34 + 10
BLOCK = "--qk_norm --init_values 0.5 --class_token".split()


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("one_device"), *SIZES, *BLOCK)


@pytest.mark.parametrize(
    ("devices", "flags"),
    [
        (4, ""),
        long(4, "--no-scan_blocks"),
        long(4, "--grad_accum_steps 2"),
        long(8, "--mesh_dcn 2"),
        long(8, "--mesh_tensor 2"),
        long(8, "--mesh_tensor 2 --no-scan_blocks"),
        long(8, "--mesh_domain 2"),
        long(8, "--mesh_domain 2 --no-scan_blocks"),
    ],
)
def test_same_training(devices, flags, one_device, tmp_path):
    result = train_tiny(tmp_path, *SIZES, *BLOCK, *flags.split(), devices=devices)
    assert_same_training(result, one_device)
    # XLA's warning where it replicates a tensor to shard it otherwise.
    assert "Involuntary full rematerialization" not in result.stderr


@pytest.mark.parametrize("flags", [long("--global_pool map"), long("--optimizer muon")])
def test_same_training_of_other_models(flags, tmp_path):
    plain = train_tiny(tmp_path / "plain", *SIZES, *flags.split())
    result = train_tiny(tmp_path / "sharded", *SIZES, *flags.split(), devices=4)
    assert_same_training(result, plain)
    assert "Involuntary full rematerialization" not in result.stderr


@pytest.mark.long
def test_muon_over_parts_of_different_sizes(tmp_path):
    """Four shards and two copies of each; matrices are sharded along different dimensions."""
    flags = "--embed_dim 36 --mlp_ratio 3 --optimizer muon".split()
    plain = train_tiny(tmp_path / "plain", *flags)
    result = train_tiny(tmp_path / "sharded", *flags, devices=8)
    assert chunks_of(tmp_path / "sharded" / "step_6") == [(27, 36)] * 4
    assert_same_training(result, plain)
    assert "Involuntary full rematerialization" not in result.stderr


@pytest.mark.long
def test_lower_precision(tmp_path):
    """Each device rounds its shard, and finds its factors."""
    for flags in ("--gather_dtype fp8", "--matmul int8"):
        flags = ["--precision", "bf16", "--max_steps", "3", *flags.split()]
        plain = train_tiny(tmp_path / f"{flags[-1]}_plain", *SIZES, *flags)
        result = train_tiny(tmp_path / flags[-1], *SIZES, *flags, devices=4)
        assert_same_curves(result, plain, rel=0.02)


def chunks_of(checkpoint):
    tensors = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    found = tensors["model.blocks.1.attn.qkv.weight"]
    assert len({tuple(chunk.offsets) for chunk in found.chunks}) == len(found.chunks)
    return [chunk.sizes for chunk in found.chunks]


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_checkpoint_moves_between_numbers_of_devices(optimizer, tmp_path):
    flags = [*SIZES, *BLOCK, "--optimizer", optimizer, "--model_ema"]
    whole = train_tiny(tmp_path / "whole", *flags)
    folder = tmp_path / "moved"
    for step, devices, sizes in (
        (2, 4, [(51, 34)] * 2),
        (3, 1, [(102, 34)]),
        (4, 8, [(51, 34)] * 2),
    ):
        train_tiny(folder, *flags, "--max_steps", str(step), devices=devices)
        assert chunks_of(folder / f"step_{step}") == sizes
    result = train_tiny(folder, *flags, devices=1)
    assert_same_curves(result, whole, rel=1e-5)


@pytest.mark.long
def test_state_is_sharded():
    """Bytes that lie on the first of 4 devices: a half of most matrices, and vectors whole."""
    flags = [*TINY_MODEL, *SIZES]
    done = run_program("-m", "tests.fakes.measure_state", "4", *flags)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["told"] == found["bytes"]
    assert found["bytes"]["parameters"] == 4 * (QUARTERS // 4 + HALVES // 2 + VECTORS)


def test_log_line(one_device, tmp_path):
    """The bytes of a device beyond a quarter of all."""
    result = train_tiny(tmp_path, *SIZES, "--max_steps", "1", "--eval_batches", "1", devices=4)
    count = HALVES + 3 * VECTORS  # of fp32: a fourth of each is four bytes in place of one
    line = f"{count:,} bytes of parameters replicated on each device (no dimension is a multiple"
    assert line in result.run_file["backend"]
    assert "replicated" not in one_device.run_file["backend"]
