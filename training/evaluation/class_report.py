"""The report of ``--eval_report``: what the images of each class were classified as.

Each process counts what the images on its devices were classified as. The first one adds the counts
up, gets the mistakes of all, and writes tables, pictures, and a page with the worst images.
"""

from __future__ import annotations

import base64
import functools
import html
import io
import math
import string
from collections.abc import Callable, Sequence
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
from training.evaluation.class_figures import draw_confusion, draw_reliability
from training.evaluation.class_scores import (
    BIN,
    BINS,
    NOT_A_NUMBER,
    calibration_error,
    count_bins,
    count_pairs,
    counts_by_class,
    top5_by_class,
)
from training.files import check_folder_writable, folder_at, is_url
from training.logs.by_class import ByClass
from training.logs.figures import drawing
from training.logs.records import Evaluation
from training.objectives.classify import TOP
from training.processes import exchange
from training.resolve import Run

PER_CLASS, CONFUSION, ERRORS = "per_class.csv", "confusion.csv", "errors.csv"
CONFUSION_PICTURE, RELIABILITY_PICTURE = "confusion.png", "reliability.png"
PAGE = "evaluation.html"


def report_folder(run: Run) -> Path:
    """Return the folder of ``--eval_report``. Raises UsageError if it cannot be written to."""
    assert run.config.use.eval_report is not None
    folder = folder_at(run.config.use.eval_report)
    if is_url(folder):
        raise UsageError(f"--eval_report {folder}: use a folder of this machine")
    check_folder_writable(folder, "--eval_report")
    return folder


# -- what is reported ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClassReport:
    """What the images of a validation split were classified as."""

    names: Sequence[str]
    """The names of classes by label."""
    split: Split
    pairs: np.ndarray
    """The pairs of label and prediction that occur, of dtype PAIR, sorted."""
    bins: np.ndarray
    """The probabilities of predictions, (BINS,), of dtype BIN."""
    errors: np.ndarray
    """The images that were classified wrongly, of dtype PREDICTION, the worst first."""

    @functools.cached_property
    def scores(self) -> ByClass:
        return counts_by_class(self.pairs, self.names)

    @functools.cached_property
    def top5(self) -> np.ndarray:
        """``top5_by_class``."""
        return top5_by_class(self.pairs, len(self.names))

    @property
    def mistakes(self) -> np.ndarray:
        """The pairs of a label and another prediction, the most frequent first."""
        wrong = self.pairs[self.pairs["label"] != self.pairs["predicted"]]
        return wrong[np.argsort(-wrong["images"], kind="stable")]

    def name_of(self, predicted: int) -> str:
        """Return the name of a class that was predicted."""
        return "not a number" if predicted == NOT_A_NUMBER else self.names[predicted]

    def path_of(self, error: np.void) -> str:
        """Return the path of an image of ``errors`` as the source knows it, without secrets."""
        return without_secrets(self.split.name_of(int(error["index"])))

    @property
    def values(self) -> dict[str, Any]:
        """Everything for ``--json``: percentages, None where they are not defined."""
        scores, bins = self.scores, self.bins
        columns = zip(
            self.names,
            scores.images.tolist(),
            *(map(_percent, each) for each in (scores.precision, scores.recall, scores.f1)),
            map(_percent, self.top5),
            scores.predicted.tolist(),
            strict=True,
        )
        keys = "label class support precision recall f1 top5 predicted".split()
        edges = [100 * place / BINS for place in range(BINS + 1)]
        return {
            "balanced_accuracy": _percent(scores.balanced_accuracy),
            "macro": {name: _percent(value) for name, value in scores.macro._asdict().items()},
            "largest_class": _percent(scores.largest_share),
            "calibration": {
                "ece": _percent(calibration_error(bins)),
                "bins": [
                    {
                        "above": low,
                        "to": high,
                        "images": count,
                        "accuracy": _percent(correct / count) if count else None,
                        "probability": _percent(total / count) if count else None,
                    }
                    for low, high, (count, correct, total) in zip(
                        edges[:-1], edges[1:], bins.tolist(), strict=True
                    )
                ],
            },
            "classes": [
                dict(zip(keys, (label, *row), strict=True)) for label, row in enumerate(columns)
            ],
            "confusion": [
                {"class": self.names[label], "predicted": self.name_of(predicted), "images": count}
                for label, predicted, count, _ in self.pairs.tolist()
            ],
            "errors": [
                {
                    "path": self.path_of(error),
                    "label": self.names[error["label"]],
                    "prediction": self.name_of(error["predicted"]),
                    "probability": _number(error["probability"]),
                    "label_probability": _number(error["label_probability"]),
                }
                for error in self.errors
            ],
        }


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _percent(fraction: float) -> float | None:
    return _number(100 * fraction)


