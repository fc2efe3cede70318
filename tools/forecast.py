"""What failures will cost a run: the best interval between checkpoints, goodput, hours and price.

``python3 -m tools.forecast`` computes it by formula and checks that by a simulation, for
checkpoints in storage, for copies at peers besides, and for training on with fewer machines. A
run's own events.jsonl replaces what was assumed.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from config_fields import bounded, local_path, seconds
from data.files import reason_of
from tools.goodput import DATA, EVAL, FIRST, OTHER, USEFUL, Account, duration, read_account, young
from training.checkpoints.choose import RUN_FILE
from training.errors import UsageError
from training.files import read_object
from training.flags import OneLineParser
from training.logs.figures import pyplot, save_figure
from training.logs.records import EVENTS_FILE, is_number
from training.processes.output import exit_quietly_on_broken_pipe

FAILURES_PER_CHIP_YEAR = 419 / (16384 * 54 / 365.25)
"""Unexpected interruptions of training Llama 3 405B: 419 in 54 days on 16,384 H100 GPUs ("The Llama
3 Herd of Models", arXiv 2407.21783, section 3.3.4). Nothing of the kind is published of TPUs."""
HOUR_S, YEAR_S = 3600.0, 365.25 * 86400
RUNS = 1000
_MOST_FAILURES = 20_000
"""Expected in a run: a simulation of more takes longer than a minute."""

# -- The formula -----------------------------------------------------------------------------------


def daly(save_s: float, mtbf_s: float) -> float:
    """Return Daly's estimate of the best interval between checkpoints, in seconds without saving.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22, 2006.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    share = save_s / (2 * mtbf_s)
    return young(save_s, mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - save_s


@dataclass(frozen=True)
class Tier:
    """A place of checkpoints."""

    save_s: float
    """How long training stops for one."""
    restart_s: float
    """From a failure to the first step of the next start, if machines are there; with loading."""
    interval_s: float
    """Training between two checkpoints."""

    def slowdown(self, lost_s: float, rate: float) -> float:
        """Return the expected seconds of a run for each of training; infinite if it gets nowhere.

        ``lost_s``: what a failure costs besides repeated work; ``rate``: failures a second, at any
        time, also in a restart. The complete model of Daly's paper.
        """
        try:
            per_interval = math.expm1((self.interval_s + self.save_s) * rate) / rate
            return per_interval * math.exp(lost_s * rate) / self.interval_s
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Strategy:
    """How a run survives failures."""

    name: str
    rate: float
    """Failures a second, of all chips together."""
    storage: Tier
    """Which survives any failure."""
    replace_s: float
    """How long a replacement of what has failed takes to be there."""
    peers: Tier | None = None
    """Copies at peers, which survive ``peer_share`` of all failures."""
    peer_share: float = 0.0
    groups: int = 0
    """So many groups of machines train the same; the others train on without one. 0: they wait."""

    def slowdown(self) -> float:
        """Return the expected seconds of a run for each of training.

        A failure that peers survive stretches the time between those that they do not. A group less
        costs its share of the time until the replacement, and a restart when that joins.
        """
        waiting_s = self.replace_s
        if self.groups:
            waiting_s = self.replace_s / self.groups + (self.peers or self.storage).restart_s
        if self.peers is None:
            return self.storage.slowdown(self.storage.restart_s + waiting_s, self.rate)
        inner = self.peers.slowdown(self.peers.restart_s + waiting_s, self.rate * self.peer_share)
        interval_s = self.storage.interval_s * inner
        if math.isinf(interval_s):
            return math.inf
        outer = dataclasses.replace(self.storage, interval_s=interval_s).slowdown(
            self.storage.restart_s + waiting_s, self.rate * (1 - self.peer_share)
        )
        return inner * outer

    def goodput(self, training_s: float) -> float:
        """Return the share of training in the expected time of a run, its first start included."""
        return training_s / (training_s * self.slowdown() + self.storage.restart_s)


# -- The simulation --------------------------------------------------------------------------------


def simulate(strategy: Strategy, training_s: float, runs: int = RUNS, seed: int = 0) -> np.ndarray:
    """Return the goodput of so many runs whose failures come at random, exponentially distributed.

    All runs make one failure after the other together. Nothing of the formula is used.
    """
    generator = np.random.default_rng(seed)
    storage, peers = strategy.storage, strategy.peers
    inner = peers or dataclasses.replace(storage, save_s=0.0)
    each_s = inner.interval_s + inner.save_s
    per_cycle = max(1, round(storage.interval_s / inner.interval_s))
    cycle_s = per_cycle * each_s + storage.save_s
    last = math.ceil(training_s / inner.interval_s)
    """The number of intervals of the inner tier that are the whole training."""

    at = np.zeros(runs, int)  # intervals that a checkpoint has
    elapsed = np.zeros(runs)
    restart = np.full(runs, storage.restart_s)
    back_at = np.zeros((runs, max(1, strategy.groups)))  # when each group is back, if it is away
    running = np.arange(runs)
    while len(running):
        here, start, wait = at[running], elapsed[running], restart[running]
        fails_after = generator.exponential(1 / strategy.rate, len(running))
        steps_s = fails_after - wait
        if strategy.groups:
            began, fails_at = (start + wait)[:, None], (start + fails_after)[:, None]
            back = back_at[running]
            without = np.clip(np.minimum(back, fails_at) - began, 0, None).sum(axis=1)
            joined = ((back > began) & (back < fails_at)).sum(axis=1)
            steps_s = steps_s - without / strategy.groups - joined * inner.restart_s
        # Where in its cycle a run is, and how far it would come until the failure.
        inside = here % per_cycle
        reach = inside * each_s + np.clip(steps_s, 0, None)
        cycles, rest = np.divmod(reach, cycle_s)
        reached = here - inside + (cycles * per_cycle).astype(int)
        reached += np.minimum(rest // each_s, per_cycle - 1).astype(int)
        reached = np.where(steps_s > 0, np.maximum(reached, here), here)
        saves = -(-last // per_cycle) - here // per_cycle  # one at the end, too
        needed_s = training_s - here * inner.interval_s + (last - here) * inner.save_s
        needed_s += saves * storage.save_s
        done = steps_s >= np.maximum(needed_s, 1e-9)
        share = np.divide(needed_s, steps_s, out=np.ones_like(steps_s), where=done)
        elapsed[running] += np.where(done, wait + share * (fails_after - wait), fails_after)
        by_peers = generator.random(len(running)) < strategy.peer_share
        at[running] = np.where(by_peers, reached, reached // per_cycle * per_cycle)
        restart[running] = np.where(by_peers, inner.restart_s, storage.restart_s)
        if strategy.groups:
            lost = back_at[running].argmin(axis=1)
            back_at[running, lost] = elapsed[running] + strategy.replace_s
        else:
            restart[running] += strategy.replace_s
        running = running[~done]
    return training_s / elapsed


# -- What a run has measured -----------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What events.jsonl says about a run's failures; None where it says nothing."""

    save_s: float | None
    restart_s: float
    """From the last sign of life to the first step done, waiting for machines included, the mean;
    without any restart that of the first start."""
    interval_s: float | None
    """Training between two checkpoints, without lost work."""
    training_s: float
    """Useful steps, with waiting for data and evaluations."""
    step_share: float
    """The share of steps in that."""
    failures: int
    running_s: float


def measure(account: Account) -> Measured:
    """Return what an account of a run says. Raises UsageError if it has no useful step."""
    seconds, saves = account.seconds, account.saves
    if not account.steps or not seconds[USEFUL]:
        raise UsageError("the run has no useful step yet: nothing can be measured")
    training_s = seconds[USEFUL] + seconds[DATA] + seconds[EVAL]
    restarts = [each.seconds for each in account.restarts]
    if not restarts:  # the first start: starting and compiling until the first step of all
        steps_began = min(span.began for span in account.spans if span.steps)
        before = [span for span in account.spans if span.began < steps_began]
        restarts = [sum(span.seconds for span in before if span.part in (OTHER, FIRST))]
    return Measured(
        save_s=sum(saves) / len(saves) if saves else None,
        restart_s=sum(restarts) / len(restarts),
        interval_s=training_s / len(saves) if saves else None,
        training_s=training_s,
        step_share=seconds[USEFUL] / training_s,
        failures=account.failures,
        running_s=account.running_s,
    )


# -- The report ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forecast:
    """A strategy's cost: by formula, and of simulated runs."""

    strategy: Strategy
    goodput: float
    """By formula, from 0 to 1."""
    simulated: np.ndarray
    """The same of each simulated run."""
    simulated_mean: float
    """Training over the mean time, as the formula has it."""
    hours: float
    chip_hours: float


def forecast(strategy: Strategy, training_s: float, chips: int, step_share: float) -> Forecast:
    """Return what this strategy costs. Raises UsageError if failures leave it no progress.

    ``training_s``: seconds of training if nothing failed; ``step_share``: the share of steps in it.
    """
    goodput = strategy.goodput(training_s)
    failures = training_s / goodput * strategy.rate if goodput else math.inf
    if failures > _MOST_FAILURES:
        raise UsageError(
            f"{strategy.name}: with a failure every {duration(1 / strategy.rate)} the run would "
            f"have more than {_MOST_FAILURES:,}: lower --hours, --restart_s or --chips"
        )
    hours = training_s / goodput / HOUR_S
    simulated = simulate(strategy, training_s) * step_share
    mean = float(1 / np.mean(1 / simulated))
    return Forecast(strategy, goodput * step_share, simulated, mean, hours, hours * chips)


def table(found: Sequence[Forecast], price: float | None) -> str:
    """Return the lines of all strategies."""
    head = ("", "save every", "goodput", "simulated, 5 to 95 %", "hours", "chip-hours")
    rows = [[*head, "USD"] if price is not None else [*head]]
    for each in found:
        low, high = np.percentile(each.simulated, (5, 95))
        intervals = [each.strategy.peers, each.strategy.storage]
        row = [
            each.strategy.name,
            " and ".join(duration(tier.interval_s) for tier in intervals if tier),
            f"{each.goodput:.2%}",
            f"{each.simulated_mean:.2%}, {low:.2%} to {high:.2%}",
            f"{each.hours:,.1f}",
            f"{each.chip_hours:,.0f}",
        ]
        rows.append([*row, f"{each.chip_hours * price:,.0f}"] if price is not None else row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def draw(found: Sequence[Forecast], training_s: float, step_share: float, path: Path) -> None:
    """Write a picture: goodput by interval, and the spread of each strategy. Raises OSError."""
    plt = pyplot()
    figure, (by_interval, spread) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    plain, mtbf_s = found[0].strategy, 1 / found[0].strategy.rate
    best_s = plain.storage.interval_s
    intervals = best_s * np.geomspace(1 / 8, 8, 65)
    intervals = intervals[intervals <= training_s]
    lines, dots = [], []
    for number, interval in enumerate(intervals):
        tier = dataclasses.replace(plain.storage, interval_s=float(interval))
        strategy = dataclasses.replace(plain, storage=tier)
        lines.append(100 * step_share * strategy.goodput(training_s))
        failures = training_s * strategy.slowdown() * strategy.rate
        if number % 8 == 0 and failures < _MOST_FAILURES:
            runs = 100 * step_share * simulate(strategy, training_s, seed=number)
            dots.append((interval / 60, runs.mean(), *np.percentile(runs, (5, 95))))
    by_interval.plot(intervals / 60, lines, color="#2e6da4", label="formula")
    at, means, low, high = np.array(dots).T
    around = np.clip((means - low, high - means), 0, None)
    runs_shown = f"{RUNS:,} simulated runs, 5 to 95 %"
    by_interval.errorbar(
        at, means, around, fmt="o", color="#c0392b", markersize=4, capsize=3, label=runs_shown
    )
    for name, best, style in (("Young", young, ":"), ("Daly", daly, "--")):
        minutes = best(plain.storage.save_s, mtbf_s) / 60
        by_interval.axvline(minutes, color="gray", linestyle=style, label=name)
    by_interval.set(xscale="log", ylabel="goodput, %")
    by_interval.set_xlabel("minutes of training between checkpoints in storage")
    for ticks in (by_interval.xaxis.set_major_formatter, by_interval.xaxis.set_minor_formatter):
        ticks(plt.LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 1)))
    by_interval.legend(fontsize=8)
    by_interval.grid(alpha=0.3)
    spread.boxplot([100 * each.simulated for each in found], whis=(5, 95), showfliers=False)
    places, goodputs = range(1, len(found) + 1), [100 * each.goodput for each in found]
    spread.plot(places, goodputs, "D", color="#2e6da4", markersize=5, label="formula")
    spread.set_xticks(places, [each.strategy.name for each in found])
    spread.set_ylabel("goodput, %: quartiles, 5 and 95 %")
    spread.legend(fontsize=8)
    spread.grid(alpha=0.3, axis="y")
    save_figure(figure, path)


