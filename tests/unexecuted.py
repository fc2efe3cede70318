"""``python -m tests.unexecuted DOCUMENT``: list lines that no test executes, by function.

Reads what ``make coverage`` has collected. DOCUMENT names such functions, each with its reason, as
``path::function``. Exit code 1: one is not named there, or one is that has no such line.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage

FOLDERS = ("xla_fsdp", "training", "data", "launch", "torch_fsdp", "gpu_fsdp", "models", "tools")


def main(document: str) -> int:
    measured = coverage.Coverage()
    measured.combine()
    measured.load()
    left: dict[str, list[int]] = {}
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for path in [Path("run_vit_training.py"), *files()]:
        _, statements, _, missing, _ = measured.analysis2(str(path.resolve()))
        for name in (path.parts[0], "all"):
            totals[name][0] += len(statements)
            totals[name][1] += len(missing)
        for line, function in zip(missing, functions_of(path, missing), strict=True):
            left.setdefault(f"{path}::{function}", []).append(line)
    for name, lines in left.items():
        print(f"{name}: {', '.join(map(str, lines))}")
    print()
    for name, (statements_of, missing_of) in totals.items():
        share = 100 * (1 - missing_of / max(1, statements_of))
        print(f"{name:22}{statements_of:6} lines, {missing_of:5} not executed, {share:.1f} %")
    told = set(re.findall(r"`([\w/]+\.py::[\w.<>]+)`", Path(document).read_text()))
    for name in sorted(set(left) - told):
        print(f"not named in {document}: {name}")
    for name in sorted(told - set(left)):
        print(f"named in {document}, but executed: {name}")
    return int(told != set(left))


def files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted(Path(folder).rglob("*.py"))


def functions_of(path: Path, lines: list[int]) -> list[str]:
    """The innermost function or class that each line is in; "module" outside of all."""
    spans: list[tuple[int, int, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}" if prefix else child.name
                spans.append((child.lineno, child.end_lineno or child.lineno, name))
            visit(child, name)

    visit(ast.parse(path.read_text()), "")
    inside = [[s for s in spans if s[0] <= line <= s[1]] for line in lines]
    return [min(found, key=lambda s: s[1] - s[0])[2] if found else "module" for found in inside]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
