"""Goodput: the share of a run's wall time spent in useful steps; docs/files.md defines the parts.

``python3 -m tools.goodput RUN_DIR`` reads events.jsonl, prints a table, writes a plot, and suggests
how often to save. ``--chips`` forecasts what failures will cost a run of that size.
"""

import functools
import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # by its path from any folder, or by another Python
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import check_python

    check_python.check("tools.goodput")

from config_fields import bounded, local_path, seconds
from data.utf8 import use_utf8
from training.errors import UsageError
from training.flags import OneLineParser
from training.logs.figures import as_label, pyplot, save_figure
from training.logs.records import EVENTS_FILE, damaged_lines, is_number, read_events
from training.processes.output import exit_quietly_on_broken_pipe

# -- Where the time went ---------------------------------------------------------------------------

USEFUL, DATA, FIRST, OTHER, EVAL, SAVE, LOCAL, LOST, DOWN = PARTS = (
    "useful steps",
    "waiting for data",
    "first step, compiling",
    "starting and ending",
    "evaluation",
    "checkpoints",
    "local checkpoints",
    "lost work",
    "down",
)
"""The parts of wall time. Lost work: steps that a later start repeated. Down: from the last sign of
life of one start to the start of the next one."""
_SPANS = {"eval": EVAL, "save": SAVE, "local_save": LOCAL, "first_step": FIRST}
NOTICED, ENDED, REST = "noticed", "ended", "other"
RESTART_PARTS = (
    *(NOTICED, ENDED),  # by the launcher
    *("imports", "data", "devices", "agreed", "model", "loaded"),  # until the loop
    *("batch", "compiled", "step"),  # the first step
    REST,
)
"""The parts of a restart, in their order but for the rest; docs/files.md says what each is."""
_MOST_BYTES = 1e18


@dataclass(slots=True)
class Span:
    """A stretch of a run's wall time, and the part of it that it counts for."""

    part: str
    """For steps ``USEFUL``, although they may have waited for data."""
    began: float
    """In seconds since 1970, as ``ended``."""
    ended: float
    steps: int = 0
    last: int = 0
    """The number of the last of the steps."""
    waited: float = 0.0
    """Seconds that the steps waited for data."""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Restart:
    """From the last sign of life of a start to the end of the next one's first step."""

    step: int
    """The first step's number."""
    seconds: float
    parts: Mapping[str, float]
    """Of ``RESTART_PARTS`` those that are known; they add up to ``seconds``. {} if an earlier
    version of the program was restarted."""


@dataclass
class Account:
    """A run's wall time, in seconds."""

    spans: list[Span] = field(default_factory=list)
    """Where it went, in no certain order; they do not overlap."""
    starts: int = 0
    failed_at: list[float] = field(default_factory=list)
    """The last signs of life, in seconds since 1970, of starts that ended neither at the last step
    nor by a signal."""
    saves: list[float] = field(default_factory=list)
    """How long training stopped for each checkpoint."""
    storage: list[Mapping[str, float]] = field(default_factory=list)
    """Of each complete checkpoint its ``bytes``, and the seconds of writing it, ``write_s``, while
    training continued or not."""
    local: list[Mapping[str, float]] = field(default_factory=list)
    """Of each checkpoint on the hosts' own disks ``bytes`` of all hosts, and seconds of the slowest
    process: ``write_s`` on its disk, ``copy_s`` to its peer."""
    restarts: list[Restart] = field(default_factory=list)

    @functools.cached_property
    def seconds(self) -> dict[str, float]:
        """The sum of each part."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for span in self.spans:
            seconds[span.part] += span.seconds - span.waited
            seconds[DATA] += span.waited
        return seconds

    @property
    def steps(self) -> int:
        """Useful steps; the first one of each start is not counted."""
        return sum(span.steps for span in self.spans if span.part == USEFUL)

    @property
    def lost_steps(self) -> int:
        return sum(span.steps for span in self.spans if span.part == LOST)

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of useful steps, from 0 to 1; NaN if no time has passed."""
        return self.seconds[USEFUL] / self.wall_s if self.wall_s else math.nan

    @property
    def step_s(self) -> float:
        """Seconds a useful step, waiting for data included; NaN without any step."""
        both = self.seconds[USEFUL] + self.seconds[DATA]
        return both / self.steps if self.steps else math.nan


