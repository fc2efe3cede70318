"""Goodput: the share of a run's wall time spent in useful steps; docs/files.md defines the parts.

``python3 -m tools.goodput RUN_DIR`` reads events.jsonl, prints a table, writes a plot, and suggests
how often to save. ``--chips`` forecasts what failures will cost a run of that size.
"""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # by its path from any folder, or by another Python
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    import check_python

    check_python.check("tools.goodput", packages=())

from config_fields import bounded, local_path, seconds
from data.utf8 import use_utf8
from tools.wall_time import (
    COLOURS,
    DOWN,
    FIRST,
    LOST,
    OTHER,
    RESTART_PARTS,
    USEFUL,
    Account,
    account_of,
    duration,
    short_names,
)
from training.command_line import OneLineParser
from training.errors import UsageError
from training.logs.records import EVENTS_FILE, damaged_lines, read_events
from training.processes.output import exit_quietly_on_broken_pipe

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


def table(name: str, account: Account) -> str:
    """Return the lines about one run."""
    wall_s = account.wall_s
    starts = f"{account.starts} start" + ("s" if account.starts > 1 else "")
    failures = len(account.failed_at)
    lines = [f"{name}: {duration(wall_s)}, {starts}, {failures} ended by a failure"]
    for part, share in account.shares.items():
        lines.append(f"  {part:<22} {duration(account.seconds[part]):>14} {share:>8.2%}")
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


def draw(accounts: Mapping[Path, Account], path: Path) -> None:
    """Draw the shares of wall time, a bar a run. Raises OSError, ValueError for a suffix, or
    ImportError without matplotlib."""
    from training.logs.figures import as_label, pyplot, save_figure

    figure, axis = pyplot().subplots(figsize=(10, 1.7 + 0.55 * len(accounts)), layout="constrained")
    names = [
        f"{as_label(name)}\n{duration(account.wall_s)}"
        for name, account in zip(short_names([*accounts]), accounts.values(), strict=True)
    ]
    left = [0.0] * len(accounts)
    for part, colour in COLOURS.items():
        shares = [100 * account.shares[part] for account in accounts.values()]
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
            except ImportError:
                left_out.append(f"left out: {picture}: it requires the package matplotlib")
            else:
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
