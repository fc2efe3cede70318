"""--matmul int8: products of int8 numbers, against NumPy's, in training and as compiled."""

import json

import pytest

from tests.support.cli import run_program, train_tiny
from tests.support.marks import long

INT8 = "--precision bf16 --matmul int8".split()


def test_product():
    """To bf16's rounding the product of the rounded numbers, itself near the exact one."""
    done = run_program("-m", "tests.fakes.int8_on_xla")
    assert done.returncode == 0, done.stderr
    for case in json.loads(done.stdout.splitlines()[-1]):
        assert case["output"] < 2**-8, case
        assert 1e-4 < case["of rounding"] < 0.02, case
        assert max(case["gradients"]) < 0.01, case
        assert case["dtypes"] == ["torch.bfloat16", "torch.float32", "torch.float32"]
        assert case["rows of zeros"] == 0


@pytest.mark.parametrize(
    ("devices", "flags"),
    [
        long(1, "--grad_accum_steps 2"),
        (2, "--grad_ckpt selective --mesh_tensor 2"),
        long(4, "--mesh_domain 2 --residual_dtype bf16"),
        long(2, "--run_without_fsdp --drop_path_rate 0.0"),
    ],
)
def test_training(devices, flags, tiny_on_xla_in_bf16, tmp_path):
    found = train_tiny(tmp_path, *INT8, *flags.split(), devices=devices)
    assert "linear layers in int8" in found.run_file["backend"]
    assert found.column("loss") == pytest.approx(tiny_on_xla_in_bf16.column("loss"), rel=0.02)
    assert found.column("loss") != tiny_on_xla_in_bf16.column("loss")
    graphs = 3 if "accum" in flags else 1
    compiled, run = found.column("compilations"), found.column("executions")
    assert compiled[-1] == compiled[-2]
    assert run[-1] - run[-2] == graphs


@pytest.mark.long
def test_the_compiled_step_multiplies_and_gathers_int8(tmp_path):
    """Of a v5e slice; a block's forward products, twice, count half of what they would in bf16."""
    model = (
        "--embed_dim 512 --num_blocks 4 --num_heads 4 --image_size 128 --patch_size 16 "
        "--num_classes 128 --batch_size 64 --tpu_topology v5e:2x2 --attention sdpa"
    ).split()
    found = []
    for flags in (["--precision", "bf16"], [*INT8, "--hlo_dir", str(tmp_path)]):
        command = ("run_vit_training.py", "--compile_only", "--json", *model, *flags)
        done = run_program(*command)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    linear = 2 * 64 * 64 * 12 * 512**2 * 4 / 4
    fc2 = linear / 3  # its result is not needed again
    less = found[0]["flops_per_chip"] - found[1]["flops_per_chip"]
    assert less == pytest.approx((2 * linear - fc2) / 2, rel=0.01)
    gathered = [report["collective_bytes"]["all-gather"] for report in found]
    assert gathered[1] < 0.6 * gathered[0]
    lines = (tmp_path / "graph_1.hlo").read_text().splitlines()
    products = [line for line in lines if " convolution(" in line and "= s32[" in line]
    assert len(products) >= 7
    assert any("all-gather" in line and "= s8[" in line.replace("(s8[", "s8[") for line in lines)
