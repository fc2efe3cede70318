"""Tells what a search for plans has found: a table, JSON, and a picture."""

from __future__ import annotations

import json
import math
import os
import shlex
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from data.files import DataFolderError
from data.source import Wanted, open_data
from models.spec import ModelSpec
from training.config import PlanConfig, RunConfig
from training.errors import UsageError
from training.flags import by_field, flat
from training.logs.records import save_figure

# ------------------------------------------------------------------------------------------------
# What hardware costs for an hour: read from a small file that anyone can replace.


SHIPPED = Path(__file__).with_name("prices.toml")


@dataclass(frozen=True)
class Price:
    """What one chip costs for an hour, and where the figure is from."""

    per_hour: float
    """US dollars."""
    date: str
    source: str

    def __str__(self) -> str:
        return f"${self.per_hour:.2f} ({self.date}; {self.source})"


def read_prices(name: str | None) -> dict[str, Price]:
    """Return the price of each kind of chip that a file names, of the shipped file for None.

    A name that ends in ".json" is read as JSON, any other as TOML. Raises UsageError.
    """
    path = Path(name) if name else SHIPPED
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UsageError(f"--price {path} cannot be read: {reason}") from None
    try:
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise UsageError(f"--price {path} is no {kind}: {str(error).splitlines()[0]}") from None
    if not isinstance(tables, Mapping) or not tables:
        raise UsageError(f"--price {path} names no chip: a table for each, as in {SHIPPED.name}")
    return {kind: _price(path, kind, table) for kind, table in tables.items()}


def _price(path: Path, kind: str, table: Any) -> Price:
    value = table.get("price") if isinstance(table, Mapping) else None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    if not 0 <= number < math.inf:
        raise UsageError(
            f'--price {path}: "{kind}" requires a "price", dollars an hour of one chip'
        )
    told = {name: str(table.get(name, f"no {name}")) for name in ("date", "source")}
    return Price(float(number), told["date"], told["source"])


# ------------------------------------------------------------------------------------------------
# How many steps the training that is planned takes.


IMAGENET = 1_281_167
"""Training images of ImageNet-1k."""
_ELSEWHERE = ("folder", "volumes", "webdataset")
"""Sources whose images may lie on the machines that will train, and not here."""


@dataclass(frozen=True)
class Work:
    """What is to be trained, in steps."""

    images: int
    """Training images of an epoch."""
    counted: str
    """Where that number is from."""
    batch_size: int
    epochs: int
    steps: int

    def hours(self, step_s: float) -> float:
        return self.steps * step_s / 3600


