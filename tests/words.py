"""Looks for words that are out in the help, messages and docstrings of the program (``make lint``).

``tests/words_that_are_out.txt`` is the one list. A string counts if it has a blank; names between
backquotes do not. Prints how many are left in which file; ``-v`` prints each. Exits with code 1 if
a file of ``CHECKED`` has one.
"""

from __future__ import annotations

import ast
import collections
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ("run_vit_training.py", "config_fields.py", "training", "models", "data")
PROGRAM += ("xla_fsdp", "torch_fsdp", "gpu_fsdp", "tools", "launch")
"""The whole program, by files and folders."""
CHECKED: tuple[str, ...] = (
    *("run_vit_training.py", "config_fields.py", "data/config.py", "models/config.py"),
    *("training/config.py", "training/flags.py", "training/resolve.py", "training/mesh.py"),
    *("training/backend.py", "training/step_sizes.py"),
    *("xla_fsdp/config.py", "torch_fsdp/config.py"),
)
"""What must have none of these words: PROGRAM, when all of it has been rewritten."""


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


def main(verbose: bool) -> int:
    out, left = words_out(), collections.Counter[str]()
    wrong = []
    listed = ["git", "ls-files", *(f"{part}/*.py" if "." not in part else part for part in PROGRAM)]
    for name in subprocess.run(listed, cwd=ROOT, stdout=-1, text=True, check=True).stdout.split():
        found = found_in(ROOT / name, out)
        left[name] = len(found)
        is_checked = any(name == part or name.startswith(f"{part}/") for part in CHECKED)
        wrong += found if is_checked else []
        if verbose or is_checked:
            print(*found, sep="\n", end="\n" if found else "")
    for name, number in sorted(left.items()):
        if number:
            print(f"{number:4} {name}")
    print(f"{left.total()} words that are out, {len(wrong)} of them where none may be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main("-v" in sys.argv))
