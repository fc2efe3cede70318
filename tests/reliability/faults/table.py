"""Results of the tries, and the tables of docs/evidence/reliability.md."""

import json
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import markdown
from tests.reliability.faults.program import SAVE_INTERVAL, SETUPS, STEPS
from tests.reliability.faults.tries import Fault
from training.processes.exchange import versions


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
) -> list[list[str]]:
    """Return the tables in Markdown, a row a fault and backend: of lost hosts one of their own."""
    head = ["fault", "where", "tries", "survived", "steps lost"]
    found, of_hosts = [head], [[*head, "seconds to the next step"]]
    for name, fault in faults.items():
        for backend, setup in SETUPS.items():
            if not (results := rows.get((name, backend))):
                continue
            cells = [_title(fault, results), setup.title, *_cells(results)]
            if fault.groups:
                seconds = [r.restart_s for r in results if r.restart_s is not None]
                of_hosts.append([*cells, _spread(seconds) if seconds else "-"])
            else:
                found.append(cells)
    return [markdown(cells) for cells in (found, of_hosts) if len(cells) > 1]


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


def made_by(commit: str) -> str:
    """Return what the tables were made with."""
    found = {name: version for name, version in versions().items() if version}
    used = ("torch", "torch_xla", "megatron-fsdp")
    made = ", ".join(f"{name} {found[name]}" for name in used if name in found)
    return (
        f"A run of {STEPS} steps with a checkpoint every {SAVE_INTERVAL}. Made on "
        f"{time.strftime('%Y-%m-%d')}, commit {commit}, {made}, Python "
        f"{platform.python_version()}, on {os.cpu_count()} cores of {_processor()}."
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.machine()