def gather_report(
    predictions: np.ndarray, backend: Backend, split: Split, names: Sequence[str]
) -> ClassReport | None:
    """Return the report in the first process, None in the others; all must call it.

    ``predictions``: of this process's images (``Accuracy.predictions``); ``names``: by label.
    """
    shards = exchange.all_gather_object(backend.batch_shard)
    if shards.index(backend.batch_shard) != exchange.rank():  # another process has the same images
        predictions = predictions[:0]
    # The sum of an image's probabilities is NaN if a logit is not finite.
    invalid = ~np.isfinite(predictions["probability"])
    predictions["predicted"][invalid] = NOT_A_NUMBER
    errors = predictions[predictions["label"] != predictions["predicted"]]

    pairs = exchange.gather_rows(count_pairs(predictions))
    bins = exchange.gather_rows(count_bins(predictions))
    errors = exchange.gather_rows(errors)
    if not backend.is_main:
        return None
    total = np.zeros(BINS, BIN)
    for name in ("images", "correct", "probability"):
        total[name] = bins[name].reshape(-1, BINS).sum(axis=0)
    return ClassReport(names, split, count_pairs(pairs), total, worst_first(errors))


def worst_first(errors: np.ndarray) -> np.ndarray:
    """Return wrong predictions, of dtype PREDICTION, the most probable first: NaN, then by the
    probabilities of prediction and label, then in the order of the images."""
    probability = np.nan_to_num(errors["probability"], nan=np.inf)
    order = np.lexsort((errors["index"], errors["label_probability"], -probability))
    return errors[order]


# -- its files -------------------------------------------------------------------------------------


