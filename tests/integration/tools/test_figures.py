"""Figures, whatever the environment says about matplotlib: a notebook's backend, no home, none."""

import os
import subprocess
import sys

import pytest

from tests.support.cli import DIGITS, ROOT, command_of, environment, tiny

HOMELESS = dict.fromkeys("MPLCONFIGDIR HOME XDG_CACHE_HOME XDG_CONFIG_HOME".split(), "/proc/none")
IMPORTS = "report show_augmentations convert plan.plans goodput".split()
DRAW = f"""
import importlib, sys
for name in {IMPORTS}:
    tool = importlib.import_module(f"tools.{{name}}")
sys.exit(tool.main())
"""


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"MPLBACKEND": "module://matplotlib_inline.backend_inline"}, id="module"),
        pytest.param({"MPLBACKEND": "nonsense"}, id="nonsense", marks=pytest.mark.long),
        pytest.param(HOMELESS, id="homeless", marks=pytest.mark.long),
    ],
)
def test_tools_draw(variables, trained, tmp_path):
    picture = tmp_path / "figure.png"
    words = [sys.executable, "-c", DRAW, str(trained.ckpt_dir), "--picture", str(picture)]
    done = subprocess.run(
        words, cwd=ROOT, env=environment() | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "goodput" in done.stdout
    assert picture.stat().st_size > 1000


@pytest.fixture
def without_matplotlib(tmp_path):
    package = tmp_path / "broken" / "matplotlib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it is broken')")
    return {"PYTHONPATH": str(package.parent)}


@pytest.mark.long
def test_tables_without_the_figure(trained, without_matplotlib, tmp_path):
    folder = tmp_path / "report"
    flags = ["--eval_only", "--eval_report", str(folder), "--resume", str(trained.ckpt_dir)]
    words, variables = command_of(
        *("run_vit_training.py", "--backend", "cuda", "--num_workers", "0"),
        *("--data_dir", str(DIGITS), *flags),
        warm=False,
    )
    variables |= without_matplotlib
    done = subprocess.run(
        words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(folder)) == ["confusion.csv", "per_class.csv"]
    assert "confusion.png cannot be drawn (it is broken)" in done.stdout


@pytest.mark.long
def test_training_without_curves(without_matplotlib, tmp_path):
    run = tmp_path / "run"
    words, variables = command_of(
        "run_vit_training.py", *tiny(run), "--backend", "cuda", warm=False
    )
    variables |= without_matplotlib
    done = subprocess.run(
        words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "warning: curves.png cannot be written (it is broken)" in done.stdout
    assert (run / "step_6" / "manifest.json").exists()
