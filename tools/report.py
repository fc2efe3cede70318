"""A report about runs as one HTML file: curves, wall time, events and configurations side by side.

``python3 -m tools.report RUN_DIR [RUN_DIR ...]`` reads the files that the runs have written, also
while they train. The page, made from ``tools/report.html``, needs no network and no other files.
"""

import html
import itertools
import json
import math
import statistics
import string
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # by its path from any folder, or by another Python
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import check_python

    check_python.check("tools.report", packages=())

from config_fields import local_path
from data.files import no_link, printable, reason_of, replace_file
from data.utf8 import use_utf8
from tools.wall_time import (
    COLOURS,
    DATA,
    PARTS,
    Account,
    account_of,
    duration,
    short_names,
    stripes,
)
from training.command_line import OneLineParser
from training.errors import UsageError
from training.feature_table import features
from training.files import read_object
from training.logs.records import (
    EVENTS_FILE,
    METRICS_FILE,
    RUN_FILE,
    damaged_lines,
    is_metric,
    is_number,
    read_events,
    read_lines,
)
from training.processes.output import exit_quietly_on_broken_pipe

MOST_RUNS = 8
"""As many as there are different colors, readable on a light page and on a dark one."""

# -- Reading what a run has written ----------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A measure over the steps of a run: two arrays of the same length, sorted by step."""

    steps: Sequence[float]
    values: Sequence[float]


@dataclass
class RecordedRun:
    """What a run's folder has, as far as it can be read."""

    name: str
    curves: dict[str, Curve] = field(default_factory=dict)
    """By the names of the measures in metrics.jsonl."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """Those of events.jsonl, but for steps."""
    account: Account | None = None
    settings: dict[str, str] = field(default_factory=dict)
    """The content of run.json, one text a setting."""
    left_out: list[str] = field(default_factory=list)
    """What could not be read, and why; each is a line."""


def read_run(folder: Path, name: str) -> RecordedRun:
    """Read a run's folder. Raises UsageError if it is none; what is damaged in it is left out."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder: give a run's --ckpt_dir")
    readers = {METRICS_FILE: _read_curves, EVENTS_FILE: _read_account, RUN_FILE: _read_settings}
    if not any((folder / file).exists() for file in readers):
        raise UsageError(f"{folder} is not a run's folder: it has none of {', '.join(readers)}")
    run = RecordedRun(name)
    for file, read in readers.items():
        problem = "not found"
        if (folder / file).exists():
            try:
                problem = read(run, folder / file)
            except (OSError, ValueError) as error:
                problem = f"cannot be read: {reason_of(error)}"
        if problem:
            run.left_out.append(f"{name}: {file}: {problem}")
    return run


def _read_curves(run: RecordedRun, path: Path) -> str:
    """Read metrics.jsonl; return what was left out."""
    points: dict[str, array[float]] = {}
    damaged = 0
    for record in read_lines(path, is_metric):
        if record is None:
            damaged += 1
            continue
        for name, value in record.items():
            if value is not None and name not in ("step", "epoch"):
                points.setdefault(name, array("d")).extend((record["step"], value))
    for name, numbers in points.items():
        steps, values = numbers[::2], numbers[1::2]
        order = sorted(range(len(steps)), key=steps.__getitem__)
        run.curves[name] = Curve([steps[n] for n in order], [values[n] for n in order])
    return damaged_lines(damaged) or ("" if points else "empty")


def _read_account(run: RecordedRun, path: Path) -> str:
    """Read events.jsonl; return what was left out."""
    events = read_events(path.parent)
    run.events = [event for event in events if event["event"] != "steps"]
    damaged = damaged_lines(events.left_out)
    try:
        run.account = account_of(events)
    except ValueError as error:
        return "; ".join(filter(None, [str(error), damaged]))
    return damaged


def _read_settings(run: RecordedRun, path: Path) -> str:
    """Read run.json, in which nothing can be left out."""
    for name, value in read_object(path).items():
        for key, setting in (value if isinstance(value, dict) else {"": value}).items():
            text = setting if isinstance(setting, str) else json.dumps(setting)
            run.settings[f"{name}.{key}".rstrip(".")] = text[:_LONGEST_SETTING]
    return ""


_LONGEST_SETTING = 400

# -- Curves as SVG ---------------------------------------------------------------------------------

