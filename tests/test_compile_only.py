"""--compile_only with the real TPU compiler, against figures worked out by hand."""

import json
import math

import pytest

from tests.cli import run_program

# Of a width for which the TPU's tiles of 8 x 128 pad next to nothing.
WIDTH, DEPTH, BATCH, SIDE, PATCH, CLASSES = 512, 4, 64, 128, 16, 128
TOKENS = (SIDE // PATCH) ** 2
MODEL = (
    f"--embed_dim {WIDTH} --num_blocks {DEPTH} --num_heads 4 --image_size {SIDE} "
    f"--patch_size {PATCH} --num_classes {CLASSES} --batch_size {BATCH}"
).split()


def compile_for(topology, *flags):
    where = f"run_vit_training.py --compile_only --json --tpu_topology {topology}".split()
    done = run_program(*where, *MODEL, *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def parameter_sizes():
    block = [3 * WIDTH**2, 3 * WIDTH, WIDTH**2, WIDTH, 4 * WIDTH**2, 4 * WIDTH, 4 * WIDTH**2, WIDTH,
             WIDTH, WIDTH, WIDTH, WIDTH]  # fmt: skip
    rest = [3 * PATCH**2 * WIDTH, WIDTH, TOKENS * WIDTH, WIDTH, WIDTH, CLASSES * WIDTH, CLASSES]
    return block * DEPTH + rest


def step_flops():
    """Forward, backward and, but for the last product of a block, forward again."""
    mlp_out = 2 * BATCH * TOKENS * 4 * WIDTH**2
    block = 2 * BATCH * (TOKENS * 12 * WIDTH**2 + 2 * TOKENS**2 * WIDTH)
    patch = 2 * BATCH * TOKENS * 3 * PATCH**2 * WIDTH
    head = 2 * BATCH * WIDTH * CLASSES
    return DEPTH * (4 * block - mlp_out) + 2 * patch + 3 * head


@pytest.fixture(scope="module")
def v5e():
    return compile_for("v5e:2x2", "--precision", "bf16")


@pytest.fixture(scope="module")
def v5p():
    return compile_for("v5p:2x2x1")


@pytest.mark.parametrize(("name", "chips"), [("v5e", 4), ("v5p", 4)])
def test_figures(name, chips, request):
    found = request.getfixturevalue(name)
    parameters = sum(parameter_sizes())
    assert found["parameters"] == parameters
    assert found["chips"] == found["devices"] == chips
    images = BATCH * 3 * SIDE**2 * 4
    expected = (12 * parameters + images) / chips  # fp32 values, AdamW's two, all of it cut
    assert found["argument_bytes"] == pytest.approx(expected, rel=0.02)
    assert found["state_bytes"] == pytest.approx(12 * parameters / chips, rel=0.02)
    assert found["flops_per_chip"] == pytest.approx(step_flops() / chips, rel=0.05)
    assert found["fits"]
    assert found["state_bytes"] < found["peak_hbm_bytes"] < found["hbm_capacity_bytes"]
    assert 0 < found["roofline_mfu"] < 1
    assert found["roofline_step_s"] == max(
        found["compute_s"], found["hbm_s"], found["collective_s"]
    )


def test_weights_are_gathered_twice_in_bf16(v5e):
    """Forward and again for the backward pass, each time what a device does not hold."""
    weights = DEPTH * 12 * WIDTH**2
    assert v5e["collective_bytes"]["all-gather"] == pytest.approx(2 * weights * 2 * 3 / 4, rel=0.25)
    assert v5e["collectives"]["all-gather"] >= 2 * 4 * DEPTH


def test_mesh_of_two_axes():
    """Each block's weights are cut over all 4 chips, the batch over 2."""
    found = compile_for("v5e:2x2", "--precision", "bf16", "--mesh_tensor", "2")
    assert "mesh fsdp 2 x tensor 2" in found["sharding"]
    parameters = sum(parameter_sizes())
    images = BATCH * 3 * SIDE**2 * 4
    assert found["argument_bytes"] == pytest.approx(12 * parameters / 4 + images / 2, rel=0.03)
    assert found["state_bytes"] == pytest.approx(12 * parameters / 4, rel=0.02)
    # Forward and back, over fsdp alone: what tensor cuts stays cut.
    weights = DEPTH * 12 * WIDTH**2
    assert found["collective_bytes"]["all-gather"] >= 2 * weights / 2 * 2 / 2


def test_too_large_is_told(tmp_path):
    found = compile_for(
        "v5e:2x2", "--model", "vit_10b", "--embed_dim", "8192", "--num_blocks", "16"
    )
    assert not found["fits"]
    state = 12 * found["parameters"] / 4
    assert found["peak_hbm_bytes"] > state > found["hbm_capacity_bytes"]
    assert found["hbm_capacity_bytes"] == math.floor(15.75 * 2**30)
