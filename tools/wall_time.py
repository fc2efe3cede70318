"""Where a run's wall time went: its parts, as events.jsonl records them, and how they are drawn.

docs/files.md defines the parts. ``tools/goodput.py`` and ``tools/report.py`` show them.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.logs.records import is_number

USEFUL, DATA, FIRST, OTHER, EVAL, SAVE, LOCAL, LOST, DOWN = PARTS = (
    "useful steps",
    "waiting for data",
    "first step, compiling",
    "starting and ending",
    "evaluation",
    "checkpoints",
    "local checkpoints",
    "lost work",
    "down",
)
"""The parts of wall time. Lost work: steps that a later start repeated. Down: from the last sign of
life of one start to the start of the next one."""
_PART_OF = {"eval": EVAL, "save": SAVE, "local_save": LOCAL, "first_step": FIRST}
NOTICED, ENDED, REST = "noticed", "ended", "other"
RESTART_PARTS = (
    *(NOTICED, ENDED),  # by the launcher
    *("imports", "data", "devices", "agreed", "model", "loaded"),  # until the loop
    *("batch", "compiled", "step"),  # the first step
    REST,
)
"""The parts of a restart, in their order but for the rest; docs/files.md says what each is."""
_MOST_BYTES = 1e18


@dataclass(slots=True)
class Span:
    """A stretch of a run's wall time, and the part of it that it counts for."""

    part: str
    """For steps ``USEFUL``, although they may have waited for data."""
    began: float
    """In seconds since 1970, as ``ended``."""
    ended: float
    steps: int = 0
    last: int = 0
    """The number of the last of the steps."""
    waited: float = 0.0
    """Seconds that the steps waited for data."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Restart:
    """From the last sign of life of a start to the end of the next one's first step."""

    step: int
    """The first step's number."""
    seconds: float
    parts: Mapping[str, float]
    """Of ``RESTART_PARTS`` those that are known; they add up to ``seconds``. {} if an earlier
    version of the program was restarted."""


@dataclass
class Account:
    """A run's wall time, in seconds."""

    spans: list[Span] = field(default_factory=list)
    """Where it went, in no certain order; they do not overlap."""
    starts: int = 0
    failed_at: list[float] = field(default_factory=list)
    """The last signs of life, in seconds since 1970, of starts that ended neither at the last step
    nor by a signal."""
    saves: list[float] = field(default_factory=list)
    """How long training stopped for each checkpoint."""
    storage: list[Mapping[str, float]] = field(default_factory=list)
    """Of each complete checkpoint its ``bytes``, and the seconds of writing it, ``write_s``, while
    training continued or not."""
    local: list[Mapping[str, float]] = field(default_factory=list)
    """Of each checkpoint on the hosts' own disks ``bytes`` of all hosts, and seconds of the slowest
    process: ``write_s`` on its disk, ``copy_s`` to its peer."""
    restarts: list[Restart] = field(default_factory=list)

    @functools.cached_property
    def seconds(self) -> dict[str, float]:
        """The sum of each part."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for span in self.spans:
            seconds[span.part] += span.seconds - span.waited
            seconds[DATA] += span.waited
        return seconds

    @property
    def steps(self) -> int:
        """Useful steps; the first one of each start is not counted."""
        return sum(span.steps for span in self.spans if span.part == USEFUL)

    @property
    def lost_steps(self) -> int:
        return sum(span.steps for span in self.spans if span.part == LOST)

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of useful steps, from 0 to 1; NaN if no time has passed."""
        return self.seconds[USEFUL] / self.wall_s if self.wall_s else math.nan

    @property
    def shares(self) -> dict[str, float]:
        """The share of each part, from 0 to 1; 0 if no time has passed."""
        return {part: s / self.wall_s if self.wall_s else 0.0 for part, s in self.seconds.items()}

    @property
    def step_s(self) -> float:
        """Seconds a useful step, waiting for data included; NaN without any step."""
        both = self.seconds[USEFUL] + self.seconds[DATA]
        return both / self.steps if self.steps else math.nan


def account_of(events: Iterable[Mapping[str, Any]]) -> Account:
    """Return where the time of a run went, from its first start on.

    ``events``: those of ``training/logs/events.py``, in order. The time up to each counts for what
    it describes, so the parts add up to the whole; that between a start that reached its last step
    and the next one is not counted. Raises ValueError if there is no start.
    """
    account = Account()
    taken: list[Span] = []
    """Steps that may become lost work if a later start repeats them."""
    at, ended, last_sign = math.nan, "", math.nan
    started: Mapping[str, Any] | None = None
    """A start after the first one whose first step has not been made yet."""

    def spend(part: str, until: float) -> None:
        if until > at:
            account.spans.append(Span(part, at, until))

    for event in events:
        kind, now = event["event"], float(event["time"])
        if kind == "start":
            began = float(event["process_started"])
            if account.starts:
                if ended != "completed":
                    spend(DOWN, began)
                if ended in ("", "failed"):
                    account.failed_at.append(at)
                last_sign = began if ended == "completed" else at
                account.spans += _cut_repeated(taken, int(event["step"]))
                at, started = max(began, at), event
            else:
                at = began
            account.starts += 1
            ended = ""
        if not account.starts:
            continue
        if kind == "steps":
            waited = max(0.0, min(float(event["waited"]), now - at))
            steps, last = int(event["steps"]), int(event["step"])
            taken.append(Span(USEFUL, at, max(at, now), steps, last, waited))
            account.spans.append(taken[-1])
        elif kind in _PART_OF:
            inside = max(0.0, min(float(event["seconds"]), now - at))
            spend(OTHER, now - inside)
            at = max(at, now - inside)
            spend(_PART_OF[kind], now)
            if kind == "first_step" and started:  # one of another shape is no restart
                account.restarts.append(_restart_of(started, event, last_sign))
                started = None
            # Of the local save before this one; of checkpoints completed since the event before.
            account.local += _figures_of(event, "bytes", "write_s", "copy_s")
            completed = event.get("completed")
            for checkpoint in completed if isinstance(completed, list) else ():
                account.storage += _figures_of(checkpoint, "bytes", "write_s")
            if event.get("written"):
                account.saves.append(inside)
        elif kind in ("start", "stop", "end"):
            spend(OTHER, now)
            ended = event.get("how", ended)
        else:
            continue
        at = max(at, now)
    if not account.starts:
        raise ValueError("it records no start")
    if ended == "failed":
        account.failed_at.append(at)
    return account