def find_work(config: RunConfig, model: ModelSpec) -> Work:
    """Return the steps that ``--num_epochs`` and ``--max_steps`` ask for. Raises UsageError."""
    images, counted = _images(config, model)
    batch_size = config.data.batch_size
    if images < batch_size:
        raise UsageError(
            f"{images:,} training images ({counted}) are fewer than --batch_size {batch_size}"
        )
    steps = config.num_epochs * (images // batch_size)  # what is left of an epoch is dropped
    if config.max_steps is not None:
        steps = min(steps, config.max_steps)
    return Work(images, counted, batch_size, config.num_epochs, steps)


def _images(config: RunConfig, model: ModelSpec) -> tuple[int, str]:
    if config.planning.train_images is not None:
        return config.planning.train_images, "--train_images"
    data = config.data
    is_here = data.data_source not in _ELSEWHERE or Path(data.data_dir).is_dir()
    if data.data_source == "fake" or not is_here:
        return IMAGENET, "ImageNet's; --train_images is another number"
    channels, *size = model.sizes.input_shape
    wanted = Wanted(data, channels, tuple(size), model.sizes.num_classes, config.seed)
    try:
        found = open_data(wanted)
    except DataFolderError as error:
        raise UsageError(str(error)) from None
    return found.train_length, f"--data_source {data.data_source}"


# ------------------------------------------------------------------------------------------------
# Which values of a flag are tried: those of a table, or the one that the user gives.


def combinations(
    choices: Mapping[str, tuple[Any, ...]], config: RunConfig, own: Any
) -> Iterator[dict[str, Any]]:
    """Yield every combination of the values of these fields.

    A field whose flag was given stays as it is, unless it is "auto". Raises
    UsageError for a ``--grad_ckpt`` that the table does not have, of which no arithmetic is known.
    """
    asked = flat(config, own)
    values = {
        name: (asked[name],) if name in config.given and asked[name] != "auto" else tried
        for name, tried in choices.items()
    }
    policies = choices["grad_ckpt"]
    if values["grad_ckpt"][0] not in policies:
        raise UsageError(
            f"--plan knows --grad_ckpt {', '.join(policies)}, not {asked['grad_ckpt']}"
        )
    for combination in product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def check_prices(prices: Mapping[str, Price], kinds: tuple[str, ...], asked: PlanConfig) -> None:
    """Raise UsageError if a file of prices names none of the kinds of chips that are planned."""
    if not set(kinds) & set(prices):
        raise UsageError(f"--price {asked.price} has none of {', '.join(kinds)}")


# ------------------------------------------------------------------------------------------------
# Configurations as the command lines that give them.


ALWAYS = ("model", "batch_size", "precision", "grad_ckpt")
"""Fields that the command line of a plan names whatever their values."""


def words_of(
    *configs: Any, without: Collection[str] = (), always: Collection[str] = ()
) -> list[str]:
    """Return the flags that make these configurations of the defaults, but for fields ``without``.

    Fields ``always`` are there with their defaults, too. What the environment gives by a variable
    is left to it.
    """
    values, known = flat(*configs), by_field(*map(type, configs))
    return [
        word
        for name, option in known.items()
        if name not in without
        and (values[name] != option.field.default or name in always)
        and not (option.flag.env and os.environ.get(option.flag.env))
        for word in option.words(values[name])
    ]


def typed(*words: str | Sequence[str]) -> str:
    """Return words as a line that a shell takes."""
    return shlex.join(
        word for part in words for word in ([part] if isinstance(part, str) else part)
    )


# ------------------------------------------------------------------------------------------------
# Ways to train that were found, what each takes, and which of them are chosen.


_GIB = 2**30


@dataclass(frozen=True)
class Plan:
    """One way to train: hardware, flags, and what is expected of them."""

    hardware: str
    kind: str
    """Of its chips, as a file of prices names it."""
    chips: int
    settings: str
    """What was chosen beside the hardware, in a few words."""
    peak_bytes: float
    """Of a chip's memory, in use at once."""
    capacity_bytes: float
    step_s: float
    mfu: float
    compiled: bool
    """Whether the figures are the compiler's, or of arithmetic alone."""
    commands: dict[str, str]
    """Complete command lines by what they do, the training first."""
    work: Work
    price: Price | None

    @property
    def images_per_s(self) -> float:
        return self.work.batch_size / self.step_s

    @property
    def hours(self) -> float:
        return self.work.hours(self.step_s)

    @property
    def cost(self) -> float | None:
        """Return the dollars of the whole training; None if the chip has no price."""
        return None if self.price is None else self.hours * self.chips * self.price.per_hour

    def as_json(self) -> dict[str, Any]:
        return {
            "hardware": self.hardware,
            "chips": self.chips,
            "settings": self.settings,
            "peak_bytes": self.peak_bytes,
            "capacity_bytes": self.capacity_bytes,
            "expected_step_s": self.step_s,
            "expected_images_per_s": self.images_per_s,
            "expected_mfu": self.mfu,
            "compiled": self.compiled,
            "hours": self.hours,
            "cost_usd": self.cost,
            "commands": self.commands,
        }


def choose(plans: Sequence[Plan]) -> dict[str, Plan]:
    """Return the fastest, the cheapest and the smallest plan, by these words.

    Of equally small ones it is the cheapest. Without any price there is no cheapest.
    """
    if not plans:
        return {}
    priced = [plan for plan in plans if plan.cost is not None]
    chosen = {"fastest": min(plans, key=lambda plan: (plan.step_s, plan.chips))}
    if priced:
        chosen["cheapest"] = min(priced, key=_cost)
    chosen["smallest"] = min(plans, key=lambda plan: (plan.chips, _cost(plan), plan.step_s))
    return chosen


def _cost(plan: Plan) -> float:
    return float("inf") if plan.cost is None else plan.cost


_HEAD = "hardware|chips|settings|memory, GiB|step, ms|images/s|MFU|hours|cost, $|by".split("|")


def as_table(plans: Sequence[Plan]) -> str:
    """Return the plans as a table, the cheapest first."""
    rows = [_HEAD]
    for plan in sorted(plans, key=lambda plan: (_cost(plan), plan.step_s)):
        rows.append(
            [
                plan.hardware,
                str(plan.chips),
                plan.settings,
                f"{plan.peak_bytes / _GIB:.1f} of {plan.capacity_bytes / _GIB:.1f}",
                f"{plan.step_s * 1e3:,.1f}",
                f"{plan.images_per_s:,.0f}",
                f"{100 * plan.mfu:.0f} %",
                f"{plan.hours:,.1f}" if plan.hours < 1000 else f"{plan.hours:,.0f}",
                "no price" if plan.cost is None else f"{plan.cost:,.0f}",
                "compiler" if plan.compiled else "arithmetic",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    left = {0, 2, len(_HEAD) - 1}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


# ------------------------------------------------------------------------------------------------
# Draws the cost of a training against the time that it takes.


matplotlib.use("Agg")


_COLOURS = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
_PLAIN = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:.3g}")
_HEIGHTS = (10, 26, 42)
"""Points above its place at which each of the chosen is named, so that names keep apart."""


def draw(plans: Sequence[Plan], chosen: Mapping[str, Plan], title: str, path: Path) -> Path:
    """Draw each plan as a point, those of one kind of chip in one colour, and name the chosen.

    Full points are the compiler's figures, hollow ones arithmetic. Without any price the chips are
    drawn in the place of the cost.
    """
    priced = [plan for plan in plans if plan.cost is not None]
    shown = priced or list(plans)
    figure, axis = plt.subplots(figsize=(9, 6), layout="constrained")
    for number, kind in enumerate(sorted({plan.kind for plan in shown})):
        colour = _COLOURS[number % len(_COLOURS)]
        for compiled in (True, False):
            of_kind = [p for p in shown if p.kind == kind and p.compiled == compiled]
            if of_kind:
                axis.scatter(
                    [plan.hours for plan in of_kind],
                    [_height(plan) for plan in of_kind],
                    s=45,
                    facecolors=colour if compiled else "none",
                    edgecolors=colour,
                    label=kind if compiled else f"{kind}, arithmetic only",
                )
    names: dict[tuple[float, float, str], list[str]] = {}
    for name, plan in chosen.items():
        if plan in shown:
            names.setdefault((plan.hours, _height(plan), plan.hardware), []).append(name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.margins(0.2)
    heights = [_height(plan) for plan in shown]
    middle = _middle([plan.hours for plan in shown])
    for above, ((hours, height, hardware), which) in zip(_HEIGHTS, names.items(), strict=False):
        right = hours <= middle  # of the middle: the text goes where there is room
        axis.annotate(
            f"{', '.join(which)}: {hardware}",
            (hours, height),
            (8 if right else -8, above),
            textcoords="offset points",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.6},
            ha="left" if right else "right",
        )
    for each, values in ((axis.xaxis, [plan.hours for plan in shown]), (axis.yaxis, heights)):
        narrow = max(values) < 5 * min(values)
        each.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7) if narrow else (1, 2, 5)))
        each.set_major_formatter(_PLAIN)
        each.set_minor_formatter(NullFormatter())
    axis.set_xlabel("hours to train")
    axis.set_ylabel("cost, $" if priced else "chips (no prices)")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)
    return path


