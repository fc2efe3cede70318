"""--expect: what --compile_only expects of a run's steps beside what they take."""

import json
from dataclasses import asdict

import pytest

from tests.support.cli import TINY_MODEL, TINY_RUN, run_program, tiny, train_tiny, train_tiny_gpu
from tests.support.resolved import on_xla
from tests.support.usage_error import told_in_one_line
from training.mesh import Mesh


@pytest.fixture
def expected(tmp_path):
    """What the command writes for the steps of train_tiny, as far as it is read."""
    content = {
        "batch_size": 16,
        "precision": "fp32",
        "mesh": asdict(Mesh()),
        "parameters": on_xla(TINY_MODEL).model.parameter_count,
        "input_shape": [3, 16, 16],
        "expected_step_s": 0.0125,
    }
    (tmp_path / "expected.json").write_text(json.dumps(content))
    return content


@pytest.mark.long
def test_measured_beside_what_the_command_expects(tmp_path):
    command = "run_vit_training.py --compile_only --json --tpu_topology v5e:1x1".split()
    done = run_program(*command, *TINY_MODEL, *TINY_RUN, "--attention", "sdpa")
    assert done.returncode == 0, done.stderr
    (tmp_path / "expected.json").write_text(done.stdout)
    assert_compared(train_tiny, tmp_path, json.loads(done.stdout)["expected_step_s"])


def test_measured_beside_expected(expected, tmp_path):
    assert_compared(train_tiny_gpu, tmp_path, expected["expected_step_s"])


def assert_compared(train, tmp_path, seconds):
    """In the three log lines after the first, which has no pace, in the metrics and in run.json."""
    run = train(tmp_path / "run", "--expect", str(tmp_path / "expected.json"))
    compared = {n: r for n, r in run.steps.items() if "expected_sec_per_iter" in r}
    assert sorted(compared) == [2, 3, 4]
    assert {record["expected_sec_per_iter"] for record in compared.values()} == {seconds}
    assert run.stdout.count(f"expected: {seconds:.4f} (") == 3
    measured = compared[4]["sec_per_iter"]
    assert run.run_file["step_s"] == {"expected": seconds, "measured": measured}
    assert f"expected: {seconds:.4f} ({measured / seconds:.2f}x)" in run.stdout


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"batch_size": 32}, "is for another run: batch_size is 32 there, 16 here"),
        ({"expected_step_s": None}, "is for a step that does not fit"),
        ({"expected_step_s": "1"}, "is not the output of --compile_only --json"),
        (None, "cannot be read: No such file"),
    ],
)
def test_an_expectation_of_something_else_is_refused(change, line, expected, tmp_path, capsys):
    path = tmp_path / "other.json"
    if change:
        path.write_text(json.dumps(expected | change))
    assert line in told_in_one_line(capsys, *tiny(tmp_path / "ckpt"), "--expect", path)
