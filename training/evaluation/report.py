"""The report of ``--eval_report``: tables, pictures, and a page with the worst images.

What it says depends on the labels: ``class_report.py`` reports on one label an image,
``label_report.py`` on several; features may have reports of their own (``Feature.report``).
"""

from __future__ import annotations

import abc
import base64
import html
import io
import math
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from data.files import (
    BrokenImageError,
    DataFolderError,
    printable,
    replace_file,
    without_secrets,
    write_csv,
)
from data.source import Split
from training.backend import Backend
from training.errors import UsageError
from training.evaluation.class_scores import BINS, calibration_error
from training.files import check_folder_writable, folder_at, is_url
from training.logs.figures import drawing
from training.logs.records import Evaluation
from training.processes import exchange
from training.resolve import Run

ERRORS, RELIABILITY_PICTURE, PAGE = "errors.csv", "reliability.png", "evaluation.html"


def report_folder(run: Run) -> Path:
    """Return the folder of ``--eval_report``. Raises UsageError if it cannot be written to."""
    assert run.config.use.eval_report is not None
    folder = folder_at(run.config.use.eval_report)
    if is_url(folder):
        raise UsageError(f"--eval_report {folder}: use a folder of this machine")
    check_folder_writable(folder, "--eval_report")
    return folder


def has_own_images(backend: Backend) -> bool:
    """Return whether no process before this one has the same images; all must call it."""
    shards = exchange.all_gather_object(backend.batch_shard)
    return shards.index(backend.batch_shard) == exchange.rank()


Rows = list[list[Any]]
"""The rows of a table, of which the first has the names of the columns."""


@dataclass(frozen=True)
class PageTable:
    """The table of classes on the page."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    text_columns: Sequence[int]
    """The numbers, from 1, of the columns of text, which are aligned to the left."""
    note: str = ""


@dataclass(frozen=True)
class Report(abc.ABC):
    """What an evaluation found in a validation split."""

    names: Sequence[str]
    """The names of classes by label."""
    split: Split
    errors: np.ndarray
    """The mistakes, the worst first; the field "index" is the number of the image."""

    definitions = "Averages, precision, recall and F1 are defined as in scikit-learn."
    """How the figures are defined."""
    pictured = "Calibration"
    """The title of the pictures on the page."""
    mistake = ("image", "classified wrongly")
    """What one of ``errors`` is: a noun, and what is wrong with it."""
    listed_in = ERRORS
    """The table that lists all mistakes."""
    hint = ""
    """How to read what is below the images of mistakes."""

    def path_of(self, error: np.void) -> str:
        """Return the path of an image of ``errors`` as the source knows it, without secrets."""
        return without_secrets(self.split.name_of(int(error["index"])))

    @property
    def title(self) -> str:
        """What the log calls it."""
        return f"report on {len(self.names):,} classes"

    @property
    @abc.abstractmethod
    def values(self) -> dict[str, Any]:
        """Everything for ``--json``; None where a figure is not defined."""

    @abc.abstractmethod
    def tables(self) -> Mapping[str, Rows]:
        """Return the tables by the names of their files."""

    @abc.abstractmethod
    def pictures(self) -> Mapping[str, Callable[[Path], None]]:
        """Return the functions that draw pictures, by the names of their files."""

    @abc.abstractmethod
    def summary(self, result: Evaluation) -> Mapping[str, str]:
        """Return the figures at the top of the page; "" for what does not apply."""

    @abc.abstractmethod
    def page_table(self) -> PageTable: ...

    @abc.abstractmethod
    def caption(self, error: np.void) -> tuple[str, str, str, str]:
        """Return what the page says of a mistake; the first and the third text are bold."""


def number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def percent(fraction: float) -> float | None:
    return number(100 * fraction)


def calibration(bins: np.ndarray) -> dict[str, Any]:
    """Return the calibration error and the bins, (BINS,), of dtype BIN, in percent."""
    edges = [100 * place / BINS for place in range(BINS + 1)]
    return {
        "ece": percent(calibration_error(bins)),
        "bins": [
            {
                "above": low,
                "to": high,
                "images": count,
                "accuracy": percent(correct / count) if count else None,
                "probability": percent(total / count) if count else None,
            }
            for low, high, (count, correct, total) in zip(
                edges[:-1], edges[1:], bins.tolist(), strict=True
            )
        ],
    }


def shown(fraction: float) -> str:
    """Return a percentage for a table; "" if it is not defined."""
    return f"{100 * fraction:.2f}" if math.isfinite(fraction) else ""


def write_report(
    report: Report, result: Evaluation, about: str, folder: Path, say: Callable[[str], None]
) -> None:
    """Write the tables, pictures and page of a report into ``folder``. Raises OSError, except for
    pictures, whose failure is logged with ``say``.

    ``result``: of the same evaluation; ``about``: which model and data these are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in report.tables().items():
        write_csv(folder / name, rows)
    pictures = []
    for name, draw in report.pictures().items():
        with drawing(folder / name, say):
            draw(folder / name)
            pictures.append((folder / name).read_bytes())
    replace_file(folder / PAGE, _page(report, result, about, pictures).encode(errors="replace"))


