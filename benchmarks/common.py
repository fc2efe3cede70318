"""What the benchmarks share: measuring in processes of their own, and saying what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_python(*command: str) -> subprocess.CompletedProcess[str]:
    """A Python program in the project's folder, its output kept."""
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )


def last_json(stdout: str) -> dict[str, Any]:
    """The JSON line with which a measuring process ends."""
    return json.loads(stdout.splitlines()[-1])


def commit() -> str:
    """Short name of the commit that runs, with ``-dirty`` if files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git in the image
        return "unknown"
    return done.stdout.strip() or "unknown"
