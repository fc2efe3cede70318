"""The parts of ``--plan`` around the search: requests, candidates, plans, printing.

A request is read from the flags: the training in steps, and the prices of hardware. The plans that
the search finds are printed as a table or JSON, and drawn.
"""

import functools
import json
import math
import os
import shlex
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from data.files import DataFolderError
from data.source import DatasetRequest, open_data
from models.spec import ModelSpec
from tools.plan.config import PlanConfig
from training.config import RunConfig
from training.errors import UsageError
from training.flags import by_field, flat
from training.logs.figures import drawing, pyplot, save_figure
from training.mesh import replicas
from training.resolve import resolve_common, resolve_model
from xla_fsdp.config import XlaConfig

# -- prices: read from a small file that anyone can replace ------------------------------------

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
    form = "JSON" if path.suffix == ".json" else "TOML"
    try:
        tables = json.loads(text) if form == "JSON" else tomllib.loads(text)
    except ValueError as error:
        raise UsageError(f"--price {path} is no {form}: {str(error).splitlines()[0]}") from None
    if not isinstance(tables, Mapping) or not tables:
        raise UsageError(f"--price {path} names no chip: a table for each, as in {SHIPPED.name}")
    prices = {}
    for kind, table in tables.items():
        value = table.get("price") if isinstance(table, Mapping) else None
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
        if not 0 <= number < math.inf:
            raise UsageError(
                f'--price {path}: "{kind}" requires a "price", dollars an hour of one chip'
            )
        date, source = (str(table.get(key, f"no {key}")) for key in ("date", "source"))
        prices[kind] = Price(float(number), date, source)
    return prices


# -- the training in steps -----------------------------------------------------------------------

IMAGENET = 1_281_167
"""Training images of ImageNet-1k."""
_ELSEWHERE = ("folder", "volumes", "webdataset")
"""Sources whose images may be on the machines that will train, and not here."""


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


def find_work(config: RunConfig, model: ModelSpec, train_images: int | None) -> Work:
    """Return the steps that ``--num_epochs`` and ``--max_steps`` ask for, of epochs of
    ``--train_images``. Raises UsageError."""
    data, batch_size = config.data, config.data.batch_size
    is_here = data.data_source not in _ELSEWHERE or Path(data.data_dir).is_dir()
    if train_images is not None:
        images, counted = train_images, "--train_images"
    elif data.data_source == "fake" or not is_here:
        images, counted = IMAGENET, "ImageNet's; --train_images is another number"
    else:
        channels, *size = model.sizes.input_shape
        classes, labels = model.sizes.num_classes, config.objective.uses_labels
        wanted = DatasetRequest(data, channels, tuple(size), classes, config.seed, labels=labels)
        try:
            images = open_data(wanted).train_length
        except DataFolderError as error:
            raise UsageError(str(error)) from None
        counted = f"--data_source {data.data_source}"
    if images < batch_size:
        raise UsageError(
            f"{images:,} training images ({counted}) are fewer than --batch_size {batch_size}"
        )
    steps = config.num_epochs * (images // batch_size)  # what is left of an epoch is dropped
    if config.max_steps is not None:
        steps = min(steps, config.max_steps)
    return Work(images, counted, batch_size, config.num_epochs, steps)


# -- what is asked for -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """The training to plan, and what hardware costs."""

    config: RunConfig
    xla: XlaConfig
    plan: PlanConfig
    model: ModelSpec
    work: Work
    prices: Mapping[str, Price]
    """By kind of chip."""

    @property
    def most_hours(self) -> float:
        return self.plan.hours or math.inf


def read_request(
    config: RunConfig, xla: XlaConfig, plan: PlanConfig, kinds: Collection[str]
) -> Request:
    """Return what the flags ask for, on hardware of these kinds. Raises UsageError."""
    prices = read_prices(plan.price)
    if not set(kinds) & set(prices):
        raise UsageError(f"--price {plan.price} has none of {', '.join(kinds)}")
    resolve_common(config)  # for its checks
    replicas(config.sharding)  # the same
    config, model = resolve_model(config)
    return Request(config, xla, plan, model, find_work(config, model, plan.train_images), prices)


# -- command lines ----------------------------------------------------------------------------

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


# -- plans ---------------------------------------------------------------------------------------

_GIB = 2**30


@dataclass(frozen=True)
class HardwarePlan:
    """One way to train: hardware, flags, and what is expected of them."""

    request: Request
    hardware: str
    """The slice, with its number: "2 x v5e:16x16"."""
    kind: str
    """Of chip, as a file of prices names it."""
    chips: int
    capacity_bytes: float
    """Of a device's memory, that can be used."""
    chip_flops: float
    """FLOP/s at the chip's peak."""
    settings: str
    """What was chosen beside the hardware, in a few words."""
    peak_bytes: float
    """Of a device's memory, in use at once."""
    step_s: float
    compiled: bool
    """Whether the figures are the compiler's, or of arithmetic alone."""
    commands: dict[str, list[str]]
    """Complete command lines by what they do, the training first."""

    @property
    def images_per_s(self) -> float:
        return self.request.work.batch_size / self.step_s

    @property
    def mfu(self) -> float:
        flops = self.request.model.train_flops_per_image * self.request.work.batch_size
        return flops / (self.chips * self.chip_flops) / self.step_s

    @property
    def hours(self) -> float:
        return self.request.work.steps * self.step_s / 3600

    @property
    def cost(self) -> float:
        """The dollars of the whole training; infinite if the chip has no price."""
        price = self.request.prices.get(self.kind)
        return math.inf if price is None else self.hours * self.chips * price.per_hour

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
            "cost_usd": self.cost if self.cost < math.inf else None,
            "commands": {what: shlex.join(words) for what, words in self.commands.items()},
        }


