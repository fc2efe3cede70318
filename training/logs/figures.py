"""Figures with matplotlib, which is imported on use: the import takes a second, and may fail."""

import contextlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from data.files import printable, reason_of, replace_file
from training.feature_table import features, objective_feature

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pyplot() -> ModuleType:
    """Return matplotlib.pyplot with a backend for files, whatever the environment names.

    Notebooks set MPLBACKEND to their own package, which programs that they start may not have.
    """
    os.environ["MPLBACKEND"] = "Agg"  # matplotlib fails on import if it does not know the name
    import matplotlib

    matplotlib.use("Agg")  # it may have been imported before
    import matplotlib.pyplot as plt

    return plt


@contextlib.contextmanager
def drawing(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Log why ``path`` cannot be drawn inside, and continue: tables have the same numbers."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - matplotlib, a font, a full disk
        say(f"warning: {path} cannot be drawn ({reason_of(error)})")


def as_label(text: str, longest: int | None = None) -> str:
    """Return text that matplotlib draws as it is, cut to ``longest`` characters: a name may hold
    TeX, or bytes that are no text."""
    return printable(text)[:longest].replace("$", r"\$")


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in the format of the path's suffix, and close it. Raises OSError."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:] or "png", dpi=110)
    pyplot().close(figure)
    replace_file(path, content.getvalue())


_ACCURACY = "Validation accuracy"
_PANELS = {
    "Loss": {
        "loss": "train",
        "epoch_loss": "train, mean of the epoch",
        "val_loss": "val",
        "ema_val_loss": "EMA",
    },
    "Learning rate": {"lr": "lr"},
    _ACCURACY: {
        "val_top1": "top-1",
        "val_top5": "top-5",
        "ema_val_top1": "EMA, top-1",
        "val_knn_10": "k-NN, k 10",
        "val_knn_200": "k-NN, k 200",
        "val_probe": "linear probe",
        "val_segment_miou": "segmentation, mIoU",
        "val_segment_knn_miou": "segmentation by k-NN, mIoU",
    },
    "Gradients": {"grad_norm": "norm before clipping"},
    "Throughput": {"images_per_s": "images/s"},
    "Spread of features": {
        "teacher_entropy": "teacher entropy (collapsed: 1)",
        "token_std": "std of class tokens (collapsed: 0)",
        "train_feature_std": "std of features (collapsed: 0)",
    },
    "Effective rank of features": {"train_rankme": "RankMe"},
}
"""By panel, the curves: their names in records and in the legend."""
_UNITS = {
    "Learning rate": "lr",
    _ACCURACY: "%",
    "Gradients": "norm",
    "Throughput": "images/s",
    "Spread of features": "fraction of the maximum",
    "Effective rank of features": "directions",
}
_IF_MEASURED = ("Spread of features", "Effective rank of features")
"""The panels that are omitted if the run has no such metrics."""


def plot_curves(
    records: list[dict[str, Any]],
    path: Path,
    objective: str = "classify",
    classes: int | None = None,
) -> Path:
    """Plot loss, learning rate, accuracy (or else gradient norm) and throughput of a run's records
    over steps, and signs of a collapse, if measured. ``classes``: how many the model has, if known;
    of five or fewer, the top-5 accuracy is always 100 %, and not drawn."""
    measured = {name for record in records for name in record}
    added = {n: text for each in features() for n, text in each.percentages.items()}
    of_features = {"val_knn_10", "val_probe", "val_segment_miou", *added}
    panels = _PANELS | {_ACCURACY: _PANELS[_ACCURACY] | added}
    feature = objective_feature(objective)
    loss_label = feature.loss_label if feature else "cross-entropy"
    has_accuracy = objective == "classify" or measured & of_features
    left_out = {"Gradients" if has_accuracy else _ACCURACY}
    left_out |= {title for title in _IF_MEASURED if not measured & _PANELS[title].keys()}
    titles = [title for title in _PANELS if title not in left_out]
    columns = -(-len(titles) // 2)
    figure, axes = pyplot().subplots(
        2, columns, figsize=(5.5 * columns, 7), sharex=True, layout="constrained"
    )
    for axis in axes.flat[len(titles) :]:
        axis.remove()
    for axis, title in zip(axes.flat, titles, strict=False):
        for name, label in panels[title].items():
            if name == "val_top5" and classes is not None and classes <= 5:
                continue
            points = [(r["step"], r[name]) for r in records if r.get(name) is not None]
            if points:
                is_rare = name.startswith(("val_", "ema_val_", "train_", "epoch_"))
                marker = "o" if is_rare or len(points) < 3 else None
                axis.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=4)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.set_ylabel(_UNITS.get(title) or loss_label)
        axis.tick_params(labelbottom=True)
        axis.grid(alpha=0.3)
        if len(axis.lines) > 1:
            axis.legend()
        if title in ("Loss", "Throughput", *_IF_MEASURED) and axis.lines:
            axis.set_ylim(bottom=0)
        elif title == _ACCURACY and axis.lines:
            axis.set_ylim(0, 102)
    save_figure(figure, path)
    return path


# -- Images side by side ---------------------------------------------------------------------------

_GAP = 2
"""Pixels between images."""
_LEAST_SIDE = 96
"""The minimum side of an image in a picture, in pixels; smaller images are enlarged."""


def spread(most: int, images: int) -> list[int]:
    """Return the indices of at most ``most`` of this many images, evenly spaced, as images of a
    class may be adjacent."""
    most = min(most, images)
    return [place * images // most for place in range(most)]


def side_by_side(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Return a picture, (height, width, 3), uint8, with a row per image. ``columns``: the images of
    each column, (images, 3, height, width), from 0 to 1."""
    times = -(-_LEAST_SIDE // max(columns[0].shape[2:]))
    gaps = ((0, 0), (0, 0), (0, _GAP), (0, _GAP))
    cells = [
        np.pad(images.repeat(times, 2).repeat(times, 3), gaps, constant_values=1.0)
        for images in columns
    ]
    rows = np.concatenate(cells, axis=3)
    picture = np.concatenate(rows, axis=1)[:, :-_GAP, :-_GAP]
    return (picture * 255).round().astype(np.uint8).transpose(1, 2, 0)


def save_picture(pixels: np.ndarray, path: Path) -> None:
    """Write pixels, (height, width, 3), uint8, as a PNG. Raises OSError."""
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, format="png")
    replace_file(path, content.getvalue())
