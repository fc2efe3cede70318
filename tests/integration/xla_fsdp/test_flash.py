"""--attention flash: values by JAX's interpreter, the step by the real TPU compiler."""

import json

import pytest
import torch

from tests.support.cli import run_program
from tpu_attention.kernels import FlashSizes

COMPILE = "run_vit_training.py --compile_only --json --tpu_topology v5e:2x2".split()

# 1025 tokens: 2 blocks of 640, the last of which reads past the end.
WIDTH, HEADS, DEPTH, BATCH, SIDE, PATCH, CLASSES = 256, 8, 2, 8, 256, 8, 128
PATCHES = (SIDE // PATCH) ** 2
MODEL = (
    f"--embed_dim {WIDTH} --num_blocks {DEPTH} --num_heads {HEADS} --image_size {SIDE} "
    f"--patch_size {PATCH} --num_classes {CLASSES} --batch_size {BATCH} --class_token"
).split()


@pytest.mark.long
def test_values():
    """Outputs and gradients of q, k, v, in one block and in several, with keys that fill them and
    that do not."""
    done = run_program("-m", "tests.fakes.flash_on_cpu")
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout.splitlines()[-1])
    assert {(case["blocks"] > 1, case["masked"], case["spans"] > 1) for case in cases} == {
        (False, True, False),
        (False, False, False),
        (True, True, False),
        (True, True, True),
    }
    for case in cases:
        assert max(case["errors"]) < (1e-5 if case["dtype"] == "torch.float32" else 2e-2), case


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("tokens", "width", "dtype", "blocks", "block"),
    [
        (1024, 64, BF16, 1, 1024),
        (1025, 64, BF16, 2, 640),
        (21316, 64, BF16, 21, 1024),
        (577, 64, FP32, 2, 384),
    ],
)
def test_blocks(tokens, width, dtype, blocks, block):
    sizes = FlashSizes(1, 2, tokens, tokens, width, dtype)
    assert (sizes.key_blocks, sizes.key_block) == (blocks, block)
    assert sizes.block <= block


def step_flops():
    """As in test_compile_only, but for what the kernels compute: on whole blocks, and forward,
    forward again, and backward 2 + 2 + 5 products where PyTorch's has 2 + 2 + 4."""
    tokens = PATCHES + 1
    sizes = FlashSizes(BATCH, HEADS, tokens, tokens, WIDTH // HEADS, BF16)
    scores = sizes.blocks * sizes.block * sizes.key_blocks * sizes.key_block
    mlp_out = 2 * BATCH * tokens * 4 * WIDTH**2
    block = 2 * BATCH * tokens * 12 * WIDTH**2
    attention = 9 * 2 * BATCH * scores * WIDTH
    patch = 2 * BATCH * PATCHES * 3 * PATCH**2 * WIDTH
    head = 2 * BATCH * WIDTH * CLASSES
    return DEPTH * (4 * block - mlp_out + attention) + 2 * patch + 3 * head


@pytest.mark.long
def test_compiled_for_tpu():
    done = run_program(*COMPILE, *MODEL, "--precision", "bf16")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "flash attention" in found["sharding"]
    assert found["flops_per_chip"] == pytest.approx(step_flops() / 4, rel=0.05)
    scores = 4 * (BATCH // 4) * HEADS * (PATCHES + 1) ** 2  # in fp32; PyTorch's has several
    assert found["temporary_bytes"] < scores


def test_nested():
    """Forward, again forward for the backward pass, and the kernel of that, in two blocks."""
    done = run_program("-m", "tests.fakes.flash_in_nested")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["6"]
