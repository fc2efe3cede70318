"""Adds up what a run's wall time went to, from its events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

USEFUL, DATA, FIRST, OTHER, EVAL, SAVE, LOST, DOWN = PARTS = (
    "useful steps",
    "waiting for data",
    "first step, compiling",
    "starting and ending",
    "evaluation",
    "checkpoints",
    "lost work",
    "down",
)
"""What time goes to. Lost work: steps that a later start took again. Down: from the last sign of
life of one start to the beginning of the next one."""
_SPANS = {"eval": EVAL, "save": SAVE, "first_step": FIRST}


@dataclass
class _Steps:
    """Steps between two notes, which a later start may make lost work."""

    last: int
    count: int
    seconds: dict[str, float]
    """What their time went to, USEFUL and DATA."""


@dataclass
class Account:
    """A run's wall time, in seconds."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    starts: int = 0
    failures: int = 0
    """Starts that ended otherwise than at the last step or when a signal asked them to."""
    steps: int = 0
    """Steps taken and not lost; the first one of each start is not counted."""
    lost_steps: int = 0
    saves: list[float] = field(default_factory=list)
    """How long training stood for each checkpoint written."""

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of useful steps; NaN before there is anything."""
        return self.seconds[USEFUL] / self.wall_s if self.wall_s else math.nan

    @property
    def running_s(self) -> float:
        return self.wall_s - self.seconds[DOWN]

    @property
    def step_s(self) -> float:
        """Seconds a useful step, with its waiting for data; NaN if there is none."""
        both = self.seconds[USEFUL] + self.seconds[DATA]
        return both / self.steps if self.steps else math.nan


def account_of(events: Sequence[Mapping[str, Any]]) -> Account:
    """Return what the time of a run went to, from the beginning of its first start on.

    Events are those of ``training/logs/events.py`` in their order. The time up to each goes to what
    it tells of, so the parts add up to all there was. After a start that reached its last step, the
    time up to the next one is nobody's. Raises ValueError if there is no start.
    """
    account = Account()
    taken: list[_Steps] = []
    at, ended = math.nan, ""
    for event in events:
        kind, now = event["event"], float(event["time"])
        if kind == "start":
            began = float(event["process_started"])
            if account.starts:
                account.seconds[DOWN] += 0.0 if ended == "completed" else max(0.0, began - at)
                account.failures += ended in ("", "failed")
                taken = _lose(account, taken, int(event["step"]))
            account.starts += 1
            at, ended = max(began, at) if account.starts > 1 else began, ""
        if not account.starts:
            continue
        passed = max(0.0, now - at)
        at = max(at, now)
        if kind == "steps":
            waited = min(float(event["waited"]), passed)
            count = int(event["steps"])
            taken.append(_Steps(event["step"], count, {USEFUL: passed - waited, DATA: waited}))
        elif kind in _SPANS:
            inside = min(float(event["seconds"]), passed)
            account.seconds[_SPANS[kind]] += inside
            account.seconds[OTHER] += passed - inside
            if event.get("written"):
                account.saves.append(inside)
        else:
            account.seconds[OTHER] += passed
            ended = event.get("how", ended)
    if not account.starts:
        raise ValueError("it tells of no start")
    account.failures += ended == "failed"
    for steps in taken:
        account.steps += steps.count
        for part, seconds in steps.seconds.items():
            account.seconds[part] += seconds
    return account


def _lose(account: Account, taken: list[_Steps], resumed: int) -> list[_Steps]:
    """Count the steps beyond the one that is resumed as lost work; return the others."""
    kept = []
    for steps in taken:
        lost = min(steps.count, max(0, steps.last - resumed))
        share = lost / steps.count
        account.lost_steps += lost
        account.seconds[LOST] += share * sum(steps.seconds.values())
        if lost < steps.count:
            rest = {part: (1 - share) * seconds for part, seconds in steps.seconds.items()}
            kept.append(_Steps(steps.last - lost, steps.count - lost, rest))
    return kept
