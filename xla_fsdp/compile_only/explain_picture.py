"""The picture of ``--explain``: a step's time by module of the model, and by kind of work."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from training.logs.plots import save_figure
from xla_fsdp.compile_only.explain import KINDS, Cost, kind_of, module_of, shares
from xla_fsdp.compile_only.report import Report

_LEAST = 0.005
"""Of the step: modules with less are drawn together."""
_COLOURS = dict(zip(KINDS, plt.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]


def draw(costs: list[Cost], report: Report, path: Path) -> None:
    """Draw a bar for each module, the costliest first, its parts coloured by kind."""
    total = sum(cost.seconds for cost in costs)
    of_module = shares(costs, module_of)
    shown = [name for name, seconds in of_module.items() if seconds >= _LEAST * total]
    groups = {name: [cost for cost in costs if cost.origin.module == name] for name in shown}
    rest = [cost for cost in costs if cost.origin.module not in groups]
    if rest:
        groups[f"{len(of_module) - len(shown)} others"] = rest
    figure, axis = plt.subplots(figsize=(9, 0.34 * len(groups) + 1.9), layout="constrained")
    drawn = set()
    for row, group in enumerate(groups.values()):
        left = 0.0
        of_kind = shares(group, kind_of)
        for kind in KINDS:
            if kind not in of_kind:
                continue
            label = None if kind in drawn else kind
            width = of_kind[kind] * 1e3
            axis.barh(row, width, left=left, color=_COLOURS[kind], label=label)
            drawn.add(kind)
            left += width
        axis.text(left, row, f" {left / total / 10:.1f} %", va="center", fontsize=8)
    axis.set_yticks(range(len(groups)), list(groups))
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_xlabel("ms a step on each device, by the compiler's cycles")
    axis.set_title(
        f"{report.parameters:,} parameters, batch {report.batch_size}, {report.topology}: "
        f"{total * 1e3:.4g} ms a step"
    )
    axis.legend(loc="lower right", fontsize=8)
    save_figure(figure, path)
