"""The parts that benchmarks by the TPU compiler share: its reports, and flags of their tables."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, run_python
from config_fields import local_path
from tools.compile_only.command import DOES_NOT_FIT

CODE_THAT_IS_COMPILED = (
    "run_vit_training.py config_fields.py training models data xla_fsdp requirements-tpu.txt"
).split()


def report_of(name: str, *command: str) -> dict[str, Any] | None:
    """Return what ``run_vit_training.py --compile_only --json`` says with the flags of ``command``.

    None if libtpu crashes; any other failure ends the benchmark with ``name`` and its words.
    """
    done = run_python("run_vit_training.py", "--compile_only", "--json", *command)
    if "error: libtpu crashed" in done.stderr:
        return None
    if done.returncode not in (0, DOES_NOT_FIT):
        sys.exit(f"{name}:\n{done.stderr}")
    return json.loads(done.stdout)


def kept_report(path: Path, *command: str) -> dict[str, Any] | None:
    """Return the same, kept in the file and taken from there another time."""
    if not path.exists():
        path.write_text(json.dumps(report_of(path.stem, *command)))
    return json.loads(path.read_text())


def add_choices(
    parser: argparse.ArgumentParser, flag: str, choices: Sequence[str], between: str = ", "
) -> None:
    """Let ``flag`` take some of the choices; all of them are the default."""
    parser.add_argument(
        flag,
        nargs="+",
        choices=choices,
        default=choices,
        metavar=flag.removeprefix("--").removesuffix("s").upper(),
        help=f"of {between.join(choices)}; default: all",
    )


def add_document(parser: argparse.ArgumentParser, name: str) -> None:
    """Let ``--document`` name the file that a table goes into, by default one of docs/."""
    parser.add_argument(
        "--document",
        type=local_path,
        default=ROOT / "docs" / name,
        help=f"file with the markers; default: docs/{name}",
    )
