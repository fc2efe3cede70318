"""Ways to train that were found, what each takes, and which of them are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training.plan.prices import Price
from training.plan.work import Work

_GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """One way to train: hardware, flags, and what is expected of them."""

    hardware: str
    kind: str
    """Of its chips, as a file of prices names it."""
    chips: int
    settings: str
    """What was chosen beside the hardware, in a few words."""
    peak_bytes: float
    """Of a chip's memory, in use at once."""
    capacity_bytes: float
    step_s: float
    mfu: float
    compiled: bool
    """Whether the figures are the compiler's, or of arithmetic alone."""
    commands: dict[str, str]
    """Complete command lines by what they do, the training first."""
    work: Work
    price: Price | None

    @property
    def images_per_s(self) -> float:
        return self.work.batch_size / self.step_s

    @property
    def hours(self) -> float:
        return self.work.hours(self.step_s)

    @property
    def cost(self) -> float | None:
        """Return the dollars of the whole training; None if the chip has no price."""
        return None if self.price is None else self.hours * self.chips * self.price.per_hour

    def as_json(self) -> dict[str, Any]:
        return {
            "hardware": self.hardware,
            "chips": self.chips,
            "settings": self.settings,
            "peak_bytes": self.peak_bytes,
            "capacity_bytes": self.capacity_bytes,
            "expected_step_s": self.step_s,
            "expected_images_per_s": self.images_per_s,
            "expected_mfu": self.mfu,
            "compiled": self.compiled,
            "hours": self.hours,
            "cost_usd": self.cost,
            "commands": self.commands,
        }


def choose(plans: Sequence[Plan]) -> dict[str, Plan]:
    """Return the fastest, the cheapest and the smallest plan, by these words.

    Of equally small ones it is the cheapest. Without any price there is no cheapest.
    """
    if not plans:
        return {}
    priced = [plan for plan in plans if plan.cost is not None]
    chosen = {"fastest": min(plans, key=lambda plan: (plan.step_s, plan.chips))}
    if priced:
        chosen["cheapest"] = min(priced, key=_cost)
    chosen["smallest"] = min(plans, key=lambda plan: (plan.chips, _cost(plan), plan.step_s))
    return chosen


def _cost(plan: Plan) -> float:
    return float("inf") if plan.cost is None else plan.cost


_HEAD = "hardware|chips|settings|memory, GiB|step, ms|images/s|MFU|hours|cost, $|by".split("|")


def as_table(plans: Sequence[Plan]) -> str:
    """Return the plans as a table, the cheapest first."""
    rows = [_HEAD]
    for plan in sorted(plans, key=lambda plan: (_cost(plan), plan.step_s)):
        rows.append(
            [
                plan.hardware,
                str(plan.chips),
                plan.settings,
                f"{plan.peak_bytes / _GIB:.1f} of {plan.capacity_bytes / _GIB:.1f}",
                f"{plan.step_s * 1e3:,.1f}",
                f"{plan.images_per_s:,.0f}",
                f"{100 * plan.mfu:.0f} %",
                f"{plan.hours:,.1f}" if plan.hours < 1000 else f"{plan.hours:,.0f}",
                "no price" if plan.cost is None else f"{plan.cost:,.0f}",
                "compiler" if plan.compiled else "arithmetic",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    left = {0, 2, len(_HEAD) - 1}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
