"""The loop over blocks: values, gradients, random masks."""

import json

import pytest

from tests.support.cli import run_program

POLICIES = ("full", "none")
"""Of ``--grad_ckpt``: all is computed again, and nothing."""


@pytest.fixture(scope="module")
def found():
    done = run_program("-m", "tests.fakes.scan_on_xla")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("policy", POLICIES)
def test_values_and_gradients(policy, found):
    found = found[policy]
    assert found["value"] < 1e-5
    assert found["gradient"] < 1e-5


@pytest.mark.parametrize(("kind", "kept"), [("dropout", 0.8**4), ("drop_path", 0.9 * 0.8 * 0.6)])
@pytest.mark.parametrize("policy", POLICIES)
def test_masks(policy, kind, kept, found):
    """Drawn anew in each round: else all blocks would keep the same places."""
    masks = found[policy][kind]
    assert masks["kept"] == pytest.approx(kept, abs=0.07)
    assert masks["masks_differ_back"] == 0.0
    assert masks["repeated"]
    assert not masks["other_seed_same"]
    assert masks["scale"] == pytest.approx(1 / kept, rel=1e-4)
    assert masks["eval_kept"] == 1.0
