"""--attention flash: values by JAX's interpreter, the step by the real TPU compiler."""

import json

import pytest
import torch

from tests.cli import run_program
from xla_fsdp.attention.sizes import FlashSizes, padded_tokens, padded_width

COMPILE = "run_vit_training.py --compile_only --json --tpu_topology v5e:2x2".split()

# 1025 tokens: 2 blocks of 640, the last one with padding.
WIDTH, HEADS, DEPTH, BATCH, SIDE, PATCH, CLASSES = 256, 8, 2, 8, 256, 8, 128
PATCHES = (SIDE // PATCH) ** 2
MODEL = (
    f"--embed_dim {WIDTH} --num_blocks {DEPTH} --num_heads {HEADS} --image_size {SIDE} "
    f"--patch_size {PATCH} --num_classes {CLASSES} --batch_size {BATCH} --class_token"
).split()


def test_values():
    """Outputs and gradients of q, k, v, in one block and in several, with and without padding."""
    done = run_program("-m", "tests.stand_ins.flash_on_cpu")
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


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("tokens", "padded", "block"),
    [
        (196, 256, 256),
        (577, 640, 640),
        (1024, 1024, 1024),
        (1025, 1280, 640),
        (1536, 1536, 768),
        (4096, 4096, 1024),
        (4097, 4480, 896),
        (5329, 5376, 896),
        (16384, 16384, 1024),
        (21316, 21504, 1024),
    ],
)
def test_padding(tokens, padded, block):
    assert padded_tokens(tokens, 64, BF16) == padded
    assert FlashSizes(1, 1, padded, padded, 64, BF16).block == block


@pytest.mark.parametrize(("width", "dtype"), [(256, BF16), (64, FP32)])
def test_padding_where_vector_memory_holds_less(width, dtype):
    found = [padded_tokens(tokens, width, dtype) for tokens in (512, 577, 1025, 4096, 4097)]
    assert found == [512, 768, 1152, 4096, 4224]
    blocks = [FlashSizes(1, 1, each, each, width, dtype).block for each in found]
    assert blocks == [512, 384, 384, 512, 384]


@pytest.mark.parametrize(
    ("parts", "each", "block"), [(3, 384, 384), (9, 128, 384), (2, 640, 640), (11, 128, 128)]
)
def test_keys_of_several_devices_are_divided(parts, each, block):
    """Each has padded its own tokens."""
    assert FlashSizes(1, 1, each, parts * each, 64, BF16).key_block == block


def test_widths():
    widths = [64, 80, 88, 128, 160, 256]
    assert [padded_width(width) for width in widths] == [64, 80, 88, 128, 256, 256]


def step_flops():
    """As in test_compile_only, but for what the kernels compute: on padded tokens, and forward,
    forward again, and backward 2 + 2 + 7 products where PyTorch's has 2 + 2 + 4."""
    tokens, padded = PATCHES + 1, padded_tokens(PATCHES + 1, WIDTH // HEADS, BF16)
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
    done = run_program("-m", "tests.stand_ins.flash_in_nested")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["8"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--fake_data", "--attention flash requires a TPU: its kernels run nowhere else"),
        ("--backend cuda", "--attention requires --backend xla, this is cuda"),
        (
            "--compile_only --tpu_topology v5e:2x2 --mesh_tensor 2 --mesh_domain 2",
            "--attention flash is incompatible with --mesh_domain 2 and --mesh_tensor 2 at once",
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