# -- printing --------------------------------------------------------------------------------------

NOTHING_FITS = 3
"""The exit code where no plan was found."""
_HEAD = "hardware|chips|settings|memory, GiB|step, ms|images/s|MFU|hours|cost, $|by".split("|")
_LEFT = {0, 2, len(_HEAD) - 1}
"""Columns of text."""
_ROWS = 30


def print_plans(
    request: Request, what: str, plans: list[HardwarePlan], notes: list[str], picture: Path
) -> int:
    """Print what was found as text or JSON, draw the picture, and return the exit code.

    ``what``: the model, in words.
    """
    work, chosen = request.work, {}
    if plans:  # those that the compiler has seen if there are any
        known = [plan for plan in plans if plan.compiled] or plans
        priced = [plan for plan in known if plan.cost < math.inf]
        chosen["fastest"] = min(known, key=lambda plan: (plan.step_s, plan.chips))
        if priced:
            chosen["cheapest"] = min(priced, key=lambda plan: plan.cost)
        chosen["smallest"] = min(known, key=lambda plan: (plan.chips, plan.cost, plan.step_s))
    teacher_flops = sum(run.train_flops for run in request.model.runs if not run.learns)
    if teacher_flops:
        student_flops = request.model.train_flops_per_image - teacher_flops
        counted = f"{student_flops / 1e9:,.0f} and {teacher_flops / 1e9:,.0f}"
        notes = [*notes, f"MFU counts student and teacher, {counted} billion FLOPs of an image"]
    title = f"{what}, batch {work.batch_size:,}, {work.epochs} epochs"
    if request.config.use.json:
        report = {
            "work": asdict(work),
            "plans": [plan.as_json() for plan in plans],
            **{name: plan.as_json() for name, plan in chosen.items()},
            "prices": {kind: asdict(price) for kind, price in request.prices.items()},
            "notes": notes,
            "picture": str(picture) if plans else None,
        }
        print(json.dumps(report), flush=True)
    else:
        print(title)
        _print_text(request, plans, chosen, notes)
    if plans:
        with drawing(picture, functools.partial(print, file=sys.stderr)):
            _draw(plans, chosen, f"To train {title}", picture)
            if not request.config.use.json:
                print(f"picture: {picture}")
    return 0 if plans else NOTHING_FITS


