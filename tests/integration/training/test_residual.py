"""--residual_dtype bf16: what blocks add to is bf16, the rest stays as it was."""

import json

import pytest

from tests.support.cli import run_program, train_tiny
from tests.support.marks import long


@pytest.mark.parametrize(
    ("devices", "flags"),
    [
        long(1, ""),
        long(2, "--no-scan_blocks"),
        (2, "--grad_ckpt selective --mesh_tensor 2"),
        long(2, "--mesh_domain 2 --no_grad_ckpt"),
    ],
)
def test_training(devices, flags, tiny_on_xla, tmp_path):
    rounded = ["--precision", "bf16", "--residual_dtype", "bf16"]
    found = train_tiny(tmp_path, *rounded, *flags.split(), devices=devices)
    assert "residuals in bf16" in found.run_file["backend"]
    assert found.column("loss") == pytest.approx(tiny_on_xla.column("loss"), rel=0.02)
    assert found.column("loss") != tiny_on_xla.column("loss")


@pytest.mark.long
def test_halves_what_is_kept_of_each_block():
    model = (
        "--embed_dim 256 --num_blocks 8 --num_heads 4 --image_size 512 --patch_size 16 "
        "--num_classes 128 --batch_size 16 --precision bf16 --tpu_topology v5e:1x1"
    ).split()
    peaks = []
    for dtype in ("fp32", "bf16"):
        command = ("--compile_only", "--json", "--residual_dtype", dtype, *model)
        done = run_program("run_vit_training.py", *command)
        assert done.returncode == 0, done.stderr
        peaks.append(json.loads(done.stdout)["peak_hbm_bytes"])
    of_blocks = 8 * 16 * 1024 * 256
    assert peaks[0] - peaks[1] > 0.9 * 2 * of_blocks