# -- the page --------------------------------------------------------------------------------------

_TEMPLATE = Path(__file__).with_name("report.html")
_MOST_IMAGES = 48
"""The largest number of images on the page."""
_SIDE = 192
"""The longest side of an image on the page, in pixels."""


def _page(report: Report, result: Evaluation, about: str, pictures: Sequence[bytes]) -> str:
    """Return the page, which needs no other files."""
    figures = {
        "images": f"{result.images:,}",
        "unreadable images, left out": f"{result.left_out:,}" if result.left_out else "",
        **report.summary(result),
    }
    table, errors = report.page_table(), report.errors
    worst = errors[:_MOST_IMAGES]
    noun, wrong = report.mistake
    were = f"{noun} was" if len(errors) == 1 else f"{noun}s were"
    images_note = f"{len(errors):,} {were} {wrong}"
    if len(errors) > len(worst):
        images_note += f", here the first {len(worst)}"
    # In the order in which they are stored: a table reads several at a time.
    numbers = np.unique(worst["index"]).tolist()
    thumbnails = {index: _thumbnail(report, index) for index in numbers}
    parts = {
        "about": _text(about),
        "definitions": report.definitions,
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "figures": _rows([[name, value] for name, value in figures.items() if value]),
        "pictured": report.pictured,
        "pictures": "".join(f'<img src="{_url(content, "png")}" alt="">' for content in pictures),
        "listed": table.title,
        "table_note": table.note,
        "text_columns": ", ".join(f":nth-child({column})" for column in table.text_columns),
        "header": "".join(f"<th>{_text(name)}</th>" for name in table.header),
        "classes": _rows(table.rows),
        "images_note": f"{images_note}. {report.listed_in} lists all. {report.hint}",
        "worst": "".join(
            f"<figure>{thumbnails[int(error['index'])]}<figcaption>"
            "<b>{}</b> {} <b>{}</b>{}".format(*map(_text, report.caption(error)))
            + f"<small>{_text(report.path_of(error))}</small></figcaption></figure>"
            for error in worst
        ),
    }
    return string.Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(parts)


def _thumbnail(report: Report, index: int) -> str:
    """Return a small picture of an image of the split for the page, or why there is none."""
    try:
        picture, content = report.split.thumbnail(index, _SIDE), io.BytesIO()
    except (BrokenImageError, DataFolderError) as error:
        return f"<div>{_text(str(error))}</div>"
    picture.save(content, format="jpeg", quality=85)
    return f'<img src="{_url(content.getvalue(), "jpeg")}" alt="">'


def _url(content: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _text(text: str) -> str:
    return html.escape(printable(text))


def _rows(rows: Sequence[Sequence[Any]]) -> str:
    cells = ("".join(f"<td>{_text(str(cell))}</td>" for cell in row) for row in rows)
    return "".join(f"<tr>{each}</tr>" for each in cells)
