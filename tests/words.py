"""Looks for words that are out in help, messages, docstrings and documents (``make lint``).

``tests/words_that_are_out.txt`` is the one list. A string of the program counts if it has a blank.
Names between backquotes, commands and links of the documents do not count. Prints each word and
where it is; exits with code 1 if there is one.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ("run_vit_training.py", "config_fields.py", "training", "models", "data")
PROGRAM += ("xla_fsdp", "torch_fsdp", "gpu_fsdp", "tools", "launch")
"""The whole program, by files and folders."""
DOCUMENTS = ("README.md", "docs/*.md")


def words_out() -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns of the list, each with the words to use."""
    lines = (ROOT / "tests/words_that_are_out.txt").read_text().splitlines()
    pairs = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [(re.compile(rf"\b(?:{out})(?!\w)", re.IGNORECASE), better) for out, better in pairs]


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each string of a program, or each paragraph of a document, with its line number."""
    source = path.read_text()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.lineno, node.value
        return
    not_prose = r"^```.*?^```|<!--.*?-->|\]\([^)]*\)"
    blanked = re.sub(not_prose, _only_newlines, source, flags=re.DOTALL | re.MULTILINE)
    line = 1
    for paragraph in blanked.split("\n\n"):
        yield line, paragraph
        line += paragraph.count("\n") + 2


def _only_newlines(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def found_in(path: Path, out: list[tuple[re.Pattern[str], str]]) -> list[str]:
    """Return a line for each word that is out in a file."""
    found = []
    for line, string in texts_of(path):
        text = " ".join(re.sub(r"``.*?``|`.*?`", "", string, flags=re.DOTALL).split())
        if " " not in text:
            continue
        for pattern, better in out:
            for match in pattern.finditer(text):
                around = text[max(0, match.start() - 30) : match.end() + 30]
                found.append(f"{path.relative_to(ROOT)}:{line}: {around!r}: say {better}")
    return found


def main() -> int:
    out = words_out()
    program = [f"{part}/*.py" if "." not in part else part for part in PROGRAM]
    listed = ["git", "ls-files", *program, *DOCUMENTS]
    names = subprocess.run(listed, cwd=ROOT, stdout=-1, text=True, check=True).stdout.split()
    found = [line for name in names for line in found_in(ROOT / name, out)]
    print(*found, f"{len(found)} words that are out", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