def _cut_repeated(taken: list[Span], step: int) -> list[Span]:
    """Cut off the steps after ``step``, which a start from there repeats; return them as lost."""
    lost = []
    while taken and taken[-1].last > step:
        span = taken[-1]
        if steps := min(span.steps, span.last - step):
            share = steps / span.steps
            cut = span.ended - share * span.seconds
            lost.append(Span(LOST, cut, span.ended, steps, span.last))
            span.ended, span.waited = cut, span.waited * (1 - share)
            span.steps, span.last = span.steps - steps, span.last - steps
        if span.steps:
            break
        taken.pop()
    return lost


def _figures_of(values: Any, *names: str) -> list[Mapping[str, float]]:
    """Return these numbers of a JSON object; [] if it has not all of them."""
    if isinstance(values, dict) and all(is_number(values.get(n), _MOST_BYTES) for n in names):
        return [{name: values[name] for name in names}]
    return []


def _restart_of(
    start: Mapping[str, Any], first_step: Mapping[str, Any], last_sign: float
) -> Restart:
    """Return the restart of these events; ``last_sign``: of the start before."""
    seconds = max(0.0, float(first_step["time"]) - last_sign)
    began, noticed = float(start["process_started"]), start.get("failed_at")
    parts, recorded = {}, first_step.get("parts")
    if isinstance(recorded, dict):
        if is_number(noticed) and last_sign <= noticed <= began:
            parts[NOTICED] = noticed - last_sign
        parts[ENDED] = max(0.0, began - last_sign - parts.get(NOTICED, 0.0))
        parts |= {n: s for n, s in recorded.items() if n in RESTART_PARTS and is_number(s)}
        parts[REST] = 0.0
        parts[REST] = max(0.0, seconds - sum(parts.values()))
    return Restart(int(start["step"]) + 1, seconds, parts)


# -- How it is shown -------------------------------------------------------------------------------

COLOURS = {
    USEFUL: "#2e8b57",
    DATA: "#e6b422",
    FIRST: "#6baed6",
    OTHER: "#c6dbef",
    EVAL: "#9e9ac8",
    SAVE: "#f08c3a",
    LOCAL: "#fdd0a2",
    LOST: "#c0392b",
    DOWN: "#7f7f7f",
}


_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """Return a time in one or two units: 2.5 s, 3 min 20 s, 5 h 2 min, 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    number = next(i for i, (size, _) in enumerate(_UNITS) if seconds >= size)
    (size, unit), (small, small_unit) = _UNITS[number : number + 2]
    rest = int(seconds % size // small)
    return f"{int(seconds // size)} {unit}" + (f" {rest} {small_unit}" if rest else "")


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or the whole paths if those parts are not different."""
    names = [folder.name for folder in folders]
    return list(map(str, folders)) if "" in names or len(set(names)) < len(names) else names


def shares_by_pixel(
    account: Account, began: float, pixel_s: float, pixels: int
) -> list[list[float]]:
    """Return the seconds of each part, in the order of ``PARTS``, in each pixel of a time axis."""
    shares = [[0.0] * pixels for _ in PARTS]
    for span in account.spans:
        of_part = shares[PARTS.index(span.part)]
        start, end = ((time - began) / pixel_s for time in (span.began, span.ended))
        start, end = max(start, 0.0), min(end, pixels)
        for pixel in range(int(start), math.ceil(end)):
            of_part[pixel] += pixel_s * (min(end, pixel + 1) - max(start, pixel))
    return shares


def stripes(
    account: Account, began: float, pixel_s: float, pixels: int
) -> Iterator[tuple[str, int, int]]:
    """Yield the stripes of a time axis: a part, its first pixel and the one after its last. Each
    pixel is of the part with most of its time."""
    columns = zip(*shares_by_pixel(account, began, pixel_s, pixels), strict=True)
    largest = [PARTS[column.index(max(column))] if max(column) > 0 else None for column in columns]
    end = 0
    for part, same in itertools.groupby(largest):
        start, end = end, end + len([*same])
        if part is not None:
            yield part, start, end
