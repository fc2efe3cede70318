"""The benchmarks still measure: one short run of each form. What they measure is for docs/."""

import pytest

from tests.cli import TINY_MODEL, run_program


@pytest.mark.long
def test_xla_step():
    forms = ["spmd", "unrolled", "wrapper", "nested"]
    done = run_program(
        *"benchmarks/xla_step.py --devices 1 --steps 1 --repeats 1 --forms".split(),
        *forms,
        *TINY_MODEL,
        "--batch_size",
        "4",
        "--model",
        "vit_tiny_patch16_224",
        warm=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[-len(forms) :]]
    assert [row[0] for row in rows] == forms
    for _, _, seconds, _, trace, compiling, executions, compilations in rows:
        assert 0 < float(trace) < float(seconds)
        assert float(compiling) > 0
        assert (executions, compilations) == ("1", "0")
