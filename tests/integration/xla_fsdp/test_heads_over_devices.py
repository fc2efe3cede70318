"""Kernels of attention whose heads, and images, are sharded over devices: --mesh_tensor."""

import pytest

from tests.support.cli import train_tiny
from tests.support.curves import assert_same_curves
from tests.support.dino import HEADS

# A small eps would let AdamW make steps of rounding where a gradient is nothing else.
WIDE = "--embed_dim 256 --num_heads 2 --class_token --eps 1e-4".split()
ROTARY = "--model timm/vit_small_patch16_dinov3 --init_values 0.5 --rope_rescale_coords 2".split()
ROTARY += "--embed_dim 256 --num_heads 4 --eps 1e-4".split()
KERNELS = "tests.fakes.kernels_on_cpu"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return train_tiny(tmp_path_factory.mktemp("plain"), *WIDE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "flags"),
    [
        ("whole", "--grad_ckpt selective"),
        ("flash", ""),
        ("whole", "--no-scan_blocks"),
        ("whole", "--grad_ckpt none --grad_accum_steps 2"),
    ],
)
def test_same_training(form, flags, plain, tmp_path):
    """Heads that fill registers, packed queries, keys and values; padded tokens."""
    mesh = ["--mesh_tensor", "2", "--attention", form]
    result = train_tiny(tmp_path, *WIDE, *mesh, *flags.split(), devices=4, program=KERNELS)
    assert f"{form} attention" in result.run_file["backend"]
    assert_same_curves(result, plain, rel=1e-5)
    # XLA's warning where it replicates a tensor to shard it otherwise.
    assert "Involuntary full rematerialization" not in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("form", ["whole", "flash"])
def test_narrow_heads_with_norms(form, tmp_path):
    """Queries and keys that are normalised come one by one; heads of 16 share a register."""
    flags = "--qk_norm --scale_attn_norm --num_heads 4 --embed_dim 64".split()
    plain = train_tiny(tmp_path / "plain", *flags)
    mesh = ["--mesh_tensor", "2", "--attention", form]
    result = train_tiny(tmp_path / form, *flags, *mesh, devices=2, program=KERNELS)
    assert_same_curves(result, plain, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        "--mesh_tensor 2 --grad_ckpt selective",
        "--grad_ckpt none --num_heads 2",
        "--no-scan_blocks --model timm/eva02_base_patch14_224",
        f"--objective dino {HEADS} --local_crops 2 --local_crop_size 8 --koleo_weight 0",
    ],
)
def test_rotary_positions(flags, tmp_path):
    """The kernels rotate by angles that are others in each step."""
    flags = [*ROTARY, *flags.split()]
    plain = train_tiny(tmp_path / "plain", *flags, devices=2)
    result = train_tiny(
        tmp_path / "whole", *flags, "--attention", "whole", devices=2, program=KERNELS
    )
    assert_same_curves(result, plain, rel=1e-5)