# -- The command line ------------------------------------------------------------------------------

_PROGRAM = "tools.forecast"
_PICTURE = "forecast.png"
_SAVE_S = bounded(float, 1e-3, 1e7)


def _parser() -> OneLineParser:
    parser = OneLineParser(
        _PROGRAM,
        "Print what failures will cost a run: the best interval between checkpoints, goodput, "
        "hours and price, by formula and by simulation.",
    )
    add = parser.add_argument
    add(
        "run",
        nargs="?",
        type=local_path,
        metavar="RUN_DIR",
        help="a run's --ckpt_dir: what its events.jsonl has measured is the default of --save_s, "
        "--restart_s, --chips and --failures_per_chip_year",
    )
    add("--chips", type=bounded(int, 1, 10**6), metavar="N", help="chips, or GPUs, of the run")
    add(
        "--hours",
        type=bounded(float, 0.001, 10**5),
        default=720.0,
        metavar="H",
        help="hours of training if nothing failed, without checkpoints (default: 720)",
    )
    add(
        "--failures_per_chip_year",
        type=bounded(float, 1e-6, 10**6),
        metavar="X",
        help="failures that end the run, for each chip and year of running (default: "
        f"{FAILURES_PER_CHIP_YEAR:.3f}, those of Llama 3 405B's training, arXiv 2407.21783: 419 in "
        "54 days on 16,384 GPUs)",
    )
    add("--save_s", type=_SAVE_S, metavar="S", help="seconds that a checkpoint stops training")
    add("--load_s", type=seconds, default=0.0, metavar="S", help="seconds to load one (default: 0)")
    add(
        "--restart_s",
        type=seconds,
        metavar="S",
        help="seconds from a failure to the first step of the next start, without loading and "
        "without --replace_s",
    )
    add(
        "--replace_s",
        type=seconds,
        default=0.0,
        metavar="S",
        help="seconds until a replacement of the failed machines is there (default: 0)",
    )
    add(
        "--peer_save_s",
        type=_SAVE_S,
        metavar="S",
        help="also forecast checkpoints with copies at peers: seconds that one stops training",
    )
    add("--peer_load_s", type=seconds, metavar="S", help="seconds to load one from peers")
    add(
        "--peer_percent",
        type=bounded(float, 1, 99.9),
        default=95.0,
        metavar="P",
        help="percentage of failures after which the peers have all of it (default: 95, assumed)",
    )
    add(
        "--groups",
        type=bounded(int, 2, 64),
        metavar="N",
        help="also forecast training on without the failed group of machines, of N that train the "
        "same, until its replacement is there",
    )
    add("--price", type=bounded(float, 0, 1000), metavar="USD", help="US dollars a chip and hour")
    add("--json", action="store_true", help="print only JSON (default: off)")
    add(
        "--picture",
        type=local_path,
        metavar="FILE",
        help=f"write the picture here (default: {_PICTURE} in RUN_DIR, or in this folder)",
    )
    return parser


