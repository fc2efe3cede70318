"""``--extension``: the example of docs/extending.md, typed, on both backends."""

import json
import re
import sys

import pytest

from tests.support.cli import HAS_XLA, ROOT, tiny, train_tiny, train_tiny_gpu
from tests.support.usage_error import told_in_one_line

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def rotation(tmp_path):
    """The example in a file; its module is forgotten afterwards."""
    (tmp_path / "rotation.py").write_text(EXAMPLE)
    yield ["--extension", str(tmp_path / "rotation.py")]
    sys.modules.pop("rotation", None)


def objective(rotation):
    return [*rotation, "--objective", "rotation"]


def test_the_example_is_short():
    assert len(EXAMPLE.splitlines()) <= 80


def test_losses_are_equal_on_both_backends_and_after_a_resume(rotation, tmp_path):
    """Stopped after three steps, and continued on another number of processes."""
    flags = [*objective(rotation), "--num_workers", "1"]
    whole = train_tiny_gpu(tmp_path / "whole", *flags)
    losses = whole.column("loss")
    assert len(set(losses)) > 3
    recorded = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert re.search(r"rotation\.py@sha256:[0-9a-f]{16}$", recorded["arguments"]["extension"][0])
    train_tiny_gpu(tmp_path / "parts", *flags, "--max_steps", "3")
    parts = train_tiny_gpu(tmp_path / "parts", *flags, processes=2)
    assert parts.column("loss") == pytest.approx(losses, rel=1e-5)
    if HAS_XLA:
        on_xla = train_tiny(tmp_path / "xla", *flags, devices=2)
        assert on_xla.column("loss") == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--objective", "rotation", "--vflip", "0.5"], "--vflip 0.5 (two flips are a rotation)"),
        (["--objective", "mae", "--turns", "3"], "--turns 3 requires --objective rotation"),
        (["--objective", "rotation", "--turns", "5"], "5 must be at least 2 and at most 4"),
    ],
)
def test_its_flags_are_checked(flags, told, rotation, tmp_path, capsys):
    given = [*tiny(tmp_path), *rotation, *flags, "--ckpt_dir", str(tmp_path / "run")]
    assert told in told_in_one_line(capsys, *given)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("absent.py", None, "no such file"),
        ("a-b.py", "", "must be an identifier"),
        ("json.py", "", "a module json exists already: rename the file"),
        ("empty.py", "", "defines no subclass of training.feature.Feature"),
        ("no.such.module", None, "no such module"),
    ],
)
def test_what_is_no_extension(name, content, told, tmp_path, capsys):
    path = tmp_path / name if name.endswith(".py") else name
    if content is not None:
        path.write_text(content)
    assert told in told_in_one_line(capsys, "--fake_data", "--extension", str(path))


def test_another_content_than_the_checksums(rotation, capsys):
    name, path = rotation
    line = told_in_one_line(capsys, "--fake_data", name, f"{path}@sha256:0123456789abcdef")
    assert "its checksum is sha256:" in line


def test_a_checkpoint_loads_no_extension(rotation, tmp_path, capsys):
    train_tiny_gpu(tmp_path / "run", *objective(rotation), "--max_steps", "2")
    (tmp_path / "rotation.py").write_text("raise SystemExit('loaded')")
    resumed = ["--resume", str(tmp_path / "run" / "step_2"), "--ckpt_dir", str(tmp_path / "new")]
    assert "pass the --extension that adds it" in told_in_one_line(
        capsys, "--backend", "cuda", *resumed, "--data_dir", str(tmp_path)
    )