def _height(plan: Plan) -> float:
    return plan.chips if plan.cost is None else plan.cost


def _middle(values: Sequence[float]) -> float:
    return (min(values) * max(values)) ** 0.5


# ------------------------------------------------------------------------------------------------


NOTHING_FITS = 3
"""The exit code where no plan was found."""
_ROWS = 30


@dataclass(frozen=True)
class Outcome:
    """What a backend has found."""

    config: RunConfig
    what: str
    """The model, in words."""
    work: Work
    prices: Mapping[str, Price]
    plans: list[Plan]
    notes: list[str]
    picture: Path

    @property
    def chosen(self) -> dict[str, Plan]:
        """Return the plans that are named, of those that the compiler has seen if there are any."""
        compiled = [plan for plan in self.plans if plan.compiled]
        return choose(compiled or self.plans)


def tell(outcome: Outcome) -> int:
    """Print what was found, draw the picture, and return the exit code."""
    chosen, work = outcome.chosen, outcome.work
    title = f"{outcome.what}, batch {work.batch_size:,}, {work.epochs} epochs"
    if outcome.plans:
        draw(outcome.plans, chosen, f"To train {title}", outcome.picture)
    if outcome.config.use.json:
        print(json.dumps(_as_json(outcome)))
    else:
        print("\n".join(_lines(outcome, title)))
    return 0 if outcome.plans else NOTHING_FITS


def _as_json(outcome: Outcome) -> dict[str, object]:
    return {
        "work": asdict(outcome.work),
        "plans": [plan.as_json() for plan in outcome.plans],
        **{name: plan.as_json() for name, plan in outcome.chosen.items()},
        "prices": {kind: asdict(price) for kind, price in outcome.prices.items()},
        "notes": outcome.notes,
        "picture": str(outcome.picture) if outcome.plans else None,
    }


def _lines(outcome: Outcome, title: str) -> list[str]:
    work = outcome.work
    lines = [
        title,
        f"{work.steps:,} steps, {work.images:,} training images ({work.counted})",
        *outcome.notes,
    ]
    if not outcome.plans:
        hours = outcome.config.planning.hours
        within = f" in {hours:g} hours" if hours else ""
        return [*lines, "", f"nothing fits{within}: more --chips_at_most, or other hardware"]
    rows = outcome.plans[:_ROWS]
    lines += ["", as_table(rows)]
    if len(outcome.plans) > len(rows):
        lines.append(f"and {len(outcome.plans) - len(rows)} more (--json has all)")
    for name, plan in outcome.chosen.items():
        lines += ["", f"{name}: {plan.hardware}, {_figures(plan)}"]
        lines += [f"  {what}: {command}" for what, command in plan.commands.items()]
    used = sorted({plan.kind for plan in outcome.plans})
    lines += ["", "prices of a chip for an hour (--price FILE has others):"]
    lines += [f"  {kind}: {outcome.prices.get(kind, 'none')}" for kind in used]
    return [*lines, f"picture: {outcome.picture}"]


def _figures(plan: Plan) -> str:
    cost = "no price" if plan.cost is None else f"${plan.cost:,.0f}"
    by = "" if plan.compiled else ", by arithmetic, not compiled"
    return f"{plan.hours:,.1f} hours, {cost}{by}"
