"""A Python that cannot run a program says so in one line, from any folder, before any import."""

import ast
import os
import runpy
import subprocess
import sys

import pytest

import check_python
from tests.support.cli import ROOT

pytestmark = pytest.mark.fast

PROGRAMS = [
    "run_vit_training.py",
    *(f"launch/{name}.py" for name in ("xla_dist", "compute_engine", "gke", "slices")),
    *("data/pack.py", "data/digits.py"),
    *(
        f"tools/{name}.py"
        for name in ("convert", "goodput", "replay_step", "report", "show_augmentations")
    ),
]
WITHOUT_PACKAGES = ["-S", "-E", "-s"]


def run(folder, python, path, *words, **variables):
    """Run a program by its path from another folder; return its exit code and stderr."""
    done = subprocess.run(
        [sys.executable, *python, ROOT / path, *words],
        cwd=folder, env={"PATH": os.environ["PATH"], **variables}, text=True, capture_output=True,
    )  # fmt: skip
    assert not done.stdout
    return done.returncode, done.stderr


WITHOUT = ("launch/", "tools/goodput.py", "tools/report.py")
"""What a laptop may run that has Python alone."""


@pytest.mark.parametrize("path", [each for each in PROGRAMS if not each.startswith(WITHOUT)])
def test_without_packages(path, tmp_path):
    code, said = run(tmp_path, WITHOUT_PACKAGES, path, "--fake_data")
    (line,) = said.splitlines()
    assert code == 2
    assert f"{sys.executable} (Python " in line  # which environment it is
    assert "has no torch, torchvision, timm, " in line
    assert "use /" in line or f"install {ROOT}/requirements-tpu.txt" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", [each for each in PROGRAMS if each.startswith(WITHOUT)])
def test_launchers_need_no_packages(path, tmp_path):
    """On a laptop, or on a worker's own Python; by their path, as the example calls its script."""
    code, said = run(tmp_path, WITHOUT_PACKAGES, path)
    (line,) = said.splitlines()
    assert code == 2
    assert any(text in line for text in ("no command", "arguments are required", "give a RUN_DIR"))


def test_from_any_folder_with_packages(tmp_path):
    code, said = run(tmp_path, [], "tools/goodput.py", "missing")
    (line,) = said.splitlines()
    assert (code, line.partition(": ")[0]) == (2, "tools.goodput"), line
    assert "missing" in line


OLD = (
    "import runpy, sys; sys.version_info = (3, 8, 18); sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


@pytest.mark.parametrize("path", PROGRAMS)
def test_an_old_python(path, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", OLD, ROOT / path],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, text=True, capture_output=True,
    )  # fmt: skip
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "(Python 3.8.18) is too old: use " in line


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("check_python.py", (3, 7)),
        ("run_vit_training.py", (3, 7)),
        *((f, (3, 8)) for f in PROGRAMS[1:5]),
    ],
)
def test_an_old_python_reads_as_far_as_the_check(path, version):
    ast.parse((ROOT / path).read_text(), feature_version=version)


def test_one_process_of_a_node_says_it(tmp_path, monkeypatch, capsys):
    path = str(ROOT / "run_vit_training.py")
    monkeypatch.setattr(check_python.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(check_python.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(sys, "argv", [path])
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(path, run_name="__main__")
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_without_an_environment_the_line_names_the_requirements(monkeypatch, capsys):
    monkeypatch.setattr(check_python, "_ROOT", "/opt/vit-fsdp")
    with pytest.raises(SystemExit, match="2"):
        check_python.check("program", packages=("torch", "no_such_package"))
    said = capsys.readouterr().err
    assert "has no no_such_package: use Python 3.11 or 3.12 and install /opt/vit-fsdp/req" in said
    assert "requirements-gpu.txt for NVIDIA GPUs, requirements-torchtpu.txt for TorchTPU" in said
    check_python.check("program", packages=("torch",))
