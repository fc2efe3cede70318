"""By the TPU compiler: with ring attention no device ever has all tokens of an image."""

import json

import pytest

from tests.support.cli import run_program

# No other size is a multiple of 2,048, nor is one of a device's 512 tokens of three images.
TOKENS, HEADS = 32 * 64, 4
SMALL = (
    "--tpu_topology v5e:2x2 --precision bf16 --mesh_domain 4 --image_size 256 512 --patch_size 8 "
    f"--embed_dim 256 --num_heads {HEADS} --num_blocks 1 --num_classes 10 --batch_size 3"
).split()


def found_on_a_device(*flags):
    """Types with a dimension of all tokens in the compiled step, with what makes them."""
    done = run_program("-m", "tests.fakes.compiled_domain", str(TOKENS), *SMALL, *flags)
    assert done.returncode == 0, done.stderr
    (graph,) = json.loads(done.stdout.splitlines()[-1])
    return graph


@pytest.mark.long
@pytest.mark.parametrize("model", ["hybrid_vit", "vit_10b"])
def test_ring(model):
    assert found_on_a_device("--model", model, "--domain_attention", "ring") == []
