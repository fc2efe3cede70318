"""--attention flash: values by JAX's interpreter, the step by the real TPU compiler."""

import json

import pytest

from tests.cli import run_program
from xla_fsdp.attention.sizes import Shape, padded_tokens, padded_width

COMPILE = "run_vit_training.py --compile_only --json --tpu_topology v5e:2x2".split()

# 1025 tokens: 3 blocks of 384, the last one a third padding.
WIDTH, HEADS, DEPTH, BATCH, SIDE, PATCH, CLASSES = 256, 8, 2, 8, 256, 8, 128
PATCHES = (SIDE // PATCH) ** 2
MODEL = (
    f"--embed_dim {WIDTH} --num_blocks {DEPTH} --num_heads {HEADS} --image_size {SIDE} "
    f"--patch_size {PATCH} --num_classes {CLASSES} --batch_size {BATCH} --class_token"
).split()


def test_values():
    """Outputs and gradients of q, k, v, in one block and in several, with and without padding."""
    done = run_program("-m", "tests.flash_on_cpu")
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])
    assert {(case["blocks"] > 1, case["masked"]) for case in cases} == {
        (False, True),
        (False, False),
        (True, True),
    }
    for case in cases:
        assert max(case["errors"]) < (1e-5 if case["dtype"] == "torch.float32" else 2e-2), case
        assert case["without_gradient"]


@pytest.mark.parametrize(
    ("tokens", "padded"),
    [
        (196, 256),
        (256, 256),
        (257, 384),
        (512, 512),
        (577, 768),
        (1024, 1024),
        (1025, 1152),
        (4097, 4224),
        (5329, 5376),
        (16384, 16384),
        (21316, 21504),
    ],
)
def test_padding(tokens, padded):
    assert padded_tokens(tokens) == padded
    assert padded % Shape(1, 1, padded, padded, 64, tokens, None).block == 0


def test_widths():
    widths = [64, 80, 88, 128, 160, 256]
    assert [padded_width(width) for width in widths] == [64, 80, 88, 128, 256, 256]


def step_flops():
    """As in test_compile_only, but for what the kernels compute: on padded tokens, and forward,
    forward again, and backward 2 + 2 + 7 products where PyTorch's has 2 + 2 + 4."""
    tokens, padded = PATCHES + 1, padded_tokens(PATCHES + 1)
    mlp_out = 2 * BATCH * tokens * 4 * WIDTH**2
    block = 2 * BATCH * tokens * 12 * WIDTH**2
    attention = 11 * 2 * BATCH * padded**2 * WIDTH
    patch = 2 * BATCH * PATCHES * 3 * PATCH**2 * WIDTH
    head = 2 * BATCH * WIDTH * CLASSES
    return DEPTH * (4 * block - mlp_out + attention) + 2 * patch + 3 * head


@pytest.mark.long
def test_compiled_for_tpu():
    done = run_program(*COMPILE, *MODEL, "--precision", "bf16")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "flash attention (1,025 tokens; flash from 1,025)" in found["sharding"]
    assert found["flops_per_chip"] == pytest.approx(step_flops() / 4, rel=0.05)
    scores = 4 * (BATCH // 4) * HEADS * (PATCHES + 1) ** 2  # in fp32; PyTorch's has several
    assert found["temporary_bytes"] < scores


def test_nested():
    """Forward, again forward for the backward pass, and the two kernels of that, in two blocks."""
    done = run_program("-m", "tests.flash_in_nested")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["8"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--fake_data", "--attention flash needs a TPU: its kernels run nowhere else"),
        ("--backend cuda", "--attention needs --backend xla, this is cuda"),
        (
            "--compile_only --tpu_topology v5e:2x2 --mesh_tensor 2 --mesh_domain 2",
            "--attention flash does not go with --mesh_domain 2 and --mesh_tensor 2 at once: use",
        ),
        (
            "--compile_only --tpu_topology v5e:2x2 --att_dropout 0.1",
            "--attention flash has no dropout, here --att_dropout 0.1",
        ),
        (
            "--compile_only --tpu_topology v5e:2x2 --num_heads 16",
            "--attention flash takes heads up to 256 wide, this model's are 320",
        ),
    ],
)
def test_refused(flags, said):
    done = run_program("run_vit_training.py", "--attention", "flash", *flags.split())
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