def strategies(
    given: Any, rate: float, save_s: float, restart_s: float, measured: Measured | None
) -> list[Strategy]:
    """Return what to compare, each with its best intervals; as the run did it comes last."""
    mtbf_s, longest_s = 1 / rate, given.hours * HOUR_S
    storage = Tier(save_s, restart_s + given.load_s, min(longest_s, daly(save_s, mtbf_s)))
    found = [Strategy("storage", rate, storage, given.replace_s)]
    if given.peer_save_s is not None:
        share = given.peer_percent / 100
        interval_s = min(longest_s, daly(given.peer_save_s, mtbf_s / share))
        peers = Tier(given.peer_save_s, restart_s + given.peer_load_s, interval_s)
        # A checkpoint in storage after a whole number of those at peers.
        rarest_s = min(longest_s, daly(save_s, mtbf_s / (1 - share)))
        number = max(1, round(rarest_s / interval_s))
        rarer = dataclasses.replace(storage, interval_s=number * interval_s)
        found.append(Strategy("peers and storage", rate, rarer, given.replace_s, peers, share))
    if given.groups:
        found.append(dataclasses.replace(found[-1], name="fewer machines", groups=given.groups))
    if measured and measured.interval_s:
        as_run = dataclasses.replace(storage, interval_s=measured.interval_s)
        found.append(dataclasses.replace(found[0], name="storage, as the run", storage=as_run))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the forecast and write the picture; return the exit code."""
    given = _parser().parse_args(argv)
    picture, training_s = given.picture or (given.run or Path()) / _PICTURE, given.hours * HOUR_S
    chips, save_s, restart_s = given.chips, given.save_s, given.restart_s
    per_chip_year, step_share, measured = given.failures_per_chip_year, 1.0, None
    left_out = ""
    try:
        # What flags do not say, the run may have measured.
        if given.run:
            file = given.run / EVENTS_FILE
            try:
                account, left_out = read_account(given.run)
                measured = measure(account)
                file = given.run / RUN_FILE
                devices = read_object(file)["devices"]
                if not isinstance(devices, int) or not is_number(devices, 10**6, least=1):
                    raise ValueError(f"its number of devices cannot be {devices!s:.40}")
            except (OSError, ValueError, KeyError) as error:
                raise UsageError(f"{file} cannot be read: {reason_of(error)}") from None
            chips, step_share = chips or devices, measured.step_share
            save_s = measured.save_s if save_s is None else save_s
            restart_s = measured.restart_s if restart_s is None else restart_s
            if measured.failures and per_chip_year is None:
                per_chip_year = YEAR_S / (measured.running_s / measured.failures) / devices
        known = {"--chips": chips, "--save_s": save_s, "--restart_s": restart_s}
        if missing := [name for name, value in known.items() if value is None]:
            raise UsageError(f"give {' and '.join(missing)}, or a RUN_DIR that has measured it")
        if (given.peer_save_s is None) != (given.peer_load_s is None):
            raise UsageError("--peer_save_s and --peer_load_s require each other")
        if per_chip_year is None:
            per_chip_year = FAILURES_PER_CHIP_YEAR
        rate, save_s = chips * per_chip_year / YEAR_S, max(save_s, 1e-3)

        found = [
            forecast(strategy, training_s, chips, step_share)
            for strategy in strategies(given, rate, save_s, restart_s, measured)
        ]
        try:
            draw(found, training_s, step_share, picture)
        except (OSError, ValueError) as error:  # ValueError: an unknown suffix
            raise UsageError(f"cannot write {picture}: {reason_of(error)}") from None
    except UsageError as error:
        print(f"{_PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    if left_out:
        print(left_out, file=sys.stderr)
    if given.json:
        values = [  # times are in seconds, shares from 0 to 1
            {
                "strategy": each.strategy.name,
                "storage_interval_s": each.strategy.storage.interval_s,
                "peer_interval_s": each.strategy.peers and each.strategy.peers.interval_s,
                "goodput": each.goodput,
                "simulated_goodput": each.simulated_mean,
                "simulated_5_to_95": np.percentile(each.simulated, (5, 95)).tolist(),
                "hours": each.hours,
                "chip_hours": each.chip_hours,
                "usd": None if given.price is None else each.chip_hours * given.price,
            }
            for each in found
        ]
        print(json.dumps(values, indent=2))
        return 0
    mtbf_s = 1 / rate
    print(
        f"{chips:,} chips, {rate / chips * YEAR_S:.3g} failures a chip and year: one every "
        f"{duration(mtbf_s)}; {duration(training_s)} of training; a checkpoint stops it for "
        f"{duration(save_s)}, a restart takes {duration(restart_s)}"
    )
    if measured:
        print(
            f"measured by {given.run}: {measured.failures} failure(s) in "
            f"{duration(measured.running_s)} of running, {measured.step_share:.1%} of training in "
            "steps, the rest waiting for data and evaluating"
        )
    print(table(found, given.price))
    print(
        f"best interval of storage alone: {duration(young(save_s, mtbf_s))} by Young, "
        f"{duration(daly(save_s, mtbf_s))} by Daly\npicture: {picture}"
    )
    return 0


if __name__ == "__main__":
    with exit_quietly_on_broken_pipe(_PROGRAM):
        sys.exit(main())
