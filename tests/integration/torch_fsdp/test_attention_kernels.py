"""--attention on TorchTPU: the kernels in graphs of PyTorch's; tests/integration/xla_fsdp tests the
kernels themselves."""

import json

import pytest

from tests.support.cli import run_program


@pytest.mark.long
def test_values():
    """Outputs and gradients of whole blocks, with rotary positions and with several images per
    sequence. A recomputation calls the forward kernel once more, but not a selective one."""
    done = run_program("-m", "tests.fakes.kernels_in_torch")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6
    for case, by_way in found.items():
        assert max(way["error"] for way in by_way.values()) < 1e-6, case
        calls = {name: way["calls"] for name, way in by_way.items()}
        once, again = ("eager", "selective", "traced"), ("recomputed", "compiled")
        expected = dict.fromkeys(once, 2) | dict.fromkeys(again, 3)
        assert calls == (dict.fromkeys(expected, 0) if case == "plain" else expected), case
