"""A new user's machine: a home with a fresh copy of this checkout, and nothing else of this one.

Where a command names absolute paths, it runs in a mount namespace of its own, in which /tmp and
/datasets are folders of that machine.
"""

import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.cli import ROOT
from tests.documented_commands import Command
from tests.launch.test_launch_gpu import script

LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv*", ".libtpu", "datasets", "runs", "__pycache__", ".*_cache", "*.pyc")
)
# In the new root everything is what it was, but for /tmp and /datasets; of the old /tmp the
# folders are there that a run needs: $@ up to --.
PRIVATE_ROOT = """
set -e
root=$1 tmp=$2 datasets=$3
shift 3
mount -t tmpfs none "$root"
for path in /*; do
    if [[ $path == /tmp || $path == /datasets ]]; then continue
    elif [[ -L $path ]]; then cp -P "$path" "$root$path"
    elif [[ -d $path ]]; then mkdir "$root$path" && mount --rbind "$path" "$root$path"
    fi
done
mkdir "$root/tmp" "$root/datasets"
mount --bind "$tmp" "$root/tmp"
mount --bind "$datasets" "$root/datasets"
while [[ $1 != -- ]]; do
    mkdir -p "$root$1" && mount --rbind "$1" "$root$1"
    shift
done
shift
exec chroot "$root" env -C "$PWD" "$@"
"""


@functools.cache
def own_mounts() -> tuple[list[str], str]:
    """The command that begins a mount namespace, and why there is none (empty: there is one)."""
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    try:
        tried = subprocess.run(
            [*unshare, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return [], "no unshare (util-linux) is installed here"
    reason = (tried.stderr.strip() or "unshare failed") if tried.returncode else ""
    return unshare, reason and f"no mount namespace can be had here: {reason}"


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home, self.project = folder / "home", folder / "home" / "vit-fsdp"
        self.tmp, self.datasets, self.bin = folder / "tmp", folder / "datasets", folder / "bin"
        for path in (self.home, self.tmp, self.datasets, self.bin, folder / "root"):
            path.mkdir()
        shutil.copytree(ROOT, self.project, ignore=LEFT_OUT)
        self._link_installed_packages()
        self.variables = {
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

    def stand_in(self, name: str, *lines: str) -> None:
        """A program of this name, found before the real one."""
        script(self.bin / name, *lines)

    def run(
        self, command: Command, *, private: bool = False, timeout: float = 900
    ) -> subprocess.CompletedProcess[str]:
        """Type it, in the project's folder; ``private``: where /tmp and /datasets are its own."""
        words = ["bash", "-c", command.script]
        if private:
            unshare, problem = own_mounts()
            assert not problem
            needed = [self.folder, *(Path(p).resolve() for p in (sys.prefix, sys.base_prefix))]
            folders = map(str, (self.folder / "root", self.tmp, self.datasets, *needed))
            words = [*unshare, "bash", "-c", PRIVATE_ROOT, "bash", *folders, "--", *words]
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