def account_of(events: Iterable[Mapping[str, Any]]) -> Account:
    """Return where the time of a run went, from its first start on.

    ``events``: those of ``training/logs/events.py``, in order. The time up to each counts for what
    it describes, so the parts add up to the whole; that between a start that reached its last step
    and the next one is not counted. Raises ValueError if there is no start.
    """
    account = Account()
    taken: list[Span] = []
    """Steps that may become lost work if a later start repeats them."""
    at, ended, last_sign = math.nan, "", math.nan
    started: Mapping[str, Any] | None = None
    """A start after the first one whose first step has not been made yet."""

    def spend(part: str, until: float) -> None:
        if until > at:
            account.spans.append(Span(part, at, until))

    for event in events:
        kind, now = event["event"], float(event["time"])
        if kind == "start":
            began = float(event["process_started"])
            if account.starts:
                if ended != "completed":
                    spend(DOWN, began)
                if ended in ("", "failed"):
                    account.failed_at.append(at)
                last_sign = began if ended == "completed" else at
                account.spans += _cut_repeated(taken, int(event["step"]))
                at, started = max(began, at), event
            else:
                at = began
            account.starts += 1
            ended = ""
        if not account.starts:
            continue
        if kind == "steps":
            waited = max(0.0, min(float(event["waited"]), now - at))
            steps, last = int(event["steps"]), int(event["step"])
            taken.append(Span(USEFUL, at, max(at, now), steps, last, waited))
            account.spans.append(taken[-1])
        elif kind in _SPANS:
            inside = max(0.0, min(float(event["seconds"]), now - at))
            spend(OTHER, now - inside)
            at = max(at, now - inside)
            spend(_SPANS[kind], now)
            if kind == "first_step" and started:  # one of another shape is no restart
                account.restarts.append(_restart_of(started, event, last_sign))
                started = None
            # Of the local save before this one; of checkpoints completed since the event before.
            account.local += _figures_of(event, "bytes", "write_s", "copy_s")
            completed = event.get("completed")
            for checkpoint in completed if isinstance(completed, list) else ():
                account.storage += _figures_of(checkpoint, "bytes", "write_s")
            if event.get("written"):
                account.saves.append(inside)
        elif kind in ("start", "stop", "end"):
            spend(OTHER, now)
            ended = event.get("how", ended)
        else:
            continue
        at = max(at, now)
    if not account.starts:
        raise ValueError("it records no start")
    if ended == "failed":
        account.failed_at.append(at)
    return account


def _cut_repeated(taken: list[Span], step: int) -> list[Span]:
    """Cut off the steps after ``step``, which a start from there repeats; return them as lost."""
    lost = []
    while taken and taken[-1].last > step:
        span = taken[-1]
        if steps := min(span.steps, span.last - step):
            share = steps / span.steps
            cut = span.ended - share * span.seconds
            lost.append(Span(LOST, cut, span.ended, steps, span.last))
            span.ended, span.waited = cut, span.waited * (1 - share)
            span.steps, span.last = span.steps - steps, span.last - steps
        if span.steps:
            break
        taken.pop()
    return lost


def _figures_of(values: Any, *names: str) -> list[Mapping[str, float]]:
    """Return these numbers of a JSON object; [] if it has not all of them."""
    if isinstance(values, dict) and all(is_number(values.get(n), _MOST_BYTES) for n in names):
        return [{name: values[name] for name in names}]
    return []


