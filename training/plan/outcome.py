"""Tells what a search for plans has found: a table, JSON, and a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from training.options.config import RunConfig
from training.plan.picture import draw
from training.plan.plans import Plan, as_table, choose
from training.plan.prices import Price
from training.plan.work import Work

NOTHING_FITS = 3
"""The exit code where no plan was found."""
_ROWS = 30


@dataclass(frozen=True)
class Outcome:
    """What a backend has found."""

    config: RunConfig
    what: str
    """The model, in words."""
    work: Work
    prices: Mapping[str, Price]
    plans: list[Plan]
    notes: list[str]
    picture: Path

    @property
    def chosen(self) -> dict[str, Plan]:
        """Return the plans that are named, of those that the compiler has seen if there are any."""
        compiled = [plan for plan in self.plans if plan.compiled]
        return choose(compiled or self.plans)


def tell(outcome: Outcome) -> int:
    """Print what was found, draw the picture, and return the exit code."""
    chosen, work = outcome.chosen, outcome.work
    title = f"{outcome.what}, batch {work.batch_size:,}, {work.epochs} epochs"
    if outcome.plans:
        draw(outcome.plans, chosen, f"To train {title}", outcome.picture)
    if outcome.config.use.json:
        print(json.dumps(_as_json(outcome)))
    else:
        print("\n".join(_lines(outcome, title)))
    return 0 if outcome.plans else NOTHING_FITS


def _as_json(outcome: Outcome) -> dict[str, object]:
    return {
        "work": asdict(outcome.work),
        "plans": [plan.as_json() for plan in outcome.plans],
        **{name: plan.as_json() for name, plan in outcome.chosen.items()},
        "prices": {kind: asdict(price) for kind, price in outcome.prices.items()},
        "notes": outcome.notes,
        "picture": str(outcome.picture) if outcome.plans else None,
    }


def _lines(outcome: Outcome, title: str) -> list[str]:
    work = outcome.work
    lines = [
        title,
        f"{work.steps:,} steps, {work.images:,} training images ({work.counted})",
        *outcome.notes,
    ]
    if not outcome.plans:
        hours = outcome.config.planning.hours
        within = f" in {hours:g} hours" if hours else ""
        return [*lines, "", f"nothing fits{within}: more --chips_at_most, or other hardware"]
    rows = outcome.plans[:_ROWS]
    lines += ["", as_table(rows)]
    if len(outcome.plans) > len(rows):
        lines.append(f"and {len(outcome.plans) - len(rows)} more (--json has all)")
    for name, plan in outcome.chosen.items():
        lines += ["", f"{name}: {plan.hardware}, {_figures(plan)}"]
        lines += [f"  {what}: {command}" for what, command in plan.commands.items()]
    used = sorted({plan.kind for plan in outcome.plans})
    lines += ["", "prices of a chip for an hour (--price FILE has others):"]
    lines += [f"  {kind}: {outcome.prices.get(kind, 'none')}" for kind in used]
    return [*lines, f"picture: {outcome.picture}"]


def _figures(plan: Plan) -> str:
    cost = "no price" if plan.cost is None else f"${plan.cost:,.0f}"
    by = "" if plan.compiled else ", by arithmetic, not compiled"
    return f"{plan.hours:,.1f} hours, {cost}{by}"