_TITLES = {
    "loss": ("Training loss", ""),
    "epoch_loss": ("Training loss, mean of each epoch", ""),
    "val_loss": ("Validation loss", ""),
    "ema_val_loss": ("Validation loss, EMA", ""),
    "val_top1": ("Validation top-1, weights", "%"),
    "ema_val_top1": ("Validation top-1, EMA", "%"),
    "val_balanced_accuracy": ("Balanced accuracy, weights", "%"),
    "ema_val_balanced_accuracy": ("Balanced accuracy, EMA", "%"),
    "val_worst_recall": ("Recall of the worst class, weights", "%"),
    "ema_val_worst_recall": ("Recall of the worst class, EMA", "%"),
    "val_top5": ("Validation top-5", "%"),
    "ema_val_top5": ("Validation top-5, EMA", "%"),
    "val_knn_10": ("k-NN, k 10", "%"),
    "val_knn_20": ("k-NN, k 20", "%"),
    "val_knn_100": ("k-NN, k 100", "%"),
    "val_knn_200": ("k-NN, k 200", "%"),
    "val_probe": ("Linear probe", "%"),
    "train_rankme": ("Effective rank of features (RankMe)", ""),
    "train_feature_std": ("Standard deviation of normalized features x sqrt(width)", ""),
    "teacher_entropy": ("Entropy of the teacher's probabilities", "fraction of maximum"),
    "token_std": ("Standard deviation of normalized class tokens x sqrt(width)", ""),
    "val_segment_miou": ("Segmentation mIoU, linear probe", "%"),
    "val_segment_knn_miou": ("Segmentation mIoU, k-NN", "%"),
    **{name: (title, "%") for each in features() for name, title in each.percentages.items()},
    "images_per_s": ("Throughput", "images/s"),
    "mfu": ("MFU", "fraction of peak"),
    "data_wait": ("Waiting for data", "fraction of time"),
    **{name: (title, "") for each in features() for name, title in each.metrics.items()},
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm before clipping", ""),
}
"""The measures shown first, in this order, with their units; others follow by their own names."""
_MOST_MORE = 40
_WIDTH, _HEIGHT = 440, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 416, 8, 206
"""The frame of a panel, in its pixels."""
_BUCKETS = 300
"""A thinned curve has the lowest and the highest value of so many parts."""
SMOOTHED = 200
_OUTLIERS = 0.5
"""The percentage of a long curve, above and below, that need not fit into the frame."""


