"""A try: one fault in one run, which is started again until it completes."""

import json
import random
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.reliability.faults.program import (
    LIMIT_S,
    STEPS,
    Setup,
    difference,
    last_step,
    resumed_step,
    running,
)
from training.checkpoints.format import is_complete
from training.checkpoints.inventory import step_folders, step_of
from training.logs.records import read_events

MOST_STARTS = 4
"""How often a run is started again before it counts as lost."""


class Skipped(Exception):
    """Raised for a fault that cannot be tried on this machine, or not on this backend; says why."""


class NotSurvived(Exception):
    """Raised with what went wrong in a try."""


@dataclass
class Survived:
    """How a try went that was survived."""

    steps_lost: int
    """How many steps were computed twice."""
    moment: str
    """When the fault came, and to whom."""
    step: int | None = None
    """The last step in the log at the fault."""
    while_saving: bool = False
    starts: int = 1
    """How many starts it took to complete the run, without the first one."""
    restart_s: float | None = None
    """The seconds from the loss of a host to the end of the next step; None: none was lost."""


@dataclass(frozen=True)
class Loss:
    """Hosts that were lost."""

    at: float
    """When, in seconds since the epoch."""
    step: int
    """The last step in the log."""
    moment: str
    """When, and which, in words."""


@dataclass(frozen=True)
class Reference:
    """The uninterrupted run: what it left, and how long it took."""

    ckpt_dir: Path
    first_step_s: float
    """The seconds from the start to the first line of metrics.jsonl."""
    total_s: float


@dataclass
class Try:
    """One try of a fault, or several that follow each other in one run."""

    setup: Setup
    numbers: Sequence[int]
    rng: random.Random
    folder: Path
    """The folder of the logs and of the run's own folder: it stays if the try is not survived."""
    reference: Reference
    moment: str = field(default="before the fault", init=False)
    """When the fault came, for the report of a try that is not survived."""
    damaged: str = field(default="", init=False)
    """The name of the checkpoint that was damaged: it may be set aside."""

    @property
    def number(self) -> int:
        return self.numbers[0]

    @property
    def run(self) -> Path:
        """Return the run's --ckpt_dir."""
        return self.folder / "run"

    def command(self, *flags: str) -> list[str]:
        return self.setup.command(self.run, *flags)

    def running(self, name: str, *flags: str) -> Any:
        """Start the program, with a log of this name."""
        return running(self.command(*flags), self.log(name), **self.setup.variables)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def start_anew(self) -> None:
        """Delete the run in which the moment has been missed."""
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.rmtree(self.disk(0).parent, ignore_errors=True)

    def disk(self, host: int) -> Path:
        """Return a host's own disk, as tests/fakes/hosts_with_disks.py has it."""
        return self.run.parent / "disks" / f"host_{host}"

    def complete(self, *flags: str) -> tuple[int, int]:
        """Start the same command until the run completes.

        Returns the step at which it resumed and the number of starts. Raises NotSurvived.
        """
        for number in range(1, MOST_STARTS + 1):
            with self.running(f"restart_{number}", *flags) as program:
                if not program.wait():
                    raise NotSurvived(f"a start again hangs: no end after {LIMIT_S:.0f} s")
                output = program.output()
            if program.root.returncode == 0 and "training completed" in output:
                return resumed_step(output), number
            time.sleep(1)
        raise NotSurvived(f"not completed by {MOST_STARTS} starts: {last_words(output)}")

    def compare(self) -> None:
        """Raise NotSurvived if the run differs from the uninterrupted one."""
        aside = {path.name for path in self.run.glob("set_aside_*/step_*")} - {self.damaged}
        if aside:
            raise NotSurvived(f"set aside, though nobody went back: {', '.join(sorted(aside))}")
        if problem := difference(self.run, self.reference.ckpt_dir):
            raise NotSurvived(problem)

    def resume_after(self, step: int, **about: Any) -> Survived:
        """Complete the run after a fault that came when ``step`` was the last one in the log."""
        resumed, starts = self.complete()
        self.compare()
        lost = max(0, step - resumed)
        return Survived(lost, self.moment, step, starts=starts, **about)

    def survived(self, loss: Loss) -> Survived:
        """Return how the run continued after a loss, by its events."""
        firsts = [event for event in read_events(self.run) if event["event"] == "first_step"]
        first = next(event for event in firsts if event["time"] > loss.at)
        lost = max(0, loss.step - (first["step"] - 1))
        return Survived(lost, loss.moment, loss.step, restart_s=first["time"] - loss.at)


def last_words(output: str) -> str:
    """Return the line of an output that says what went wrong."""
    lines = [line for line in re.split(r"[\r\n]+", output) if line.strip()]
    ours = [line for line in lines if line.startswith("run_vit_training.py: ")]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: )?\w*Error\b", line)]
    return (ours or errors or lines or ["nothing was printed"])[-1].strip()[:300]


def unfinished_save(ckpt_dir: Path) -> bool:
    """Return True if the newest checkpoint has no manifest, and is no old one being removed."""
    folders = step_folders(ckpt_dir)
    return bool(folders) and not is_complete(folders[-1])


def reference_run(setup: Setup, folder: Path) -> Reference:
    """Return the uninterrupted run, which is made once."""
    ckpt_dir, times = folder / "run", folder / "seconds.json"
    if not times.exists():
        shutil.rmtree(folder, ignore_errors=True)  # of one that was interrupted
        start = time.monotonic()
        command = setup.command(ckpt_dir)
        with running(command, folder / "output.log", **setup.variables) as program:
            program.wait_until(lambda: last_step(ckpt_dir) > 0)
            first = time.monotonic() - start
            program.wait()
            if program.root.returncode or last_step(ckpt_dir) != STEPS:
                raise SystemExit(f"{setup.title}: the uninterrupted run fails, see {program.log}")
        times.write_text(json.dumps([first, time.monotonic() - start]))
    first, total = json.loads(times.read_text())
    return Reference(ckpt_dir, first, total)


@dataclass(frozen=True)
class Fault:
    """A kind of fault, and how it is tried."""

    title: str
    attempt: Callable[[Try], Survived | list[Survived]]
    """The function that makes a try, or several in one run: of these it may return fewer, if the
    run came to its end before. Raises NotSurvived, or Skipped."""
    tries: int = 3
    in_one_run: int = 1
    """How many tries follow each other in one run, at most."""
    starts: float = 2.0
    """How many times a try starts the program, about."""
    several: bool = False
    """Whether it needs several processes."""
    groups: int = 0
    """How many groups of hosts with disks of their own it needs, and is tried on these alone."""

    def fits(self, setup: Setup) -> bool:
        """Return True if the fault can be tried there."""
        if self.groups or setup.groups:
            return 0 < self.groups <= setup.groups
        return setup.processes > 1 or not self.several


def newest_folder_step(ckpt_dir: Path) -> int:
    """Return the newest step of all folders named as checkpoints; 0 if there is none."""
    return max((step_of(path) for path in step_folders(ckpt_dir)), default=0)
