"""Results of the tries, the table of docs/reliability.md, and its picture."""

import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import markdown, write_between
from tests.faults.program import SAVE_INTERVAL, SETUPS, STEPS
from tests.faults.tries import Fault
from training.logs.figures import pyplot, save_figure
from training.processes.exchange import versions

BEGIN, END = "<!-- begin: make faults -->", "<!-- end: make faults -->"
BEGIN_HOSTS, END_HOSTS = "<!-- begin: lost hosts -->", "<!-- end: lost hosts -->"


@dataclass(frozen=True)
class Result:
    """What one try showed; ``survived`` None: it was skipped."""

    fault: str
    backend: str
    number: int
    seed: int
    survived: bool | None
    moment: str
    steps_lost: int | None = None
    step: int | None = None
    while_saving: bool = False
    starts: int = 1
    restart_s: float | None = None
    problem: str = ""
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.fault, self.backend, self.number, self.seed


class Results:
    """A commit's results in a file, a line each: an interrupted table continues there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._found = {result.key: result for result in (Result(**json.loads(x)) for x in lines)}

    def __contains__(self, key: tuple[str, str, int, int]) -> bool:
        found = self._found.get(key)
        return found is not None and found.survived is not None  # skipped: perhaps not here

    def add(self, result: Result) -> None:
        self._found[result.key] = result
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")

    def rows(self, seed: int) -> dict[tuple[str, str], list[Result]]:
        """Return the results by fault and backend."""
        rows = defaultdict(list)
        for result in self._found.values():
            if result.seed == seed:
                rows[result.fault, result.backend].append(result)
        return rows


def tables(
    rows: Mapping[tuple[str, str], list[Result]], faults: Mapping[str, Fault]
) -> dict[tuple[str, str], list[str]]:
    """Return by the markers of their place the tables in Markdown, a row a fault and backend: of
    lost hosts one of their own."""
    found: dict[tuple[str, str], list[list[str]]] = {}
    for name, fault in faults.items():
        for backend, setup in SETUPS.items():
            if not (results := rows.get((name, backend))):
                continue
            head, marks = ["fault", "where", "tries", "survived", "steps lost"], (BEGIN, END)
            cells = [_title(fault, results), setup.title, *_cells(results)]
            if fault.groups:
                head, marks = [*head, "seconds to the next step"], (BEGIN_HOSTS, END_HOSTS)
                seconds = [each.restart_s for each in results if each.restart_s is not None]
                cells.append(_spread(seconds) if seconds else "-")
            found.setdefault(marks, [head]).append(cells)
    return {marks: markdown(cells) for marks, cells in found.items()}


def _spread(seconds: list[float]) -> str:
    spread = f", {min(seconds):.0f} to {max(seconds):.0f}" if len(seconds) > 1 else ""
    return f"{statistics.median(seconds):.0f}{spread}"


def _title(fault: Fault, found: list[Result]) -> str:
    saving = sum(result.while_saving for result in found)
    return f"{fault.title} ({saving} while saving)" if saving else fault.title


def _cells(found: list[Result]) -> list[str]:
    tried = [result for result in found if result.survived is not None]
    if not tried:
        return ["0", f"skipped: {found[0].moment}", ""]
    lost = [result.steps_lost for result in tried if result.steps_lost is not None]
    most = max(lost, default=0)
    text = f"{sum(lost) / len(lost):.1f}, at most {most}" if most else "0"
    survived = sum(bool(result.survived) for result in tried)
    return [str(len(tried)), str(survived), text if lost else "-"]


def write(
    document: Path, tables: Mapping[tuple[str, str], list[str]], commit: str, command: str
) -> None:
    """Put the tables between the document's markers, with what they were made with."""
    found = {name: version for name, version in versions().items() if version}
    used = ("torch", "torch_xla", "megatron-fsdp")
    made = ", ".join(f"{name} {found[name]}" for name in used if name in found)
    about = (
        f"A run of {STEPS} steps with a checkpoint every {SAVE_INTERVAL}. Made by {command} on "
        f"{time.strftime('%Y-%m-%d')}, commit {commit}, {made}, Python "
        f"{platform.python_version()}, on {os.cpu_count()} cores of {_processor()}."
    )
    for (begin, end), lines in tables.items():
        write_between(document, begin, end, [*lines, "", about])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()


def plot(rows: Mapping[tuple[str, str], list[Result]], path: Path) -> None:
    """Draw for each signal after which step it came, and how many steps were computed again."""
    figure, axes = pyplot().subplots(figsize=(9, 3.2), layout="constrained")
    colours: dict[str, Any] = {"xla": "tab:blue", "fsdp2": "tab:green", "megatron": "tab:orange"}
    for (fault, backend), found in rows.items():
        if fault not in ("sigkill", "sigterm"):
            continue
        points = [(r.step or 0, r.steps_lost) for r in found if r.steps_lost is not None]
        marker = {"sigkill": "o", "sigterm": "x"}[fault]
        # Beside each other where they would hide each other.
        shift = 0.12 * (list(SETUPS).index(backend) - 1) + (0.06 if fault == "sigterm" else 0)
        axes.plot(
            [x for x, _ in points],
            [y + shift for _, y in points],
            marker,
            alpha=0.7,
            color=colours.get(backend, "tab:gray"),
            markersize=5,
            label=f"{fault.upper()}, {SETUPS[backend].title}",
        )
    axes.set_xlabel("last step in the log at the signal")
    axes.set_ylabel("steps computed again")
    axes.set_title(f"A checkpoint every {SAVE_INTERVAL} steps")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save_figure(figure, path)
