"""Draws the cost of a training against the time that it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from training.logs.plots import save_figure
from training.plan.plans import Plan

_COLOURS = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
_PLAIN = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:.3g}")
_HEIGHTS = (10, 26, 42)
"""Points above its place at which each of the chosen is named, so that names keep apart."""


def draw(plans: Sequence[Plan], chosen: Mapping[str, Plan], title: str, path: Path) -> Path:
    """Draw each plan as a point, those of one kind of chip in one colour, and name the chosen.

    Full points are the compiler's figures, hollow ones arithmetic. Without any price the chips are
    drawn in the place of the cost.
    """
    priced = [plan for plan in plans if plan.cost is not None]
    shown = priced or list(plans)
    figure, axis = plt.subplots(figsize=(9, 6), layout="constrained")
    for number, kind in enumerate(sorted({plan.kind for plan in shown})):
        colour = _COLOURS[number % len(_COLOURS)]
        for compiled in (True, False):
            of_kind = [p for p in shown if p.kind == kind and p.compiled == compiled]
            if of_kind:
                axis.scatter(
                    [plan.hours for plan in of_kind],
                    [_height(plan) for plan in of_kind],
                    s=45,
                    facecolors=colour if compiled else "none",
                    edgecolors=colour,
                    label=kind if compiled else f"{kind}, arithmetic only",
                )
    names: dict[tuple[float, float, str], list[str]] = {}
    for name, plan in chosen.items():
        if plan in shown:
            names.setdefault((plan.hours, _height(plan), plan.hardware), []).append(name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.margins(0.2)
    heights = [_height(plan) for plan in shown]
    middle = _middle([plan.hours for plan in shown])
    for above, ((hours, height, hardware), which) in zip(_HEIGHTS, names.items(), strict=False):
        right = hours <= middle  # of the middle: the text goes where there is room
        axis.annotate(
            f"{', '.join(which)}: {hardware}",
            (hours, height),
            (8 if right else -8, above),
            textcoords="offset points",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.6},
            ha="left" if right else "right",
        )
    for each, values in ((axis.xaxis, [plan.hours for plan in shown]), (axis.yaxis, heights)):
        narrow = max(values) < 5 * min(values)
        each.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7) if narrow else (1, 2, 5)))
        each.set_major_formatter(_PLAIN)
        each.set_minor_formatter(NullFormatter())
    axis.set_xlabel("hours to train")
    axis.set_ylabel("cost, $" if priced else "chips (no prices)")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)
    return path


def _height(plan: Plan) -> float:
    return plan.chips if plan.cost is None else plan.cost


def _middle(values: Sequence[float]) -> float:
    return (min(values) * max(values)) ** 0.5
