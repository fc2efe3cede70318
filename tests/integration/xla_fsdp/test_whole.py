"""--attention whole: values by JAX's interpreter, the step by the real TPU compiler."""

import json

import pytest

from tests.support.cli import run_program
from tests.support.marks import long, spread

COMPILE = "run_vit_training.py --compile_only --json --precision bf16".split()
SMALL = (
    "--embed_dim 256 --num_blocks 2 --num_heads 4 --patch_size 16 --num_classes 128 --batch_size 16"
).split()


@pytest.mark.long
def test_values():
    """Outputs and gradients of timm's attention, with norms, gate and biases, and of the product
    that other attention asks for."""
    done = run_program("-m", "tests.fakes.whole_on_cpu")
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])
    found = {(case["packed"], case["blocks"] > 1) for case in cases}
    assert found == {(False, False), (True, False), (False, True), (True, True)}
    for case in cases:
        assert max(case["errors"]) < (1e-5 if case["dtype"] == "float32" else 2e-2), case


@pytest.mark.long
def test_values_with_rotary_positions():
    """The kernels rotate, but where heads do not fill registers together; with fewer heads of keys
    than of queries timm's own forward pass does."""
    done = run_program("-m", "tests.fakes.whole_on_cpu", "rotary")
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])
    assert [case["rotated"] for case in cases].count(False) == 2
    for case in cases:
        assert case["calls"] == 2
        assert max(case["errors"]) < (1e-5 if case["dtype"] == "float32" else 2e-2), case


def compiled(*flags):
    done = run_program(*COMPILE, *SMALL, *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "flags",
    [
        long(flags)
        for flags in (
            "--tpu_topology v6e:2x2 --image_size 112 --class_token",
            "--tpu_topology v5e:2x2 --image_size 112 --xla_fsdp nested",
            "--tpu_topology v5e:2x2 --image_size 112 --mesh_tensor 2 --grad_ckpt selective",
            "--tpu_topology v5e:1x1 --image_size 112 --class_token --no-scan_blocks",
        )
    ],
)
def test_auto_takes_it(flags):
    found = compiled(*flags.split())
    assert "whole attention" in found["sharding"]
    # Heads of 64 fill half of a matrix unit: no kernel here comes near the chip's peak.
    products = 7 if "nested" in flags or "no-scan" in flags else 9
    tokens = 49 + ("--class_token" in flags)
    flops = 2 * 2 * products * 16 * tokens**2 * 256 / found["devices"]
    peak = {"v5e": 197e12, "v6e": 918e12}[found["topology"][:3]]
    assert 2 * flops / peak < found["expected_kernels_s"] < 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "slice_"),
    spread(
        [
            "--embed_dim 5120 --num_heads 32 --num_blocks 2 --image_size 256 --patch_size 16",
            "--embed_dim 1408 --num_heads 16 --num_blocks 2 --image_size 224 --patch_size 14",
            "--embed_dim 768 --num_heads 12 --num_blocks 2 --image_size 512 --patch_size 16",
            "--embed_dim 192 --num_heads 3 --num_blocks 2 --image_size 224 --patch_size 16",
        ],
        ["v5e:2x2", "v4:2x2x1", "v5p:2x2x1", "v6e:2x2"],
        every=4,
    ),
)
def test_every_generation_compiles_it(model, slice_):
    """With heads that fill registers and that do not, and as many tokens as it takes."""
    flags = f"{model} --tpu_topology {slice_} --num_classes 128 --batch_size 16 --precision bf16"
    done = run_program(*COMPILE, *flags.split(), "--attention", "whole")
    if "v4" in flags and "--embed_dim 1408" in flags:  # heads of 88 go together, and v4 has 16 MiB
        assert "exceeds the vector memory with 16 heads of width 88" in done.stderr
        return
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_scores_are_not_in_hbm():
    """The step with PyTorch's product moves at least its scores more."""
    flags = "--tpu_topology v5e:1x1 --image_size 512 --batch_size 16".split()
    whole, plain = (compiled(*flags, "--attention", form) for form in ("whole", "sdpa"))
    scores = 2 * 16 * 4 * 1024**2  # in bf16, of one block
    assert plain["hbm_bytes"] - whole["hbm_bytes"] > 2 * 2 * scores
    assert plain["peak_hbm_bytes"] - whole["peak_hbm_bytes"] > scores
    assert whole["expected_step_s"] < plain["expected_step_s"]