def thinned(curve: Curve) -> Curve:
    """Return the curve with at most two points for each of ``_BUCKETS`` parts: its extremes there.

    The first and the last point stay.
    """
    count = len(curve.steps)
    if count <= 2 * _BUCKETS:
        return curve
    edges = [number * count // _BUCKETS for number in range(_BUCKETS + 1)]
    chosen = {0, count - 1}
    for part in itertools.starmap(range, itertools.pairwise(edges)):
        chosen |= {chosen_by(part, key=curve.values.__getitem__) for chosen_by in (min, max)}
    at = sorted(chosen)
    return Curve([curve.steps[n] for n in at], [curve.values[n] for n in at])


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return round numbers from ``low`` to ``high``, at most ``count + 1``."""
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    steps = (power * each for each in (1, 2, 2.5, 5, 10, 20))
    step = next(each for each in steps if (high - low) / each <= count)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [number * step for number in range(first, last + 1)]


def _percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile of sorted values, interpolated between the two nearest ones."""
    place = percent / 100 * (len(values) - 1)
    below = math.floor(place)
    above = values[min(below + 1, len(values) - 1)]
    return values[below] + (place - below) * (above - values[below])


def panel(name: str, curves: Mapping[int, Curve], names: Sequence[str], last_step: float) -> str:
    """Return the panel of one measure, with a curve a run; ``names``: of all runs, by number."""
    title, unit = _TITLES.get(name, (name, ""))
    # All values fit into the frame, but outliers of long curves.
    lows, highs, largest = [], [], -math.inf
    for values in (sorted(curve.values) for curve in curves.values()):
        outliers = _OUTLIERS if len(values) > SMOOTHED else 0.0
        lows.append(_percentile(values, outliers))
        highs.append(_percentile(values, 100 - outliers))
        largest = max(largest, values[-1])
    low, high = min(lows), max(highs)
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    bottom, top = low - margin, high + margin
    above = f"maximum {largest:.4g} is cut off" if largest > top else ""

    def across(step: float) -> float:
        return _LEFT + step / last_step * (_RIGHT - _LEFT)

    def down(value: float) -> float:
        return _BOTTOM - (value - bottom) / (top - bottom) * (_BOTTOM - _TOP)

    parts = []
    for tick in _ticks(0, last_step, 5):
        parts.append(_line(across(tick), _TOP, across(tick), _BOTTOM, "grid"))
        parts.append(_text(across(tick), _BOTTOM + 15, f"{tick:,.10g}", "middle"))
    for tick in _ticks(bottom, top, 5):
        parts.append(_line(_LEFT, down(tick), _RIGHT, down(tick), "grid"))
        parts.append(_text(_LEFT - 6, down(tick) + 4, f"{tick:.6g}", "end"))
    parts.append(
        f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{_RIGHT - _LEFT}" '
        f'height="{_BOTTOM - _TOP}"/>'
    )
    parts.append('<g clip-path="url(#frame)">')
    for number, curve in curves.items():
        drawn = {"main": curve}
        if len(curve.steps) > SMOOTHED:
            # The mean of each hundredth part, around each point that has so many.
            window = len(curve.steps) // 100
            sums = [0.0, *itertools.accumulate(curve.values)]
            pairs = zip(sums[window:], sums[:-window], strict=True)
            means = [(end - start) / window for end, start in pairs]
            middles = curve.steps[window // 2 :][: len(means)]
            drawn = {"raw": curve, "main": Curve(middles, means)}
        for kind, line in drawn.items():
            few = thinned(line)
            places = [(across(s), down(v)) for s, v in zip(few.steps, few.values, strict=True)]
            points = " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
            parts.append(
                f'<polyline class="r{number} {kind}" data-name="{html.escape(names[number])}" '
                f'points="{points}"/>'
            )
            if len(places) <= 40:
                parts += [
                    f'<circle class="r{number} point" cx="{x:.2f}" cy="{y:.2f}" r="2.5"/>'
                    for x, y in places
                ]
    parts.append(f'</g><line class="cursor" y1="{_TOP}" y2="{_BOTTOM}" visibility="hidden"/>')
    notes = ", ".join(filter(None, [unit, above]))
    caption = f"{html.escape(printable(title))} <span>{html.escape(notes)}</span>"
    return (
        f'<figure><figcaption>{caption}</figcaption><svg class="panel" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" data-frame="{_LEFT} {_RIGHT} {_TOP} {_BOTTOM}" '
        f'data-range="{last_step!r} {bottom!r} {top!r}">{"".join(parts)}</svg></figure>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


# -- Wall time: one lane a run ---------------------------------------------------------------------

_LANE, _LANES_LEFT, _LANES_RIGHT = 62, 10, 1190
_PIXELS = _LANES_RIGHT - _LANES_LEFT


def lanes(runs: Mapping[int, RecordedRun]) -> str:
    """Return where each run's time went, from its first start on, and its events above that."""
    accounts = {number: run.account for number, run in runs.items() if run.account}
    if not accounts:
        return "<p>No run has an events.jsonl, which records where the time went.</p>"
    first = {number: min(s.began for s in a.spans) for number, a in accounts.items() if a.spans}
    ends = [s.ended - first[number] for number, a in accounts.items() for s in a.spans]
    longest = max(ends, default=0.0) or 1.0
    pixel_s = longest / _PIXELS
    parts = []
    height = _LANE * len(accounts) + 34
    units = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
    unit, size = next((u, s) for u, s in units.items() if longest >= 2 * s or s == 1)
    for tick in _ticks(0, longest / size, 12):
        x = _LANES_LEFT + tick * size / longest * _PIXELS
        parts.append(_line(x, 0, x, height - 30, "grid"))
        parts.append(_text(x, height - 16, f"{tick:,.6g}", "middle"))
    parts.append(_text(_LANES_RIGHT, height - 2, f"{unit} since a run's first start", "end"))
    for lane, (number, account) in enumerate(accounts.items()):
        top = lane * _LANE + 16
        name = runs[number].name
        name = html.escape(name if len(name) <= 60 else f"{name[:30]} ... {name[-25:]}")
        parts.append(f'<g class="r{number}">')
        parts.append(f'<text class="name" x="{_LANES_LEFT}" y="{top}">{name}</text>')
        if number in first:
            for part, start, end in stripes(account, first[number], pixel_s, _PIXELS):
                parts.append(
                    f'<rect x="{_LANES_LEFT + start}" y="{top + 24}" width="{end - start}" '
                    f'height="18" fill="{COLOURS[part]}"><title>{part}</title></rect>'
                )
            parts += _marks(runs[number], first[number], pixel_s, top + 14)
        parts.append("</g>")
    swatches = "".join(
        f'<span><span class="swatch" style="background:{colour}"></span> {part}</span>'
        for part, colour in COLOURS.items()
        if part != DATA and any(account.seconds[part] for account in accounts.values())
    )
    signs = "".join(
        f'<span><svg viewBox="-7 -7 14 14" style="width:14px;display:inline">{sign.drawn}</svg> '
        f"{sign.name}</span>"
        for sign in _SIGNS.values()
    )
    # The table of goodput: the share of each part of a run's time.
    rows = []
    for number, account in accounts.items():
        _, *shares = (f"{share:.2%}" for share in account.shares.values())
        known = [_name(number, runs[number]), duration(account.wall_s), f"{account.goodput:.2%}"]
        rows.append([*known, *shares])
    table = _table(["run", "wall time", "goodput", *PARTS[1:]], rows)
    return (
        f'<div class="legend" style="position:static">{swatches}{signs}</div>'
        f'<div class="scroll"><svg class="lanes" viewBox="0 0 1200 {height}">{"".join(parts)}</svg>'
        f'</div><div class="scroll">{table}</div>'
    )


class _Sign(NamedTuple):
    """What an event looks like in a lane."""

    name: str
    pixels: int
    """Signs within so many are one."""
    drawn: str


_SIGNS = {
    "start": _Sign("start", 6, '<path class="start" d="M-4,-5 L5,0 L-4,5 Z"/>'),
    "resize": _Sign(
        "start on a different number of devices",
        6,
        '<path class="resize" d="M-4,-1 L0,-5 L4,-1 M-4,1 L0,5 L4,1"/>',
    ),
    "save": _Sign("checkpoint", 4, '<path class="save" d="M0,-5 L0,5"/>'),
    "eval": _Sign("evaluation", 8, '<circle class="eval" r="3.5"/>'),
    "failure": _Sign(
        "failure (last sign of life)", 6, '<path class="failure" d="M-5,-5 L5,5 M-5,5 L5,-5"/>'
    ),
    "other": _Sign("other event", 6, '<path class="other" d="M0,-5 L5,0 L0,5 L-5,0 Z"/>'),
}
_MARKS_NAMED = 5
_MOST_DEVICES = 10**7


def _marks(run: RecordedRun, began: float, pixel_s: float, top: float) -> list[str]:
    """Return the signs of a run's events; those of a kind within some pixels are one sign."""
    texts: dict[tuple[str, int], list[str]] = {}

    def mark(kind: str, time: float, text: str) -> None:
        x = round((time - began) / pixel_s / _SIGNS[kind].pixels) * _SIGNS[kind].pixels
        at = datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        texts.setdefault((kind, x), []).append(f"{text}, {at}")

    before: float | None = None
    for event in run.events:
        kind, step = str(event["event"]), event.get("step", "?")
        if kind == "start":
            devices = event.get("devices")
            devices = devices if is_number(devices, _MOST_DEVICES) else None
            on = f" on {devices:,.0f} devices" if devices else ""
            if devices and before and devices != before:
                kind, on = "resize", f"{on} (previously {before:,.0f})"
            mark(kind, float(event["process_started"]), f"start after step {step}{on}")
            before = devices or before
        elif kind == "eval" or (kind == "save" and event.get("written")):
            mark(kind, float(event["time"]), f"{_SIGNS[kind].name} at step {step}")
        elif kind not in ("save", "steps", "first_step", "stop", "end"):
            known = {name: event[name] for name in event if name not in ("event", "time")}
            mark("other", float(event["time"]), f"{kind} {json.dumps(known)}"[:_LONGEST_SETTING])
    for time in run.account.failed_at if run.account else ():
        mark("failure", time, _SIGNS["failure"].name)
    parts = []
    order = list(_SIGNS)
    for (kind, x), lines in sorted(texts.items(), key=lambda item: order.index(item[0][0])):
        more = f"\n... {len(lines):,} in total" if len(lines) > _MARKS_NAMED else ""
        title = html.escape("\n".join(lines[:_MARKS_NAMED]) + more)
        parts.append(
            f'<g transform="translate({_LANES_LEFT + x},{top})">{_SIGNS[kind].drawn}'
            f"<title>{title}</title></g>"
        )
    return parts


# -- Tables ----------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table; ``head`` and ``rows`` are HTML, a cell may be a whole ``<td>``."""
    first = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        "<tr>"
        + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    return f'<table class="{kind}"><tr>{first}</tr>{body}</table>'


def _name(number: int, run: RecordedRun) -> str:
    return f'<span class="name r{number}">{html.escape(run.name)}</span>'


def summary(runs: Mapping[int, RecordedRun]) -> str:
    """Return the table of the runs' figures; a column is left out if no run has it."""
    rows = []
    for run in runs.values():
        cells: dict[str, str] = {}
        steps = [curve.steps[-1] for curve in run.curves.values()]
        cells["step"] = f"{max(steps):,.0f}" if steps else ""
        if account := run.account:
            ends = [event for event in run.events if event["event"] in ("start", "stop")]
            last = ends[-1] if ends else {}
            cells["ended"] = html.escape(str(last.get("how", "no end recorded")))
            cells["wall time"] = duration(account.wall_s)
            cells["goodput"] = f"{account.goodput:.2%}"
            cells["starts"] = str(account.starts)
            cells["failures"] = str(len(account.failed_at))
            cells["lost steps"] = f"{account.lost_steps:,}"
            cells["checkpoints"] = f"{len(account.saves):,}"
        if curve := run.curves.get("images_per_s"):
            cells["median images/s"] = f"{statistics.median(curve.values):,.4g}"
        if curve := run.curves.get("loss"):
            cells["last loss"] = f"{curve.values[-1]:.4f}"
        for name, title in _BEST.items():
            if curve := run.curves.get(name):
                best = max(range(len(curve.values)), key=curve.values.__getitem__)
                cells[title] = f"{curve.values[best]:.2f}&nbsp;% at step {curve.steps[best]:,.0f}"
        rows.append(cells)
    columns = list(dict.fromkeys(name for cells in rows for name in cells))
    table = [
        [_name(number, run), *(cells.get(column, "") for column in columns)]
        for (number, run), cells in zip(runs.items(), rows, strict=True)
    ]
    return _table(["run", *columns], table)


_BEST = {
    "val_top1": "best top-1, weights",
    "ema_val_top1": "best top-1, EMA",
    "val_knn_10": "best k-NN, k 10",
    "val_knn_20": "best k-NN, k 20",
    "val_probe": "best probe",
    "val_segment_miou": "best mIoU",
}


def settings(runs: Mapping[int, RecordedRun]) -> str:
    """Return the configurations side by side: first what differs, then, folded, what does not."""
    have = {number: run for number, run in runs.items() if run.settings}
    if not have:
        return "<p>No run has a run.json, which records the configuration.</p>"
    names = list(dict.fromkeys(name for run in have.values() for name in run.settings))
    rows: dict[bool, list[list[str]]] = {True: [], False: []}
    for name in names:
        values = [run.settings.get(name) for run in have.values()]
        commonest = Counter(values).most_common(1)[0][0]
        differs = len(set(values)) > 1
        cells = [html.escape(name)]
        for value in values:
            text = "-" if value is None else html.escape(value)
            cells.append(f'<td class="differs">{text}</td>' if value != commonest else text)
        rows[differs].append(cells)
    head = ["setting", *(_name(number, run) for number, run in have.items())]
    same = _table(head, rows[False], "settings")
    if len(have) == 1:
        return f'<div class="scroll">{same}</div>'
    differing = (
        _table(head, rows[True], "settings") if rows[True] else "<p>All settings are the same.</p>"
    )
    return (
        "<p>Settings that differ; values that most runs do not have are highlighted.</p>"
        f'<div class="scroll">{differing}</div><details><summary>{len(rows[False])} identical '
        f'settings</summary><div class="scroll">{same}</div></details>'
    )


# -- The page --------------------------------------------------------------------------------------

_PAGE = Path(__file__).with_suffix(".html")
_MARK = b'<meta name="generator" content="vit-fsdp tools.report">'
"""What a report has near its start, as no other file."""


def page(recorded: Sequence[RecordedRun], made: datetime) -> str:
    """Return the page of these runs; ``made``: when, in UTC."""
    runs = dict(enumerate(recorded))
    names = [run.name for run in recorded]
    measures = dict.fromkeys([*_TITLES, *sorted({m for run in recorded for m in run.curves})])
    last_step = max((c.steps[-1] for run in recorded for c in run.curves.values()), default=0.0)
    last_step = 1.01 * float(last_step) or 1.0  # the last points are whole, too
    panels = {
        name: panel(name, curves, names, last_step)
        for name in list(measures)[: len(_TITLES) + _MOST_MORE]
        if (curves := {n: run.curves[name] for n, run in runs.items() if name in run.curves})
    }
    more = "".join(text for name, text in panels.items() if name not in _TITLES)
    left_out = [html.escape(line) for run in recorded for line in run.left_out]
    if len(measures) > len(_TITLES) + _MOST_MORE:
        left_out.append(f"{len(measures) - len(_TITLES) - _MOST_MORE:,} more measures")
    shown = {
        "title": html.escape(", ".join(names)),
        "heading": "A run" if len(runs) == 1 else f"{len(runs)} runs",
        "made": f"Created on {made:%Y-%m-%d %H:%M} UTC from what the runs had written by then.",
        "hidden": "\n".join(
            f"body:has(#show{n}:not(:checked)) svg .r{n} {{ display: none; }}" for n in runs
        ),
        "frame": f'x="{_LEFT}" y="{_TOP}" width="{_RIGHT - _LEFT}" height="{_BOTTOM - _TOP}"',
        "left_out": f'<div class="left_out">Left out:<br>{"<br>".join(left_out)}</div>'
        if left_out
        else "",
        "legend": "".join(
            f'<label><input type="checkbox" id="show{n}" checked> {_name(n, run)}</label>'
            for n, run in runs.items()
        ),
        "summary": summary(runs),
        "time": lanes(runs),
        "smoothed": str(SMOOTHED),
        "panels": "".join(text for name, text in panels.items() if name in _TITLES),
        "more_panels": f"<details><summary>Other measures</summary>"
        f'<div class="panels">{more}</div></details>'
        if more
        else "",
        "settings": settings(runs),
    }
    return string.Template(_PAGE.read_text(encoding="utf-8")).substitute(shown)


# -- The command line ------------------------------------------------------------------------------

_PROGRAM = "tools.report"
_REPORT = "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page; return the exit code."""
    parser = OneLineParser(
        _PROGRAM,
        "Write a report about runs as one self-contained HTML file: curves, where the time went, "
        "events, and configurations side by side.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=local_path,
        metavar="RUN_DIR",
        help=f"a run's --ckpt_dir; at most {MOST_RUNS}",
    )
    parser.add_argument(
        "--output",
        type=local_path,
        metavar="FILE",
        help=f"write the report to this file (default: {_REPORT} in the first RUN_DIR)",
    )
    options = parser.parse_args(argv)
    try:
        if len(options.runs) > MOST_RUNS:
            raise UsageError(f"{len(options.runs)} runs given: a report shows at most {MOST_RUNS}")
        if len({folder.resolve() for folder in options.runs}) < len(options.runs):
            raise UsageError("the same folder is given twice: drop one of the two")
        names = short_names(options.runs)
        runs = [
            read_run(folder, printable(name))
            for folder, name in zip(options.runs, names, strict=True)
        ]
        path = options.output or options.runs[0] / _REPORT
        text = page(runs, datetime.now(UTC))
        try:
            if path.is_symlink() or path.exists():  # links and files that are no report stay
                with open(path, "rb", opener=no_link) as file:
                    if _MARK not in file.read(4096):
                        raise UsageError(
                            f"{path} is not a report and will not be overwritten: set another "
                            "--output"
                        )
            replace_file(path, text.encode(errors="replace"))
        except OSError as error:
            raise UsageError(f"cannot write {path}: {reason_of(error)}") from None
    except UsageError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    for line in (line for run in runs for line in run.left_out):
        print(f"left out: {line}")
    print(f"report: {path}")
    return 0


if __name__ == "__main__":
    use_utf8()
    with exit_quietly_on_broken_pipe(_PROGRAM):
        sys.exit(main())