def _print_text(
    request: Request,
    plans: Sequence[HardwarePlan],
    chosen: Mapping[str, HardwarePlan],
    notes: Sequence[str],
) -> None:
    """Print the plans as a table, and the commands of the chosen."""
    work = request.work
    print(f"{work.steps:,} steps, {work.images:,} training images ({work.counted})")
    for note in notes:
        print(note)
    if not plans:
        hours = request.plan.hours
        within = f" in {hours:g} hours" if hours else ""
        print(f"\nnothing fits{within}: more --chips_at_most, or other hardware")
        return

    rows = [_HEAD]
    for plan in sorted(plans[:_ROWS], key=lambda plan: (plan.cost, plan.step_s)):
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
                f"{plan.cost:,.0f}" if plan.cost < math.inf else "no price",
                "compiler" if plan.compiled else "arithmetic",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print()
    for row in rows:
        cells = (
            cell.ljust(width) if column in _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())
    if len(plans) > _ROWS:
        print(f"and {len(plans) - _ROWS} more (--json has all)")
    for name, plan in chosen.items():
        cost = f"${plan.cost:,.0f}" if plan.cost < math.inf else "no price"
        by = "" if plan.compiled else ", by arithmetic, not compiled"
        print(f"\n{name}: {plan.hardware}, {plan.hours:,.1f} hours, {cost}{by}")
        for action, words in plan.commands.items():
            print(f"  {action}: {shlex.join(words)}")
    print("\nprices of a chip for an hour (--price FILE has others):")
    for kind in sorted({plan.kind for plan in plans}):
        print(f"  {kind}: {request.prices.get(kind, 'none')}")


_LABEL_POINTS = (10, 26, 42)
"""Points above its place at which each of the chosen is named, so that names keep apart."""


def _draw(
    plans: Sequence[HardwarePlan], chosen: Mapping[str, HardwarePlan], title: str, path: Path
) -> None:
    """Draw the cost of each plan against its hours, chips of one kind in one colour, and name the
    chosen.

    Full points are the compiler's figures, hollow ones arithmetic. Without any price the chips are
    drawn instead of the cost.
    """
    priced = [plan for plan in plans if plan.cost < math.inf]
    shown = priced or list(plans)

    height = attrgetter("cost" if priced else "chips")
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(9, 6), layout="constrained")
    for number, kind in enumerate(sorted({plan.kind for plan in shown})):
        colour = f"C{number}"
        for compiled in (True, False):
            of_kind = [p for p in shown if p.kind == kind and p.compiled == compiled]
            if of_kind:
                axis.scatter(
                    [plan.hours for plan in of_kind],
                    [height(plan) for plan in of_kind],
                    s=45,
                    facecolors=colour if compiled else "none",
                    edgecolors=colour,
                    label=kind if compiled else f"{kind}, arithmetic only",
                )
    names: dict[tuple[float, float, str], list[str]] = {}
    for name, plan in chosen.items():
        if plan in shown:
            names.setdefault((plan.hours, height(plan), plan.hardware), []).append(name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.margins(0.2)
    hours, heights = [plan.hours for plan in shown], [height(plan) for plan in shown]
    middle = (min(hours) * max(hours)) ** 0.5
    for points, ((x, y, hardware), which) in zip(_LABEL_POINTS, names.items(), strict=False):
        right = x <= middle  # the text goes where there is room
        axis.annotate(
            f"{', '.join(which)}: {hardware}",
            (x, y),
            (8 if right else -8, points),
            textcoords="offset points",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.6},
            ha="left" if right else "right",
        )
    for each, values in ((axis.xaxis, hours), (axis.yaxis, heights)):
        narrow = max(values) < 5 * min(values)
        each.set_major_locator(
            plt.LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7) if narrow else (1, 2, 5))
        )
        each.set_major_formatter(
            lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:.3g}"
        )
        each.set_minor_formatter(plt.NullFormatter())
    axis.set_xlabel("hours to train")
    axis.set_ylabel("cost, $" if priced else "chips (no prices)")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)
