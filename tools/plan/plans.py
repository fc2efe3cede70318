"""The parts of ``--plan`` around the search: requests, candidates, plans, printing.

A request is read from the flags: the training in steps, and the prices of hardware. The plans that
the search finds are printed as a table or JSON, and drawn.
"""

import json
import math
import os
import sys
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from data.files import DataFolderError
from data.open import open_data
from data.source import DatasetRequest
from models.spec import ModelSpec
from tools.plan.config import PlanConfig
from tools.plan.stacks import Stack
from training.config import RunConfig
from training.data import opener_of, view_of
from training.errors import UsageError
from training.files import read_whole
from training.flags import by_field, flat, values_without_secrets
from training.logs.figures import drawing, pyplot, save_figure
from training.mesh import Mesh, replicas
from training.resolve import Run, resolve_common, resolve_model

# -- prices: read from a small file that anyone can replace ------------------------------------

SHIPPED = Path(__file__).with_name("prices.toml")


@dataclass(frozen=True)
class Price:
    """What one chip costs for an hour, and where the figure is from."""

    per_hour: float
    """US dollars."""
    date: str
    source: str


def read_prices(name: str | None) -> dict[str, Price]:
    """Return the price of each kind of chip that a file names, of the shipped file for None.

    A name that ends in ".json" is read as JSON, any other as TOML. Raises UsageError.
    """
    path = Path(name) if name else SHIPPED
    try:
        text = read_whole(path).decode()
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        prices = {
            kind: Price(
                float(table["price"]),
                *(str(table.get(key, f"no {key}")) for key in ("date", "source")),
            )
            for kind, table in tables.items()
        }
        if not prices or not all(0 <= price.per_hour < math.inf for price in prices.values()):
            raise ValueError("a price is missing or invalid")
    except OSError as error:
        raise UsageError(f"--price {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        detail = f": {str(error).splitlines()[0]}" if isinstance(error, ValueError) else ""
        raise UsageError(
            f"--price {path} must have a table per chip, as {SHIPPED.name}, with its "
            f'"price" in dollars per hour{detail}'
        ) from None
    return prices


# -- the training in steps -----------------------------------------------------------------------

IMAGENET = 1_281_167
"""Training images of ImageNet-1k."""


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
    # Images in files may be on the machines that will train, and not here.
    is_in_files = data.data_source in ("folder", "volumes", "webdataset")
    if train_images is not None:
        images, counted = train_images, "--train_images"
    elif data.data_source == "fake" or (is_in_files and not Path(data.data_dir).is_dir()):
        images, counted = IMAGENET, "ImageNet's; set --train_images for another number"
    else:
        channels, *size = model.sizes.input_shape
        classes, labels = model.sizes.num_classes, config.objective.uses_labels
        wanted = DatasetRequest(
            data,
            channels,
            tuple(size),
            classes,
            config.seed,
            labels=labels,
            opened_by=opener_of(config),
        )
        try:
            images = open_data(wanted).train_length
        except DataFolderError as error:
            raise UsageError(str(error)) from None
        counted = f"--data_source {data.data_source}"
    images_a_step = batch_size
    view = view_of(Run(config, None, model, Mesh(), None), augment=True)
    if view.images_per_sample > 1:
        images_a_step *= view.images_per_sample
        counted += f"; {view.images_per_sample} images of the largest size per sample"
    if images < images_a_step:
        raise UsageError(
            f"{images:,} training images ({counted}) are fewer than --batch_size {batch_size}"
        )
    steps = config.num_epochs * (images // images_a_step)  # what is left of an epoch is dropped
    if config.max_steps is not None:
        steps = min(steps, config.max_steps)
    return Work(images, counted, batch_size, config.num_epochs, steps)


# -- what is asked for -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """The training to plan, and what hardware costs."""

    config: RunConfig
    stack: Stack
    plan: PlanConfig
    model: ModelSpec
    work: Work
    prices: Mapping[str, Price]
    """By kind of chip."""


def read_request(
    config: RunConfig, stack: Stack, plan: PlanConfig, kinds: Collection[str]
) -> Request:
    """Return what the flags ask for, on hardware of these kinds. Raises UsageError."""
    prices = read_prices(plan.price)
    if not set(kinds) & set(prices):
        raise UsageError(f"--price {plan.price} has no price for any of {', '.join(kinds)}")
    resolved = resolve_common(config)
    replicas(config.sharding)  # for its checks
    resolved, model = resolve_model(resolved)
    # Otherwise as it was given: plans name no other choices of the program.
    config = replace(config, model=resolved.model)
    work = find_work(resolved, model, plan.train_images)
    return Request(config, stack, plan, model, work, prices)


# -- command lines ----------------------------------------------------------------------------

ALWAYS = ("model", "batch_size", "precision", "grad_ckpt")
"""Fields that the command line of a plan names whatever their values."""


def words_of(
    *configs: Any, without: Collection[str] = (), always: Collection[str] = ()
) -> list[str]:
    """Return the flags that make these configurations of the defaults, but for fields ``without``
    and for passwords and signatures in URLs.

    Fields ``always`` are there with their defaults, too. What the environment gives by a variable
    is left to it.
    """
    values, known = values_without_secrets(flat(*configs)), by_field(*map(type, configs))
    return [
        word
        for name, option in known.items()
        if name not in without
        and (values[name] != option.field.default or name in always)
        and not (option.flag.env and os.environ.get(option.flag.env))
        for word in option.words(values[name])
    ]


# -- plans ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HardwarePlan:
    """One way to train: hardware, flags, and what is expected of them."""

    hardware: str
    """The slice, with its number: "2 x v5e:16x16"."""
    kind: str
    """Of chip, as a file of prices names it."""
    chips: int
    settings: str
    """What was chosen beside the hardware, in a few words."""
    peak_bytes: float
    """Of a device's memory, in use at once."""
    capacity_bytes: float
    """Of a device's memory, that can be used."""
    expected_step_s: float
    expected_images_per_s: float
    expected_mfu: float
    compiled: bool
    """Whether the figures are the compiler's, or of arithmetic alone."""
    hours: float
    cost_usd: float | None
    """Of the whole training; None if the chip has no price."""
    commands: dict[str, str]
    """Complete command lines by what they do, the training first."""


NOTHING_FITS = 3
"""The exit code where no plan was found."""
_HEAD = "hardware|chips|settings|memory, GiB|step, ms|images/s|MFU|hours|cost, $|by".split("|")
_LEFT = {0, 2, len(_HEAD) - 1}
"""Columns of text."""
_ROWS = 30
_GIB = 2**30


def print_plans(request: Request, plans: list[HardwarePlan], notes: list[str]) -> int:
    """Print what was found as text or JSON, draw it, and return the exit code."""
    work, model = request.work, request.model
    known = [plan for plan in plans if plan.compiled] or plans  # those of the compiler, if any

    def cost(plan: HardwarePlan) -> float:
        return math.inf if plan.cost_usd is None else plan.cost_usd

    chosen: dict[str, HardwarePlan] = {}
    if known:
        chosen["fastest"] = min(known, key=lambda plan: (plan.expected_step_s, plan.chips))
        if any(plan.cost_usd is not None for plan in known):
            chosen["cheapest"] = min(known, key=cost)
        chosen["smallest"] = min(
            known, key=lambda plan: (plan.chips, cost(plan), plan.expected_step_s)
        )
    title = f"{model.name}, {model.parameter_count:,} parameters, batch {work.batch_size:,}"
    title += f", {work.epochs} epochs"
    picture, drawn = Path(request.plan.plan_dir) / "tpu.png", False
    if len(plans) > 1:
        with drawing(picture, lambda line: print(line, file=sys.stderr)):
            _draw(plans, chosen, f"Plans for training {title}", picture)
            drawn = True
    teacher_flops = sum(run.train_flops for run in model.runs if not run.learns)
    if teacher_flops:
        student_flops = model.train_flops_per_image - teacher_flops
        counted = f"{student_flops / 1e9:,.0f} and {teacher_flops / 1e9:,.0f}"
        notes = [*notes, f"MFU counts student and teacher: {counted} billion FLOPs per image"]
    if request.config.use.json:
        report = {
            "work": asdict(work),
            "plans": [asdict(plan) for plan in plans],
            **{name: asdict(plan) for name, plan in chosen.items()},
            "prices": {kind: asdict(price) for kind, price in request.prices.items()},
            "notes": notes,
            "picture": str(picture) if drawn else None,
        }
        print(json.dumps(report))
        return 0 if plans else NOTHING_FITS

    print(title)
    print(f"{work.steps:,} steps, {work.images:,} training images ({work.counted})")
    print(*notes, sep="\n")
    if not plans:
        within = f" within --hours {request.plan.hours:g}" if request.plan.hours else ""
        mend = "--tpu_topology" if request.stack.xla.tpu_topology else "--chips_at_most"
        print(f"\nnothing fits{within}: use larger slices ({mend})")
        return NOTHING_FITS
    rows = [_HEAD]
    for plan in sorted(plans[:_ROWS], key=lambda plan: (cost(plan), plan.expected_step_s)):
        rows.append(
            [
                plan.hardware,
                str(plan.chips),
                plan.settings,
                f"{plan.peak_bytes / _GIB:.1f} of {plan.capacity_bytes / _GIB:.1f}",
                f"{plan.expected_step_s * 1e3:,.1f}",
                f"{plan.expected_images_per_s:,.0f}",
                f"{100 * plan.expected_mfu:.0f} %",
                f"{plan.hours:,.1f}" if plan.hours < 1000 else f"{plan.hours:,.0f}",
                "no price" if plan.cost_usd is None else f"{plan.cost_usd:,.0f}",
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
        print(f"... and {len(plans) - _ROWS} more (--json lists all)")
    for name, plan in chosen.items():
        names = [each for each, other in chosen.items() if other is plan]
        if name != names[0]:
            continue
        title = ", ".join(names) if len(plans) > 1 else "plan"
        dollars = "no price" if plan.cost_usd is None else f"${plan.cost_usd:,.0f}"
        by = "" if plan.compiled else ", estimated by arithmetic, not compiled"
        print(f"\n{title}: {plan.hardware}, {plan.hours:,.1f} hours, {dollars}{by}")
        for action, command in plan.commands.items():
            print(f"  {action}: {command}")
    print("\nprices per chip-hour (override with --price FILE):")
    for kind in sorted({plan.kind for plan in plans}):
        price = request.prices.get(kind)
        known_price = f"${price.per_hour:.2f} ({price.date}; {price.source})" if price else "none"
        print(f"  {kind}: {known_price}")
    if drawn:
        print(f"picture: {picture}")
    return 0


def _draw(
    plans: list[HardwarePlan], chosen: Mapping[str, HardwarePlan], title: str, path: Path
) -> None:
    """Draw the cost of each plan against its hours, chips of one kind in one colour, and name the
    chosen.

    Full points are the compiler's figures, hollow ones arithmetic. Without any price the chips are
    drawn instead of the cost.
    """
    priced = [plan for plan in plans if plan.cost_usd is not None]
    shown, height = priced or plans, attrgetter("cost_usd" if priced else "chips")
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    for number, kind in enumerate(sorted({plan.kind for plan in shown})):
        for compiled in (True, False):
            of_kind = [p for p in shown if p.kind == kind and p.compiled == compiled]
            if of_kind:
                axes.scatter(
                    [plan.hours for plan in of_kind],
                    [height(plan) for plan in of_kind],
                    s=45,
                    facecolors=f"C{number}" if compiled else "none",
                    edgecolors=f"C{number}",
                    label=kind if compiled else f"{kind}, arithmetic only",
                )

    # Names of the chosen, at several heights so that they keep apart, and where there is room.
    hours, heights = [plan.hours for plan in shown], [height(plan) for plan in shown]
    middle = (min(hours) * max(hours)) ** 0.5
    names: dict[tuple[float, float, str], list[str]] = {}
    for name, plan in chosen.items():
        if plan in shown:
            names.setdefault((plan.hours, height(plan), plan.hardware), []).append(name)
    for number, ((x, y, hardware), which) in enumerate(names.items()):
        axes.annotate(
            f"{', '.join(which)}: {hardware}",
            (x, y),
            (8 if x <= middle else -8, 10 + 16 * number),
            textcoords="offset points",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.6},
            ha="left" if x <= middle else "right",
        )

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(0.2)
    for axis, values in ((axes.xaxis, hours), (axes.yaxis, heights)):
        narrow = max(values) < 5 * min(values)
        ticks = (1, 1.5, 2, 3, 4, 5, 7) if narrow else (1, 2, 5)
        axis.set_major_locator(plt.LogLocator(subs=ticks))
        axis.set_major_formatter(lambda v, _: f"{v:,.0f}" if v >= 10 else f"{v:.3g}")
        axis.set_minor_formatter(plt.NullFormatter())
    axes.set_xlabel("hours to train")
    axes.set_ylabel("cost, $" if priced else "chips (no prices)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)
