"""Draws the curves of a run as one picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from data.own_files import replace_file

_PANELS = (
    ("Loss", (("loss", "train"), ("val_loss", "val"), ("ema_val_loss", "EMA")), "cross-entropy"),
    ("Learning rate", (("lr", "lr"),), "lr"),
    (
        "Validation accuracy",
        (("val_top1", "top-1"), ("val_top5", "top-5"), ("ema_val_top1", "EMA, top-1")),
        "%",
    ),
    ("Throughput", (("images_per_s", "images/s"),), "images/s"),
)


def plot_curves(records: list[dict[str, Any]], path: Path) -> Path:
    """Draw loss, learning rate, accuracy and throughput of a run's records over steps."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), sharex=True)
    figure.subplots_adjust(left=0.08, right=0.98, bottom=0.08, top=0.95, wspace=0.2, hspace=0.28)
    for axis, (title, series, unit) in zip(axes.flat, _PANELS, strict=True):
        for key, label in series:
            points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
            if points:
                steps, values = zip(*points, strict=True)
                marker = "o" if key.startswith(("val_", "ema_val_")) or len(points) < 3 else None
                axis.plot(steps, values, label=label, marker=marker, markersize=4)
                if key == "val_top1":
                    axis.set_ylim(0, 102)
                    axis.annotate(
                        f"{values[-1]:.1f} %",
                        (steps[-1], values[-1]),
                        (-30, -15),
                        textcoords="offset points",
                    )
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.tick_params(labelbottom=True)
        axis.set_ylabel(unit)
        axis.grid(alpha=0.3)
        if len(series) > 1 and axis.lines:
            axis.legend()
        if unit in ("cross-entropy", "images/s") and axis.lines:
            axis.set_ylim(bottom=0)
    save_figure(figure, path)
    return path


def save_figure(figure: plt.Figure, path: Path) -> None:
    """Write a figure as a picture of its suffix's format, and close it. Raises OSError."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:] or "png", dpi=110)
    plt.close(figure)
    replace_file(path, content.getvalue())
