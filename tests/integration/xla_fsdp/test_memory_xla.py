"""Device memory on a TPU: told where it can be had; asking for it never ends a run."""

import json

import pytest

from tests.support.cli import run_program

STAND_IN = """
import os, time
class tpumonitoring:
    def get_metric(name):
        {behaviour}
        values = {{"hbm_capacity_usage": ["1000", "3000"], "hbm_capacity_total": ["16000"] * 2}}
        return type("Metric", (), {{"data": lambda self: values[name]}})()
"""


def told(folder, behaviour, asked):
    package = folder / "libtpu"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sdk.py").write_text(STAND_IN.format(behaviour=behaviour))
    done = run_program("tests/fakes/memory_on_spmd.py", str(folder), str(asked))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_told_by_libtpu_under_spmd(tmp_path):
    """torch_xla raises there (2.9: torch_xla/core/xla_model.py, line 1525); nested, it tells."""
    found, _ = told(tmp_path, "pass", asked=300)
    assert "MemoryInfo not supported for SPMD virtual device" in found["raised"]
    assert found["told"][0] == {}  # nothing waits for the first answer
    assert found["told"][-1] == {"used": 3000, "limit": 16000}  # of the fullest device
    assert found["by_torch_xla"] == {"used": 5, "peak": 7, "limit": 9}


@pytest.mark.parametrize(
    "behaviour",
    [
        "os.abort()",
        "time.sleep(1000)",
        "return type('Empty', (), {'data': lambda self: []})()",
        "return type('Uneven', (), {'data': lambda self: ['1'] * name.count('s')})()",
    ],
)
def test_nothing_told_harms_nothing(behaviour, tmp_path):
    found, complaints = told(tmp_path, behaviour, asked=10)
    assert found["told"] == [{}] * 10
    assert "Traceback" not in complaints
