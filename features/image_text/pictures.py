"""Pictures of an evaluation of pairs: similarities of a few, and the texts nearest to images."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from training.logs.figures import as_label, pyplot

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL import Image

SIDE = 96
"""The longest side of an image in a picture, in pixels."""
_NAME, _LINE = 36, 56
"""The longest text below the matrix, and in a line of ``nearest_figure``, in characters."""
_OWN_LINES = 2
"""The largest number of lines of an image's own text in ``nearest_figure``."""
_LINE_HEIGHT = 0.17
"""In inches."""


@dataclass(frozen=True)
class NearTexts:
    """An image and the texts of an evaluation that are most similar to it."""

    image: Image.Image
    own: str
    """Its own text, the most similar one if there are several."""
    rank: int
    """The rank of this text among all, from 1."""
    texts: Sequence[tuple[str, float, bool]]
    """The nearest texts: each with its similarity, and whether it is one of the image's own."""


def similarity_figure(
    similarities: np.ndarray, images: Sequence[Image.Image], texts: Sequence[str]
) -> Figure:
    """Draw the similarities of some images (rows) with their texts (columns), (images, images)."""
    count, cell = len(images), 0.62  # inches
    names = [_shortened(text, _NAME) for text in texts]
    below = 0.065 * max(map(len, names))
    figure, axis = pyplot().subplots(
        figsize=(cell * (count + 1.2) + 1.4, cell * count + below + 0.5), layout="constrained"
    )
    drawn = axis.imshow(similarities, cmap="Blues")
    figure.colorbar(drawn, label="cosine similarity", shrink=0.7)
    low, high = drawn.get_clim()
    for (row, column), value in np.ndenumerate(similarities):
        color = "white" if value - low > 0.7 * (high - low) else "black"
        weight = "bold" if row == column else "normal"
        text = f"{value:.2f}"
        axis.text(
            column, row, text, ha="center", va="center", color=color, fontsize=8, weight=weight
        )
    for row, image in enumerate(images):
        _place(axis, image, -1.1, row)
        frame = pyplot().Rectangle(
            (row - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="tab:orange", linewidth=1.5
        )
        axis.add_patch(frame)
    axis.set_xlim(-1.65, count - 0.5)
    axis.set_ylim(count - 0.5, -0.5)
    axis.set_xticks(range(count), names, rotation=90, fontsize=8)
    axis.set_yticks([])
    axis.set_title(f"{count} images and their texts (framed: the image's own)", fontsize=10)
    for side in axis.spines.values():
        side.set_visible(False)
    return figure


def nearest_figure(found: Sequence[NearTexts]) -> Figure:
    """Draw images, each with its own text and with the texts that are most similar to it."""
    columns = 2 if len(found) > 1 else 1
    rows = -(-len(found) // columns)
    most = max(len(each.texts) for each in found)
    height = _LINE_HEIGHT * (most + _OWN_LINES) + 0.2
    figure, axes = pyplot().subplots(
        rows, columns, figsize=(5.6 * columns, height * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat:
        axis.axis("off")
    for axis, each in zip(axes.flat, found, strict=False):
        axis.set_xlim(0, 5.6)
        axis.set_ylim(height, 0)
        _place(axis, each.image, 0.65, height / 2, 1.2)
        own = _wrapped(f"own text, rank {each.rank:,}: {each.own}", _OWN_LINES)
        lines = [(own, "black", "bold")]
        for text, similarity, is_own in each.texts:
            color = "tab:green" if is_own else "0.25"
            lines.append((_wrapped(f"{similarity:.3f} {text}", 1), color, "normal"))
        y = 0.1
        for text, color, weight in lines:
            axis.text(1.4, y, text, color=color, weight=weight, fontsize=8, va="top")
            y += _LINE_HEIGHT * (1 + text.count("\n"))
    return figure


def pixels_of(figure: Figure) -> np.ndarray:
    """Return a figure as pixels, (height, width, 3), uint8, and close it."""
    figure.set_dpi(110)
    figure.canvas.draw()
    pixels = np.array(figure.canvas.buffer_rgba())[..., :3]  # type: ignore[attr-defined]
    pyplot().close(figure)
    return pixels


@contextmanager
def without_glyph_warnings() -> Iterator[None]:
    """Do not warn inside of characters that matplotlib's font lacks: it draws boxes for them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _place(axis, image: Image.Image, x: float, y: float, side: float = 0.92) -> None:
    """Draw an image around a point, its longest side as long as ``side``."""
    width, height = (side * length / max(image.size) / 2 for length in image.size)
    down = axis.yaxis_inverted()
    extent = (x - width, x + width, y + height, y - height)
    axis.imshow(np.asarray(image), extent=extent, aspect="auto" if down else "equal", zorder=3)
    axis.set_aspect("equal")


def _shortened(text: str, longest: int) -> str:
    shown = " ".join(text.split())
    return as_label(shown if len(shown) <= longest else f"{shown[: longest - 3]}...")


def _wrapped(text: str, most: int) -> str:
    lines = textwrap.wrap(" ".join(text.split()), _LINE, max_lines=most, placeholder=" ...")
    return "\n".join(map(as_label, lines))
