"""Attention within segments: values by JAX's interpreter, every way that they take to a block's
attention, the step by the real TPU compiler."""

import functools
import json

import pytest

from tests.support.cli import run_program, train_tiny, train_tiny_gpu
from tests.support.marks import long

PROGRAM = "tests.fakes.segments_in_training"
STEPS = "--max_steps 3 --eval_batches 0".split()


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


ROTARY = "--model timm/vit_small_patch16_rope_224 --embed_dim 48 --mlp_ratio 4".split()
MODELS = {"plain": [], "rotary": ROTARY}


@pytest.fixture(scope="module")
def by_pytorch(tmp_path_factory):
    """A function: the curves of a model with PyTorch's own attention and a matrix of booleans."""

    @functools.cache
    def train(model):
        folder = tmp_path_factory.mktemp("plain")
        return train_tiny_gpu(folder, *MODELS[model], *STEPS, program=PROGRAM)

    return train


@pytest.mark.parametrize(
    ("devices", "model", "flags"),
    [
        (2, "plain", "--attention whole --grad_ckpt selective"),
        *(
            long(*case)
            for case in [
                (2, "rotary", "--attention whole"),
                (2, "plain", "--attention flash --grad_ckpt none"),
                (4, "plain", "--attention sdpa"),
                (2, "plain", "--attention whole --no-scan_blocks"),
                (2, "rotary", "--attention flash --no-scan_blocks --grad_ckpt none"),
                (1, "plain", "--attention flash --xla_fsdp nested"),
                (1, "plain", "--attention sdpa --xla_fsdp nested --grad_ckpt none"),
                (2, "rotary", "--attention whole --mesh_tensor 2 --grad_ckpt selective"),
                (2, "plain", "--attention flash --mesh_tensor 2"),
                (4, "plain", "--attention sdpa --mesh_tensor 2 --grad_ckpt none"),
            ]
        ),
    ],
)
def test_training(devices, model, flags, by_pytorch, tmp_path):
    given = [*MODELS[model], *STEPS, *flags.split()]
    result = train_tiny(tmp_path, *given, devices=devices, program=PROGRAM)
    assert "Involuntary full rematerialization" not in result.stderr
    for name in ("loss", "grad_norm"):
        expected = by_pytorch(model).column(name)
        assert result.column(name) == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(("form", "most"), [("whole", 1.25), ("flash", 1.5)])
def test_compiled_for_tpu(form, most):
    """Neither scores nor a mask are in HBM, and the kernels take little longer."""
    flags = (
        "--compile_only --json --tpu_topology v5e:2x2 --precision bf16 --embed_dim 256 "
        "--num_heads 4 --num_blocks 2 --image_size 512 --patch_size 16 --num_classes 128 "
        f"--batch_size 16 --attention {form}"
    ).split()
    found = {}
    for program in (["run_vit_training.py"], ["-m", PROGRAM]):
        done = run_program(*program, *flags)
        assert done.returncode == 0, done.stderr
        found[program[-1]] = json.loads(done.stdout)
    without, within = found.values()
    assert f"{form} attention" in within["sharding"]
    mask = (16 // 4) * 1024**2  # of truth values, for all heads
    assert within["hbm_bytes"] - without["hbm_bytes"] < mask
    assert within["peak_hbm_bytes"] - without["peak_hbm_bytes"] < mask
    assert 1 <= within["expected_kernels_s"] / without["expected_kernels_s"] < most
