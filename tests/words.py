"""Looks for words that are out in the help, messages and docstrings of the program (``make lint``).

``tests/words_that_are_out.txt`` is the one list. A string counts if it has a blank; names between
backquotes do not. Prints each and where it is; exits with code 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ("run_vit_training.py", "config_fields.py", "training", "models", "data")
PROGRAM += ("xla_fsdp", "torch_fsdp", "gpu_fsdp", "tools", "launch")
"""The whole program, by files and folders."""


def words_out() -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns of the list, each with the words to use."""
    lines = (ROOT / "tests/words_that_are_out.txt").read_text().splitlines()
    pairs = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [(re.compile(rf"\b(?:{out})(?!\w)", re.IGNORECASE), better) for out, better in pairs]


def found_in(path: Path, out: list[tuple[re.Pattern[str], str]]) -> list[str]:
    """Return a line for each word that is out in a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        text = " ".join(re.sub(r"``.*?``|`.*?`", "", node.value, flags=re.DOTALL).split())
        if " " not in text:
            continue
        for pattern, better in out:
            for match in pattern.finditer(text):
                around = text[max(0, match.start() - 30) : match.end() + 30]
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {around!r}: say {better}")
    return found


def main() -> int:
    out = words_out()
    listed = ["git", "ls-files", *(f"{part}/*.py" if "." not in part else part for part in PROGRAM)]
    names = subprocess.run(listed, cwd=ROOT, stdout=-1, text=True, check=True).stdout.split()
    found = [line for name in names for line in found_in(ROOT / name, out)]
    print(*found, f"{len(found)} words that are out", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
