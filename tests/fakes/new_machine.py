"""A new user's machine: a home with a fresh copy of this checkout, and nothing else of this one.

/tmp and /datasets are folders of that machine: where a command names them, these are put in.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.cli import HAS_XLA, ROOT, WARM_PYTHON, WARM_XLA, warm_python
from tests.support.documented_commands import Command
from tests.support.launching import script

LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv*", ".libtpu", "datasets", "runs", "__pycache__", ".*_cache", "*.pyc")
)


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home, self.project = folder / "home", folder / "home" / "vit-fsdp"
        self.tmp, self.datasets, self.bin = folder / "tmp", folder / "datasets", folder / "bin"
        for path in (self.home, self.tmp, self.datasets, self.bin):
            path.mkdir()
        shutil.copytree(ROOT, self.project, ignore=LEFT_OUT)
        self._link_installed_packages()
        self._warm_python()
        self.variables = {
            "WARM_PYTHON": warm_python(*(WARM_XLA if HAS_XLA else ())),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "CUDA_VISIBLE_DEVICES": "",
            "PATH": f"{self.bin}:{self.project}/.venv/bin:"
            "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            # Nothing is installed from here: all that pip is asked for must be there.
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def _link_installed_packages(self) -> None:
        """A .venv as ``make`` leaves it: removing it removes nothing that it holds."""
        own = self.project / ".venv"
        own.mkdir()
        for path in Path(sys.prefix).resolve().iterdir():
            (own / path.name).symlink_to(path)
        (own / "installed").unlink(missing_ok=True)
        (own / "installed").touch()

    def _warm_python(self) -> None:
        """Of the project's programs that need PyTorch, to import it once is enough."""
        self.stand_in(
            "python3",
            'case "$*" in run_vit_training.py\\ * | -m\\ tools.* | -m\\ data.* | -m\\ torch*)',
            f'  exec {sys.executable} {ROOT / WARM_PYTHON} "$@" ;;',
            "esac",
            f'exec {self.project}/.venv/bin/python3 "$@"',
        )

    def stand_in(self, name: str, *lines: str) -> None:
        """A program of this name, found before the real one."""
        script(self.bin / name, *lines)

    def run(self, command: Command, *, timeout: float = 900) -> subprocess.CompletedProcess[str]:
        """Type it, in the project's folder."""
        words = ["bash", "-c", command.script]
        process = subprocess.Popen(
            words,
            cwd=self.project,
            env=self.variables,
            text=True,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(command.typed, process.returncode, stdout, stderr)

    def with_its_folders(self, typed: str) -> str:
        return re.sub(r"(?<=\s)/(datasets|tmp)\b", rf"{self.folder}/\1", typed)

    def noted(self, command: Command, *programs: str) -> list[str]:
        """What the first of these programs is called with; none of them does anything.

        A ``python`` that is asked for the GPUs says 8.
        """
        note = shlex.quote(str(self.folder / "noted"))
        for program in programs:
            self.stand_in(
                program,
                "[[ $1 != -c ]] || { echo 8; exit; }",
                f"""[[ -e {note} ]] || printf '%s\\0' "$@" > {note}""",
            )
        done = self.run(command, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return (self.folder / "noted").read_text().split("\0")[:-1]
