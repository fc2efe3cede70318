"""The Makefile, before it installs anything: which Python makes the environments."""

import shutil
import subprocess

import pytest

from tests.support.cli import ROOT
from tests.support.launching import script

MAKE = shutil.which("make")
LINE = (
    "Python 3.11 or 3.12 is required (tried: {}): run make PYTHON=<one>, or first: python3 -m pip "
    "install --target .uv uv && .uv/bin/uv venv --seed --python 3.11 .venv"
)


@pytest.fixture
def make(tmp_path):
    """Run make install in a new folder on a machine with these Pythons: "3.12", or "3.12?" for a
    name that a version manager has put on PATH for no version. Each venv notes what made it."""

    def run(*versions, words=()):
        (tmp_path / "bin").mkdir()
        for name in ("sh", "bash", "mkdir", "test"):
            (tmp_path / "bin" / name).symlink_to(shutil.which(name))
        for version in versions:
            number = version.rstrip("?")
            script(
                tmp_path / "bin" / f"python{number}",
                "exit 127" if version != number else "",
                f'case "$1 $2" in "-m venv") mkdir -p $3/bin; echo {number} > $3/made_by;;'
                f" -c*) [ {number} = 3.11 -o {number} = 3.12 ];; -V*) exit 0;; *) exit 3;; esac",
            )
        return subprocess.run(
            [MAKE, "-f", ROOT / "Makefile", ".venv/installed", *words],
            cwd=tmp_path,
            env={"PATH": str(tmp_path / "bin")},
            text=True,
            capture_output=True,
            check=False,
        )

    for name in (
        "requirements-tpu.txt",
        "requirements-common.txt",
        "requirements-imaging.txt",
        "tests/requirements.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return run


@pytest.mark.parametrize(
    ("versions", "words", "used"),
    [
        (["3.11", "3.12", "3.13"], [], "3.11"),
        (["3.11?", "3.12"], [], "3.12"),
        (["3.11", "3.12"], ["PYTHON=python3.12"], "3.12"),
    ],
)
def test_first_that_fits(versions, words, used, make, tmp_path):
    make(*versions, words=words)
    assert (tmp_path / ".venv" / "made_by").read_text().strip() == used


@pytest.mark.parametrize(
    ("versions", "words", "named"),
    [
        (["3.10", "3.13"], [], "python3.11 python3.12"),
        (["3.11", "3.13"], ["PYTHON=python3.13"], "python3.13"),
    ],
)
def test_none_that_fits(versions, words, named, make, tmp_path):
    done = make(*versions, words=words)
    assert done.returncode == 2
    assert done.stdout.splitlines() == [LINE.format(named)]
    assert not (tmp_path / ".venv").exists()


def test_an_environment_that_is_there_is_used(make, tmp_path):
    """Also without a Python beside it: uv has made it."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    script(tmp_path / ".venv" / "bin" / "python", 'echo "$@" >> asked')
    make()
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.startswith("-m pip install ")
