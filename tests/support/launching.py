"""Start launch scripts, and read what their runs leave."""

import json
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.cli import ROOT, WARM_PYTHON, environment, warm_python

KILL_ONE = """
import os, signal, threading, time

def kill():
    while not os.path.exists(os.environ["KILL_WHEN"]):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

counts = "TORCHELASTIC_RESTART_COUNT", "RUN_ATTEMPT"
first = all(os.environ.get(name, "0") == "0" for name in counts)
if os.environ.get("RANK") == "1" and first:
    threading.Thread(target=kill, daemon=True).start()
if "RANK" in os.environ:
    with open(os.environ["NOTES"], "a") as notes:
        print(os.environ["RANK"], os.environ["RUN_JOB_ID"], file=notes)
"""
TORCHRUN = ROOT / "launch" / "torchrun.sh"


def start(*command: object, cwd: Path = ROOT, **variables: str) -> subprocess.Popen[str]:
    """A launch script, with nothing of this shell's torchrun or Slurm, and without a GPU."""
    kept = {k: v for k, v in environment().items() if not k.startswith(("SLURM_", "SBATCH_"))}
    for name in (
        "NNODES NODE_RANK NPROC_PER_NODE MASTER_ADDR MASTER_PORT RDZV_ID JOIN_TIMEOUT MAX_RESTARTS "
        "STEP_TIMEOUT_S RUN_JOB_ID RUN_ATTEMPT"
    ).split():
        kept.pop(name, None)
    python = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [str(word) for word in command], cwd=cwd, env=kept | python | variables, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def warm(folder: Path) -> dict[str, str]:
    """By these variables a launch script's Python, torchrun that is, has imported PyTorch already.

    Not where it is killed: its process is another one than the script's.
    """
    python = script(folder / "warm_python", f'exec {sys.executable} {ROOT / WARM_PYTHON} "$@"')
    return {"PYTHON": str(python), "WARM_PYTHON": warm_python()}


def finish(process: subprocess.Popen[str], timeout: float = 240) -> tuple[int, str, str]:
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, stdout, stderr


def succeed(process: subprocess.Popen[str]) -> str:
    code, stdout, stderr = finish(process)
    assert code == 0, stdout + stderr
    return stdout


def refused(process: subprocess.Popen[str]) -> str:
    """The one line of a launcher that ends with 2, at once."""
    code, stdout, stderr = finish(process)
    assert (code, stdout) == (2, ""), stderr
    (line,) = stderr.splitlines()
    assert ": error: " in line
    return line


def losses(ckpt_dir: Path) -> list[float]:
    records = [json.loads(line) for line in (ckpt_dir / "metrics.jsonl").open()]
    return [record["loss"] for record in records if "loss" in record]


def devices(ckpt_dir: Path) -> int:
    return json.loads((ckpt_dir / "run.json").read_text())["devices"]


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return str(listener.getsockname()[1])


def script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(("#!/usr/bin/env bash", *lines, "")))
    path.chmod(0o755)
    return path


def pins(name: str) -> dict[str, str]:
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        word = line.split("#")[0].strip()
        if word.startswith("-r "):
            found |= pins(word.removeprefix("-r "))
        elif word:
            package, found[package] = word.split("==")
    return found