def _restart_of(
    start: Mapping[str, Any], first_step: Mapping[str, Any], last_sign: float
) -> Restart:
    """Return the restart of these events; ``last_sign``: of the start before."""
    seconds = max(0.0, float(first_step["time"]) - last_sign)
    began, noticed = float(start["process_started"]), start.get("failed_at")
    parts, recorded = {}, first_step.get("parts")
    if isinstance(recorded, dict):
        if is_number(noticed) and last_sign <= noticed <= began:
            parts[NOTICED] = noticed - last_sign
        parts[ENDED] = max(0.0, began - last_sign - parts.get(NOTICED, 0.0))
        parts |= {n: s for n, s in recorded.items() if n in RESTART_PARTS and is_number(s)}
        parts[REST] = 0.0
        parts[REST] = max(0.0, seconds - sum(parts.values()))
    return Restart(int(start["step"]) + 1, seconds, parts)


# -- How often to save, and what failures cost: closed forms ---------------------------------------

FAILURES_PER_CHIP_YEAR = 419 / (16384 * 54 / 365.25)
"""Unexpected interruptions while Llama 3 405B was trained: 419 in 54 days on 16,384 H100 GPUs ("The
Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.4). No such figure is published for TPUs."""
_YEAR_S = 365.25 * 86400


def young(save_s: float, mtbf_s: float) -> float:
    """Return the first-order best interval between checkpoints, sqrt(2 * their cost * MTBF).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of
    the ACM 17(9), 1974. Daly's estimate is less by about the cost of one checkpoint.
    """
    return math.sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Return the higher-order best interval: seconds of training between two checkpoints.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22, 2006.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return young(save_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def expected_goodput(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the expected share of training in a run's time, from 0 to 1.

    The complete model of Daly's paper: failures are a Poisson process that also hits checkpoints
    and restarts. ``interval_s``: training between two checkpoints; ``save_s``: how long training
    stops for one; ``restart_s``: from a failure to the first step of the next start.
    """
    try:
        spent_s = mtbf_s * math.expm1((interval_s + save_s) / mtbf_s)
        return interval_s / (spent_s * math.exp(restart_s / mtbf_s))
    except OverflowError:
        return 0.0


def forecast(options: Namespace, account: Account | None) -> dict[str, float]:
    """Return the interval by Daly's estimate, the goodput that it leads to, and its inputs.

    Times that the flags leave out are those that the run has measured. Raises UsageError if there
    are none, or if failures leave no progress.
    """
    save_s, restart_s = options.save_s, options.restart_s
    if account and save_s is None and account.saves:
        save_s = max(1e-3, sum(account.saves) / len(account.saves))
    if account and restart_s is None and account.restarts:
        restart_s = sum(restart.seconds for restart in account.restarts) / len(account.restarts)
    elif account and restart_s is None and account.steps:  # that of the first start
        first_step = min(span.began for span in account.spans if span.steps)
        before = [span for span in account.spans if span.began < first_step]
        restart_s = sum(span.seconds for span in before if span.part in (OTHER, FIRST))
    times = {"--save_s": save_s, "--restart_s": restart_s}
    if missing := [name for name, value in times.items() if value is None]:
        raise UsageError(f"set {' and '.join(missing)}, or give a RUN_DIR with measurements")
    mtbf_s = _YEAR_S / (options.chips * options.failures_per_chip_year)
    interval_s = daly(save_s, mtbf_s)
    goodput = expected_goodput(interval_s, save_s, restart_s, mtbf_s)
    if goodput < 1e-4:
        raise UsageError(
            f"with a failure every {duration(mtbf_s)} and restarts of {duration(restart_s)} the "
            "run makes no progress: lower --restart_s or --chips"
        )
    return {
        "chips": options.chips,
        "failures_per_chip_year": options.failures_per_chip_year,
        "mtbf_s": mtbf_s,
        "save_s": save_s,
        "restart_s": restart_s,
        "interval_s": interval_s,
        "goodput": goodput,
    }


def suggest(account: Account) -> dict[str, float]:
    """Return Young's interval, in seconds and in steps, and the measurements behind it.

    {} for a run that has written no checkpoint or taken no steps that took time. ``save_s``: how
    long training stops for a checkpoint, the mean; ``mtbf_s``: between failures, without any the
    running time.
    """
    if not account.saves or not account.steps or not account.step_s:
        return {}
    save_s = sum(account.saves) / len(account.saves)
    failures = len(account.failed_at)
    mtbf_s = (account.wall_s - account.seconds[DOWN]) / max(1, failures)
    interval_s = young(save_s, mtbf_s)
    return {
        "save_s": save_s,
        "mtbf_s": mtbf_s,
        "failures_seen": failures,
        "interval_s": interval_s,
        "ckpt_step_interval": max(1, round(interval_s / account.step_s)),
    }


# -- The report: a table, JSON values, a picture ---------------------------------------------------

_RESTARTS_SHOWN = 10
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def duration(seconds: float) -> str:
    """Return a time in one or two units: 2.5 s, 3 min 20 s, 5 h 2 min, 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    number = next(i for i, (size, _) in enumerate(_UNITS) if seconds >= size)
    (size, unit), (small, small_unit) = _UNITS[number : number + 2]
    rest = int(seconds % size // small)
    return f"{int(seconds // size)} {unit}" + (f" {rest} {small_unit}" if rest else "")


def table(name: str, account: Account) -> str:
    """Return the lines about one run."""
    wall_s = account.wall_s
    starts = f"{account.starts} start" + ("s" if account.starts > 1 else "")
    failures = len(account.failed_at)
    lines = [f"{name}: {duration(wall_s)}, {starts}, {failures} ended by a failure"]
    for part, part_s in account.seconds.items():
        share = part_s / wall_s if wall_s else 0.0
        lines.append(f"  {part:<22} {duration(part_s):>14} {share:>8.2%}")
    per_step = f", {duration(account.step_s)} each" if account.steps else ""
    lost = f"; {account.lost_steps:,} lost and repeated" if account.lost_steps else ""
    lines.append(f"  goodput {account.goodput:.2%}: {account.steps:,} steps{per_step}{lost}")
    if mean := mean_of(account.storage):
        lines.append(
            f"  {len(account.storage)} checkpoints, on average {mean['bytes'] / 2**20:,.2f} MiB "
            f"from all hosts, written in {duration(mean['write_s'])}"
        )
    if mean := mean_of(account.local):
        lines.append(
            f"  {len(account.local)} local checkpoints, on average "
            f"{mean['bytes'] / 2**20:,.2f} MiB from all hosts, written in "
            f"{duration(mean['write_s'])} on the slowest disk and copied in "
            f"{duration(mean['copy_s'])} to the slowest peer"
        )

    # The newest restarts whose parts are known, and the means of all of these.
    if known := [restart for restart in account.restarts if restart.parts]:
        columns = [name for name in RESTART_PARTS if any(name in r.parts for r in known)]
        rows = [
            (str(restart.step), [*map(restart.parts.get, columns), restart.seconds])
            for restart in known[-_RESTARTS_SHOWN:]
        ]
        if len(known) > 1:
            times = [[r.parts[name] for r in known if name in r.parts] for name in columns]
            times.append([restart.seconds for restart in known])
            means: list[float | None] = [sum(column) / len(column) for column in times]
            rows.append((f"mean of {len(known)}", means))
        head = "".join(f" {part:>8}" for part in (*columns, "total"))
        lines.append("  restarts, in seconds from the last sign of life:")
        lines.append(f"    {'first step':<12}{head}")
        for first, values in rows:
            cells = (f"{'-' if value is None else f'{value:.2f}':>8}" for value in values)
            lines.append(f"    {first:<12} {' '.join(cells)}")

    suggestion = suggest(account)
    if not suggestion:
        lines.append(
            "  no save interval suggested: the run has written no checkpoint, or made no step"
        )
        return "\n".join(lines)
    save_s, mtbf_s, _, interval_s, every = suggestion.values()
    waste = save_s / interval_s + interval_s / (2 * mtbf_s) if interval_s else 0.0  # to first order
    mtbf = f"{duration(mtbf_s)} of running"
    if failures:
        mtbf += f" (failures seen: {failures})"
    else:
        mtbf = (
            f"no failure in {mtbf}, computed as if the first happened now; save less often if "
            "failures are rarer"
        )
    lines += [
        f"  suggestion: save every {duration(interval_s)}, --ckpt_step_interval {every}; "
        f"checkpoints and lost work then cost {waste:.2%}",
        f"    from Young's sqrt(2 x {duration(save_s)} per checkpoint x MTBF); MTBF: {mtbf}",
    ]
    return "\n".join(lines)


def forecast_lines(forecast: Mapping[str, float]) -> str:
    """Return what to print of a forecast."""
    return (
        f"forecast: {forecast['chips']:,} chips, {forecast['failures_per_chip_year']:.3g} failures "
        f"per chip and year: one every {duration(forecast['mtbf_s'])}; a checkpoint stops training "
        f"for {duration(forecast['save_s'])}, a restart takes {duration(forecast['restart_s'])}\n"
        f"  save every {duration(forecast['interval_s'])} of training (Daly): expected goodput "
        f"{forecast['goodput']:.2%}, {24 / forecast['goodput']:.1f} hours for 24 hours of training"
    )


def mean_of(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each figure over several checkpoints; {} if there are none."""
    if not figures:
        return {}
    return {name: sum(f[name] for f in figures) / len(figures) for name in figures[0]}


def as_values(name: str, account: Account) -> dict[str, Any]:
    """Return the same as JSON values; times are in seconds, shares from 0 to 1."""
    values: dict[str, Any] = {
        "run": name,
        "wall_s": account.wall_s,
        "goodput": account.goodput if account.wall_s else None,
        "seconds": account.seconds,
        "starts": account.starts,
        "failures": len(account.failed_at),
        "steps": account.steps,
        "lost_steps": account.lost_steps,
        "checkpoints": len(account.saves),
    }
    if account.restarts:
        values["restarts"] = [asdict(restart) for restart in account.restarts]
    for tier, figures in (("storage", account.storage), ("local", account.local)):
        if mean := mean_of(figures):
            values[f"{tier}_checkpoints"] = {"number": len(figures), **mean}
    if suggestion := suggest(account):
        values["suggestion"] = suggestion
    return values


COLOURS = {
    USEFUL: "#2e8b57",
    DATA: "#e6b422",
    FIRST: "#6baed6",
    OTHER: "#c6dbef",
    EVAL: "#9e9ac8",
    SAVE: "#f08c3a",
    LOCAL: "#fdd0a2",
    LOST: "#c0392b",
    DOWN: "#7f7f7f",
}


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the last part of each path, or the whole paths if those parts are not different."""
    names = [folder.name for folder in folders]
    return list(map(str, folders)) if "" in names or len(set(names)) < len(names) else names


def draw(accounts: Mapping[Path, Account], path: Path) -> None:
    """Draw the shares of wall time, a bar a run. Raises OSError, or ValueError for a suffix."""
    figure, axis = pyplot().subplots(figsize=(10, 1.7 + 0.55 * len(accounts)), layout="constrained")
    names = [
        f"{as_label(name)}\n{duration(account.wall_s)}"
        for name, account in zip(short_names([*accounts]), accounts.values(), strict=True)
    ]
    left = [0.0] * len(accounts)
    for part, colour in COLOURS.items():
        shares = [100 * a.seconds[part] / a.wall_s if a.wall_s else 0.0 for a in accounts.values()]
        if not any(shares):
            continue
        bars = axis.barh(names, shares, left=left, color=colour, label=part, height=0.62)
        texts = [f"{share:.1f} %" if share >= 5 else "" for share in shares]
        on_dark = "white" if part in (USEFUL, LOST, DOWN) else "black"
        axis.bar_label(bars, texts, label_type="center", fontsize=8, color=on_dark)
        left = [before + share for before, share in zip(left, shares, strict=True)]
    axis.invert_yaxis()
    axis.set(xlim=(0, 100), xlabel="% of wall time")
    axis.spines[["top", "right"]].set_visible(False)
    if axis.containers:
        figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    save_figure(figure, path)


# -- The command line ------------------------------------------------------------------------------

_PROGRAM = "tools.goodput"
_PICTURE = "goodput.png"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables and draw the picture; return the exit code."""
    parser = OneLineParser(
        _PROGRAM,
        "Print the share of a run's wall time spent in useful steps, and where the rest went; with "
        "--chips, forecast what failures will cost a run of that size.",
    )
    add = parser.add_argument
    add("runs", nargs="*", type=local_path, metavar="RUN_DIR", help="a run's --ckpt_dir")
    add("--json", action="store_true", help="print JSON instead of text (default: off)")
    add(
        "--picture",
        type=local_path,
        metavar="FILE",
        help=f"write the plot to this file (default: {_PICTURE} in the first RUN_DIR)",
    )
    add(
        "--chips",
        type=bounded(int, 1, 10**6),
        metavar="N",
        help="forecast the goodput of a run on this many chips or GPUs",
    )
    add(
        "--save_s",
        type=bounded(float, 1e-3, 1e7),
        metavar="S",
        help="seconds for which a checkpoint stops training (default: as measured in RUN_DIR)",
    )
    add(
        "--restart_s",
        type=seconds,
        metavar="S",
        help="seconds from a failure to the first step of the next start, including loading and "
        "waiting for a replacement (default: as measured in RUN_DIR)",
    )
    add(
        "--failures_per_chip_year",
        type=bounded(float, 1e-6, 10**6),
        default=FAILURES_PER_CHIP_YEAR,
        metavar="X",
        help="failures that end the run, per chip and year of running (default: "
        f"{FAILURES_PER_CHIP_YEAR:.3f}, from the training of Llama 3 405B, arXiv 2407.21783: 419 "
        "in 54 days on 16,384 GPUs)",
    )
    options = parser.parse_args(argv)
    forecasts = options.chips is not None
    values: list[dict[str, Any]] = []
    texts: list[str] = []
    left_out = []
    accounts: dict[Path, Account] = {}
    try:
        if not forecasts and (options.save_s is not None or options.restart_s is not None):
            raise UsageError("--save_s and --restart_s require --chips")
        if not options.runs and not forecasts:
            raise UsageError("give a RUN_DIR, or --chips, --save_s and --restart_s for a forecast")
        for run in options.runs:
            if not run.is_dir():
                raise UsageError(f"{run} is not a folder: give a run's --ckpt_dir")
            try:
                events = read_events(run)
                accounts[run] = account = account_of(events)
            except FileNotFoundError:
                raise UsageError(
                    f"{run} has no {EVENTS_FILE}, which earlier versions did not write: once "
                    "resumed with this version, the run writes it"
                ) from None
            except (OSError, ValueError) as error:
                raise UsageError(f"{run / EVENTS_FILE} cannot be read: {error}") from None
            if events.left_out:
                damaged = damaged_lines(events.left_out)
                left_out.append(f"left out: {run / EVENTS_FILE}: {damaged}")
            values.append(as_values(str(run), account))
            texts.append(table(str(run), account))
            if forecasts:
                values[-1]["forecast"] = forecast(options, account)
                texts[-1] += "\n" + forecast_lines(values[-1]["forecast"])
        if not options.runs:
            values.append({"forecast": forecast(options, None)})
            texts.append(forecast_lines(values[-1]["forecast"]))
        else:
            picture = options.picture or options.runs[0] / _PICTURE
            try:
                draw(accounts, picture)
            except (OSError, ValueError) as error:  # ValueError: an unknown suffix
                raise UsageError(f"cannot write {picture}: {error}") from None
            texts.append(f"picture: {picture}")
    except UsageError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    for line in left_out:
        print(line, file=sys.stderr)
    print(json.dumps(values, indent=2) if options.json else "\n\n".join(texts))
    return 0


if __name__ == "__main__":
    use_utf8()
    with exit_quietly_on_broken_pipe(_PROGRAM):
        sys.exit(main())
