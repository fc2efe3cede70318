"""Says what a run's time went to, and how often to save, in lines for a terminal."""

from __future__ import annotations

from typing import Any

from training.goodput.account import PARTS, USEFUL, Account
from training.goodput.save_interval import Suggestion

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def told(seconds: float) -> str:
    """Return a time in one or two units: 2.5 s, 3 min 20 s, 5 h 2 min, 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    for number, (size, unit) in enumerate(_UNITS):
        if seconds >= size:
            small, small_unit = (*_UNITS, (1, "s"))[number + 1]
            rest = int(seconds % size // small)
            return f"{int(seconds // size)} {unit}" + (f" {rest} {small_unit}" if rest else "")
    raise AssertionError


def table(name: str, account: Account, suggestion: Suggestion | None) -> str:
    """Return the lines about one run."""
    starts = f"{account.starts} start" + ("s" if account.starts > 1 else "")
    lines = [f"{name}: {told(account.wall_s)}, {starts}, {account.failures} ended by a failure"]
    for part in PARTS:
        seconds = account.seconds[part]
        share = seconds / account.wall_s if account.wall_s else 0.0
        lines.append(f"  {part:<22} {told(seconds):>14} {share:>8.2%}")
    per_step = f", {told(account.step_s)} each" if account.steps else ""
    lost = f"; {account.lost_steps:,} lost and taken again" if account.lost_steps else ""
    lines.append(f"  goodput {account.goodput:.2%}: {account.steps:,} steps{per_step}{lost}")
    lines += [f"  {line}" for line in _advice(account, suggestion)]
    return "\n".join(lines)


def _advice(account: Account, suggestion: Suggestion | None) -> list[str]:
    if suggestion is None:
        return ["no save interval can be suggested: no checkpoint was written, or no step taken"]
    every = max(1, round(suggestion.interval_s / account.step_s))
    if suggestion.failures:
        rests = f"{told(suggestion.mtbf_s)} of running (failures seen: {suggestion.failures})"
    else:
        rests = (
            f"none seen in {told(suggestion.mtbf_s)} of running, taken as if the first came now: "
            "save less often if failures are rarer"
        )
    return [
        f"save every {told(suggestion.interval_s)}, --ckpt_step_interval {every}: saving and lost "
        f"work then cost {suggestion.waste:.2%}",
        f"  by Young's sqrt(2 x {told(suggestion.save_s)} a checkpoint x MTBF); MTBF: {rests}",
    ]


def as_values(name: str, account: Account, suggestion: Suggestion | None) -> dict[str, Any]:
    """Return the same as plain JSON values; times are in seconds, shares from 0 to 1."""
    values: dict[str, Any] = {
        "run": name,
        "wall_s": account.wall_s,
        "goodput": account.seconds[USEFUL] / account.wall_s if account.wall_s else None,
        "seconds": {part: account.seconds[part] for part in PARTS},
        "starts": account.starts,
        "failures": account.failures,
        "steps": account.steps,
        "lost_steps": account.lost_steps,
        "checkpoints": len(account.saves),
    }
    if suggestion:
        values["suggestion"] = {
            "save_s": suggestion.save_s,
            "mtbf_s": suggestion.mtbf_s,
            "failures_seen": suggestion.failures,
            "interval_s": suggestion.interval_s,
            "ckpt_step_interval": max(1, round(suggestion.interval_s / account.step_s)),
        }
    return values
