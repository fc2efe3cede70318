"""Draws what the time of runs went to, a bar a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from training.goodput.account import (
    DATA,
    DOWN,
    EVAL,
    FIRST,
    LOST,
    OTHER,
    PARTS,
    SAVE,
    USEFUL,
    Account,
)
from training.goodput.goodput_table import told
from training.logs.plots import save_figure

_COLOURS = {
    USEFUL: "#2e8b57",
    DATA: "#e6b422",
    FIRST: "#6baed6",
    OTHER: "#c6dbef",
    EVAL: "#9e9ac8",
    SAVE: "#f08c3a",
    LOST: "#c0392b",
    DOWN: "#7f7f7f",
}
_NARROWEST = 5.0
"""The percentage from which on a part has its share written in it."""


def draw(accounts: Mapping[str, Account], path: Path) -> None:
    """Write a picture of the runs' shares of wall time. Raises OSError."""
    figure, axis = plt.subplots(figsize=(10, 1.7 + 0.55 * len(accounts)), layout="constrained")
    short = {name: Path(name).name for name in accounts}
    if "" in short.values() or len(set(short.values())) < len(short):
        short = {name: name for name in accounts}
    names = [f"{short[name]}\n{told(account.wall_s)}" for name, account in accounts.items()]
    left = [0.0] * len(accounts)
    for part in PARTS:
        shares = [100 * a.seconds[part] / a.wall_s if a.wall_s else 0.0 for a in accounts.values()]
        if not any(shares):
            continue
        dark = part in (USEFUL, LOST, DOWN)
        bars = axis.barh(names, shares, left=left, color=_COLOURS[part], label=part, height=0.62)
        texts = [f"{share:.1f} %" if share >= _NARROWEST else "" for share in shares]
        colour = "white" if dark else "black"
        axis.bar_label(bars, texts, label_type="center", fontsize=8, color=colour)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axis.invert_yaxis()
    axis.set_xlim(0, 100)
    axis.set_xlabel("% of wall time")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    save_figure(figure, path)