def write_report(
    report: ClassReport, result: Evaluation, about: str, folder: Path, say: Callable[[str], None]
) -> None:
    """Write the tables, pictures and page of a report into ``folder``. Raises OSError, except for
    pictures, whose failure is logged with ``say``.

    ``result``: of the same evaluation; ``about``: which model and data these are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (
        (PER_CLASS, _per_class(report)),
        (CONFUSION, _confusion(report)),
        (ERRORS, _errors(report)),
    ):
        write_csv(folder / name, rows)
    draw_matrix = functools.partial(draw_confusion, report.pairs, report.names)
    pictures = []
    for name, draw in (
        (CONFUSION_PICTURE, draw_matrix),
        (RELIABILITY_PICTURE, functools.partial(draw_reliability, report.bins)),
    ):
        with drawing(folder / name, say):
            draw(folder / name)
            pictures.append((folder / name).read_bytes())
    replace_file(folder / PAGE, _page(report, result, about, pictures).encode(errors="replace"))


def _shown(fraction: float) -> str:
    """Return a percentage for a table; "" if it is not defined."""
    return f"{100 * fraction:.2f}" if math.isfinite(fraction) else ""


def _per_class(report: ClassReport) -> list[list[Any]]:
    scores, mostly = report.scores, dict[int, tuple[str, int]]()
    for label, predicted, images, _ in report.mistakes.tolist():
        mostly.setdefault(label, (report.name_of(predicted), images))
    header = "label class support precision recall f1 top5 predicted mostly_mistaken_for times"
    rows: list[list[Any]] = [header.split()]
    for label, name in enumerate(report.names):
        figures = (scores.precision, scores.recall, scores.f1, report.top5)
        shown = (_shown(each[label]) for each in figures)
        others = (scores.predicted[label], *mostly.get(label, ("", 0)))
        rows.append([label, name, scores.images[label], *shown, *others])
    return rows


def _confusion(report: ClassReport) -> list[list[Any]]:
    rows: list[list[Any]] = [["class", "predicted", "images"]]
    for label, predicted, images, _ in report.pairs.tolist():
        rows.append([report.names[label], report.name_of(predicted), images])
    return rows


def _errors(report: ClassReport) -> list[list[Any]]:
    rows: list[list[Any]] = [["path", "label", "prediction", "probability", "label_probability"]]
    for error in report.errors:
        probabilities = (f"{error[name]:.6f}" for name in ("probability", "label_probability"))
        names = (report.names[error["label"]], report.name_of(error["predicted"]))
        rows.append([report.path_of(error), *names, *probabilities])
    return rows


# -- the page --------------------------------------------------------------------------------------

_TEMPLATE = Path(__file__).with_name("class_report.html")
_MOST_IMAGES = 48
"""The largest number of images on the page."""
_MOST_CLASSES = 100
"""The largest number of classes in the table of the page."""
_SIDE = 192
"""The longest side of an image on the page, in pixels."""


def _page(report: ClassReport, result: Evaluation, about: str, pictures: Sequence[bytes]) -> str:
    """Return the page, which needs no other files."""
    scores, errors = report.scores, report.errors
    macro = scores.macro
    figures = {
        "images": f"{result.images:,}",
        "unreadable images, left out": f"{result.left_out:,}" if result.left_out else "",
        "accuracy (top-1)": f"{result.top1:.2f} %",
        "top-5": f"{result.top5:.2f} %" if len(report.names) > TOP else "",
        "balanced accuracy": f"{_shown(scores.balanced_accuracy)} %",
        "precision, macro average": f"{_shown(macro.precision)} %",
        "recall, macro average": f"{_shown(macro.recall)} %",
        "F1, macro average": f"{_shown(macro.f1)} %",
        "calibration error (ECE)": f"{_shown(calibration_error(report.bins))} % in {BINS} bins",
        "cross-entropy": f"{result.loss:.4f}",
        "for comparison: accuracy of always the largest class": f"{_shown(scores.largest_share)} %",
    }
    _, *rows = _per_class(report)
    table_note = ""
    if len(rows) > _MOST_CLASSES:
        lowest = np.argsort(np.nan_to_num(scores.f1, nan=np.inf), kind="stable")[:_MOST_CLASSES]
        rows = [rows[label] for label in lowest]
        table_note = (
            f"The {_MOST_CLASSES} classes with the lowest F1 of {len(report.names):,}: "
            f"{PER_CLASS} has all."
        )
    worst = errors[:_MOST_IMAGES]
    number = f"{len(errors):,} images were" if len(errors) != 1 else "1 image was"
    images_note = f"{number} classified wrongly"
    if len(errors) > len(worst):
        images_note += f", here the first {len(worst)}"
    # In the order in which they are stored: a table reads several at a time.
    thumbnails = {int(index): _thumbnail(report, int(index)) for index in sorted(worst["index"])}
    shown = {
        "about": _text(about),
        "made": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "figures": _rows([[name, value] for name, value in figures.items() if value]),
        "pictures": "".join(f'<img src="{_url(content, "png")}" alt="">' for content in pictures),
        "table_note": table_note,
        "classes": _rows(rows),
        "images_note": f"{images_note}. {ERRORS} lists all.",
        "worst": "".join(
            f"<figure>{thumbnails[int(error['index'])]}<figcaption>"
            f"<b>{_text(report.names[error['label']])}</b> taken for "
            f"<b>{_text(report.name_of(error['predicted']))}</b>, "
            f"{_shown(error['probability']) or '?'} %"
            f"<small>{_text(report.path_of(error))}</small></figcaption></figure>"
            for error in worst
        ),
    }
    return string.Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(shown)


def _thumbnail(report: ClassReport, index: int) -> str:
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
