"""Figures, whatever the environment says about matplotlib: a notebook's backend, no home, none."""

import os

import pytest

from tests.support.cli import DIGITS, run_program, tiny

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
def test_tools_draw(variables, trained, tmp_path, monkeypatch):
    picture = tmp_path / "figure.png"
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = ["-c", DRAW, str(trained.ckpt_dir), "--picture", str(picture)]
    done = run_program(*words, warm=False)
    assert done.returncode == 0, done.stderr
    assert "goodput" in done.stdout
    assert picture.stat().st_size > 1000


@pytest.fixture
def without_matplotlib(tmp_path, monkeypatch):
    package = tmp_path / "broken" / "matplotlib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it is broken')")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


@pytest.mark.long
@pytest.mark.usefixtures("without_matplotlib")
def test_tables_without_the_figure(trained, tmp_path):
    folder = tmp_path / "report"
    flags = ["--eval_only", "--eval_report", str(folder), "--resume", str(trained.ckpt_dir)]
    flags += ["--backend", "cuda", "--num_workers", "0", "--data_dir", str(DIGITS)]
    done = run_program("run_vit_training.py", *flags, warm=False)
    assert done.returncode == 0, done.stderr
    tables = ["confusion.csv", "errors.csv", "evaluation.html", "per_class.csv"]
    assert sorted(os.listdir(folder)) == tables
    for name in ("confusion.png", "reliability.png"):
        assert f"{name} cannot be drawn (it is broken)" in done.stdout


@pytest.mark.long
@pytest.mark.usefixtures("without_matplotlib")
def test_training_without_curves(tmp_path):
    run = tmp_path / "run"
    done = run_program("run_vit_training.py", *tiny(run), "--backend", "cuda", warm=False)
    assert done.returncode == 0, done.stderr
    assert "warning: curves.png cannot be written (it is broken)" in done.stdout
    assert (run / "step_6" / "manifest.json").exists()
