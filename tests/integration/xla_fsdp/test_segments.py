"""Attention within segments: values by JAX's interpreter, every way that they take to a block's
attention, the step by the real TPU compiler."""

import json

import pytest

from tests.support.cli import run_program, train_tiny, train_tiny_gpu
from tests.support.marks import long
from tests.support.native_images import flags, write_images

PROGRAM = "tests.fakes.kernels_on_cpu"
ROTARY = "--model timm/vit_small_patch16_rope_224 --mlp_ratio 4".split()
LONG = "--token_budget 600 --max_images_per_sequence 16 --batch_size 2".split()
MODELS = {"plain": [], "rotary": ROTARY, "several blocks of queries": LONG}


@pytest.mark.long
def test_values():
    """Other values in padding and in other segments change not a bit; one segment is as none."""
    done = run_program("-m", "tests.fakes.segments_on_cpu")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for case in found["cases"]:
        assert max(case["errors"]) < (1e-5 if case["dtype"] == "float32" else 2e-2), case
        assert case["unchanged"], case
        assert case["others_changed"], case
    for edge in found["edges"]:
        assert edge["one_segment"]
        assert edge["alone"] < 1e-4
        assert edge["mixed"] < 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def by_pytorch(folder, tmp_path_factory):
    """The curves with PyTorch's own attention and a matrix of booleans, by model."""
    return {
        model: train_tiny_gpu(tmp_path_factory.mktemp("plain"), *flags(folder, *given))
        for model, given in MODELS.items()
    }


@pytest.mark.parametrize(
    ("devices", "model", "how"),
    [
        (2, "plain", "--attention whole --grad_ckpt selective"),
        *(
            long(*case)
            for case in [
                (2, "rotary", "--attention whole"),
                (2, "plain", "--attention flash --grad_ckpt none"),
                (4, "rotary", "--attention sdpa"),
                (2, "plain", "--attention whole --no-scan_blocks"),
                (2, "rotary", "--attention flash --no-scan_blocks --grad_ckpt none"),
                (1, "plain", "--attention flash --xla_fsdp nested"),
                (2, "rotary", "--attention whole --mesh_tensor 2 --grad_ckpt selective"),
                (2, "plain", "--attention flash --mesh_tensor 2"),
                (2, "several blocks of queries", "--attention whole"),
            ]
        ),
    ],
)
def test_training(devices, model, how, by_pytorch, folder, tmp_path):
    given = flags(folder, *MODELS[model], *how.split())
    result = train_tiny(tmp_path, *given, devices=devices, program=PROGRAM)
    assert "Involuntary full rematerialization" not in result.stderr
    for name in ("loss", "grad_norm"):
        expected = by_pytorch[model].column(name)
        assert result.column(name) == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("tokens", "more"), [(40, ()), (200, ROTARY), (300, ()), (504, ROTARY), (1000, ())]
)
def test_sequences_of_any_length_are_compiled(tokens, more):
    """Not only of whole registers of 128 lanes, which an interpreter does not have."""
    model = (
        "--compile_only --json --tpu_topology v5e:1x1 --fake_data --native_resolution "
        f"--token_budget {tokens} --batch_size 1 --image_size 64 --patch_size 16 --num_classes 10 "
        "--num_blocks 1 --embed_dim 128 --num_heads 2 --attention whole"
    ).split()
    done = run_program("run_vit_training.py", *model, *more)
    assert done.returncode == 0, done.stderr
    assert "whole attention" in json.loads(done.stdout)["sharding"]


@pytest.mark.long
@pytest.mark.parametrize(("form", "least", "most"), [("whole", 0.4, 0.8), ("flash", 1, 1.25)])
def test_compiled_for_tpu(form, least, most):
    """Neither scores nor a mask are in HBM. Beside an image of as many tokens in each sequence,
    ``whole`` computes half of the products, and ``flash`` takes little longer."""
    model = (
        "--compile_only --json --tpu_topology v5e:2x2 --fake_data --precision bf16 --embed_dim 256 "
        "--num_heads 4 --num_blocks 2 --image_size 512 --patch_size 16 --num_classes 128 "
        f"--batch_size 16 --attention {form}"
    ).split()
    native = "--native_resolution --token_budget 1024 --max_tokens_per_image 256".split()
    found = []
    for more in ([], native):
        done = run_program("run_vit_training.py", *model, *more)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    square, packed = found
    assert f"{form} attention" in packed["sharding"]
    mask = (16 // 4) * 1024**2  # of truth values, for all heads
    assert packed["peak_hbm_bytes"] - square["peak_hbm_bytes"] < 2 * mask
    assert least <= packed["expected_kernels_s"] / square["expected_kernels_s"] < most
    assert packed["expected_step_s"] / square["expected_step_s"] < 1.25
