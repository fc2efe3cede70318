"""The parts that benchmarks share: measuring processes, failures, commits, tables and memory."""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from config_fields import local_path

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Measured = TypeVar("Measured", bound="DataclassInstance")

ROOT = Path(__file__).resolve().parent.parent
_OUT_OF_MEMORY = re.compile(
    "OutOfMemoryError|out of memory|MemoryError|STATUS_ALLOC_FAILED|can't allocate|bad_alloc"
    "|RESOURCE_EXHAUSTED|SIGKILL"
)
_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?([\w.]*(?:Error|Exception)\b.*)", re.MULTILINE)


def run_python(
    *command: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python program in the project's folder, with these variables too; keep its output."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )


def failure_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return "OOM" for a process that ran out of memory, for any other failure its last error.

    The system kills with SIGKILL what takes all of its memory; torchrun tells so of its children,
    and ends with an error of its own, ChildFailedError, which says nothing of theirs.
    """
    output = done.stdout + done.stderr
    if done.returncode == -signal.SIGKILL or _OUT_OF_MEMORY.search(output):
        return "OOM"
    errors = [error for error in _ERROR.findall(output) if "ChildFailedError" not in error]
    return errors[-1] if errors else f"exit code {done.returncode}"


def last_json(stdout: str) -> dict[str, Any]:
    """Return the JSON line with which a measuring process ends."""
    return json.loads(stdout.splitlines()[-1])


def commit(*paths: str, at: Path = ROOT) -> str:
    """Return the last commit (of these paths) by its short name, ``-dirty`` if files differ."""

    def git(*words: str) -> str:
        command = ["git", *words, "--", *paths]
        done = subprocess.run(command, cwd=at, capture_output=True, encoding="utf-8", check=False)
        return done.stdout.strip()

    try:
        name = git("log", "-1", "--format=%h")
        return (
            name + ("-dirty" if name and git("status", "--porcelain", "-uno") else "") or "unknown"
        )
    except FileNotFoundError:  # no git in the image
        return "unknown"


def markdown(rows: list[list[str]]) -> list[str]:
    """Return the lines of a table, the first of ``rows`` its head."""
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return ["| " + " | ".join(row) + " |" for row in rows]


def options_of_runs(description: str, epochs: int) -> argparse.Namespace:
    """Return the options of a benchmark that trains with several seeds: ``seeds``, ``epochs``, by
    default so many, and ``json``, a file or None."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default: 3)")
    parser.add_argument(
        "--epochs", type=int, default=epochs, help=f"epochs of each run (default: {epochs})"
    )
    parser.add_argument(
        "--json", type=local_path, metavar="FILE", help="write all figures to this JSON file"
    )
    options = parser.parse_args()
    if min(options.seeds, options.epochs) < 1:
        parser.error("--seeds and --epochs must be 1 or more")
    return options


def measure_runs(
    measure: Callable[[str, int], Measured],
    ways: Iterable[str],
    options: argparse.Namespace,
    about: Mapping[str, Any],
) -> list[Measured]:
    """Return what ``measure`` returns for each way and seed, dataclasses; after each run, write
    all to ``--json``, with what else it is ``about``."""
    runs: list[Measured] = []
    plan = [(way, seed) for seed in range(options.seeds) for way in ways]
    for way, seed in tqdm(plan, dynamic_ncols=True):
        runs.append(measure(way, seed))
        if options.json:
            figures = {**about, "runs": [asdict(run) for run in runs]}
            options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return runs


def mean_and_range(values: Sequence[float]) -> str:
    """Return the mean, the minimum and the maximum in one cell of a table."""
    return f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def own_memory(name: str) -> int:
    """Return a figure of /proc about this process, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(name)
