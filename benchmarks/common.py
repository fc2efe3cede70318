"""The parts that benchmarks share: processes to measure in, and what names a measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_python(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in the project's folder; keep its output."""
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )


def last_json(stdout: str) -> dict[str, Any]:
    """Return the JSON line with which a measuring process ends."""
    return json.loads(stdout.splitlines()[-1])


def commit(*paths: str) -> str:
    """Return the last commit (of these paths) by its short name, ``-dirty`` if files differ."""

    def git(*words: str) -> str:
        command = ["git", *words, "--", *paths]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    try:
        name = git("log", "-1", "--format=%h")
        return (
            name + ("-dirty" if name and git("status", "--porcelain", "-uno") else "") or "unknown"
        )
    except FileNotFoundError:  # no git in the image
        return "unknown"
