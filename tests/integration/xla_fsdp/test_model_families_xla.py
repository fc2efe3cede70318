"""Models of timm's by name on XLA, scanned and not, beside the same on the CPU."""

import json

import pytest

from tests.support.cli import run_program


def run_on_xla(*families):
    done = run_program("-m", "tests.fakes.families_on_xla", *families)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def assert_near(found):
    assert found["scanned"] < 1e-5
    assert found["checkpointed"] < 1e-5
    # As far from fp32, on average, as under PyTorch's own autocast.
    assert 1e-3 < found["scanned, bf16"] < 2 * found["bf16 on the CPU"] < 0.1
    assert found.get("dropped patches", 0.0) < 1e-5
    assert found["flash"] == 3  # once in each block


@pytest.mark.long
def test_rotary_embedding():
    """Others in each block, which are learned."""
    assert_near(run_on_xla("RoPE, mixed")["RoPE, mixed"])


@pytest.mark.long
def test_other_families():
    for found in run_on_xla(
        "plain", "DINOv3", "AIMv2", "parallel MLP", "EVA02", "Perception Encoder"
    ).values():
        assert_near(found)
