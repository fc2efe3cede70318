"""Rows of domain_parallel.py: as tables, as CSV, and plotted against devices per image."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import markdown
from training.logs.figures import pyplot, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = (
    *("on", "ddp", "domain", "size", "batch", "parameters"),
    *("forward s", "train s", "inference GB", "train GB", "samples/s", "samples/s/device"),
    *("inference saved %", "train saved %", "note"),
)
OOM = "OOM"
FORWARD, TRAIN = "forward", "train"


@dataclass
class Row:
    """One configuration, and what was found out about it; GB are 10^9 bytes of one device."""

    on: str
    """The backend that it was measured on, or the TPU slice that it was compiled for."""
    ddp: int
    """Groups of devices that work on different images."""
    domain: int
    """Devices that share an image."""
    dimension: int
    size: int
    """Pixels of each side of an image."""
    batch: int
    parameters: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Of a forward pass and of a training step, by name, as far as they ran."""
    memory_gb: dict[str, float] = field(default_factory=dict)
    out_of_memory: set[str] = field(default_factory=set)
    """Which of the two, forward and train, did not fit."""
    device: str = ""
    """The name of the devices that it was measured on, as they tell it."""
    note: str = ""
    """Why it was not measured, or what else the compiler says."""

    one_device: Row | None = None
    """The same images on one device, if that is a row too."""

    @property
    def devices(self) -> int:
        return self.ddp * self.domain

    @property
    def place(self) -> str:
        """The backend, or the kind of the slice, whose chips differ along a sweep."""
        return self.on.partition(":")[0]

    @property
    def shape(self) -> str:
        return "x".join([str(self.size)] * self.dimension)

    def images_per_s(self, what: str) -> str | float | None:
        """Return images a second, "OOM", or None for what was not measured."""
        if what in self.out_of_memory:
            return OOM
        seconds = self.seconds.get(what)
        return self.batch / seconds if seconds else None

    def saved_percent(self, what: str) -> str | float | None:
        """Return how much less memory a device needs than one device alone, in per cent of that."""
        if what in self.out_of_memory:
            return OOM
        one = self.one_device
        if one is None or what in one.out_of_memory or what not in self.memory_gb:
            return None
        alone = one.memory_gb.get(what)
        return 100 * (1 - self.memory_gb[what] / alone) if alone else None

    def values(self) -> dict[str, str | int | float | None]:
        """Return what stands in each column; a time is "OOM" where that did not fit."""
        trained = TRAIN in self.seconds or TRAIN in self.out_of_memory
        pace = self.images_per_s(TRAIN if trained else FORWARD)
        pace = None if isinstance(pace, str) else pace
        times = {
            what: OOM if what in self.out_of_memory else self.seconds.get(what)
            for what in (FORWARD, TRAIN)
        }
        return {
            "on": self.on,
            "ddp": self.ddp,
            "domain": self.domain,
            "size": self.shape,
            "batch": self.batch,
            "parameters": self.parameters,
            "forward s": times[FORWARD],
            "train s": times[TRAIN],
            "inference GB": self.memory_gb.get(FORWARD),
            "train GB": self.memory_gb.get(TRAIN),
            "samples/s": pace,
            "samples/s/device": pace and pace / self.devices,
            "inference saved %": self.saved_percent(FORWARD),
            "train saved %": self.saved_percent(TRAIN),
            "note": self.note or self.device,
        }

    def line(self) -> str:
        """Return the row of the table."""
        return f"| {' | '.join(_cell(value) for value in self.values().values())} |"


def _cell(value: str | int | float | None) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else value


def compare_with_one_device(rows: Sequence[Row]) -> None:
    """Let each row know the row of the same images on one device."""
    alone = {(row.place, row.size, row.batch): row for row in rows if row.devices == 1}
    for row in rows:
        if row.devices > 1:
            row.one_device = alone.get((row.place, row.size, row.batch))


def devices_of(rows: Sequence[Row]) -> list[str]:
    """Return the names of the devices that the rows were measured on."""
    return list(dict.fromkeys(row.device for row in rows if row.device))


def tables(rows: Sequence[Row]) -> list[str]:
    """Return the lines of tables by devices and batch: images a second, and memory saved."""
    lines, batches = list[str](), sorted({row.batch for row in rows})
    figures: tuple[tuple[str, Callable[[Row, str], str | float | None]], ...] = (
        ("images/s", Row.images_per_s),
        ("memory saved per device, % of one device", Row.saved_percent),
    )
    of_sizes = dict.fromkeys((row.place, row.shape) for row in rows)
    for (place, shape), what, (title, figure) in itertools.product(
        of_sizes, (TRAIN, FORWARD), figures
    ):
        group = [row for row in rows if (row.place, row.shape) == (place, shape)]
        cells = {(row.ddp, row.domain, row.batch): figure(row, what) for row in group}
        if all(value is None for value in cells.values()):
            continue
        meshes = dict.fromkeys((ddp, domain) for ddp, domain, _ in cells)
        body = [
            [
                *(str(number) for number in (ddp * domain, ddp, domain)),
                *(_cell(cells.get((ddp, domain, batch))) for batch in batches),
            ]
            for ddp, domain in meshes
        ]
        head = ["devices", "ddp", "domain", *(f"batch {batch}" for batch in batches)]
        where = ", ".join(devices_of(group)) or place
        lines += [f"{title}: {what}, {shape}, {where}", "", *markdown([head, *body]), ""]
    return lines


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(row.values() for row in rows)


_LEGEND_COLUMNS = 4
_MARKERS = "os^Dv"


def plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw latency, speed-up and memory against the devices that share an image, into a PNG.

    A line is one size of images on one kind of slice or backend, dashed for the forward pass.
    Speed-up is over the fewest devices that ran, taken as ideal so far. What ran out of memory
    has a cross at the upper edge.
    """
    plt = pyplot()
    counts = sorted({row.domain for row in rows})
    names = list(dict.fromkeys(_line_of(row) for row in rows))
    height = 4.4 + 0.2 * math.ceil(2 * len(names) / _LEGEND_COLUMNS)  # below: the legend
    figure, (latency, speed, memory) = plt.subplots(
        1, 3, figsize=(15, height), layout="constrained"
    )
    for number, name in enumerate(names):
        of_line = sorted((r for r in rows if _line_of(r) == name), key=lambda row: row.domain)
        for what, dashes in ((TRAIN, "-"), (FORWARD, "--")):
            marker = _MARKERS[number // 10 % len(_MARKERS)]  # there are ten colors
            style = {"color": f"C{number % 10}", "linestyle": dashes, "marker": marker}
            label = f"{name}, {what}"
            _draw(latency, of_line, _value("seconds", what), style, label)
            _draw(speed, of_line, _speed_up(of_line, what), style, "")
            _draw(memory, of_line, _value("memory_gb", what), style, "")
            gone = [row.domain for row in of_line if what in row.out_of_memory]
            for axis in (latency, memory):
                at_edge = axis.get_xaxis_transform()
                axis.plot(gone, [0.97] * len(gone), "x", color=style["color"], transform=at_edge)
    speed.plot(counts, counts, color="grey", linewidth=0.8, label="ideal")
    speed.legend(fontsize=8)
    words = {latency: "seconds", speed: "speed-up", memory: "peak memory per device, GB"}
    for axis, word in words.items():
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
        axis.set_xlabel("devices that share an image")
        axis.set_ylabel(word)
        axis.grid(alpha=0.3)
    latency.set_yscale("log")
    speed.set_yscale("log", base=2)
    speed.yaxis.set_major_formatter("{x:g}")
    memory.set_ylim(bottom=0)
    figure.legend(
        *latency.get_legend_handles_labels(), loc="outside lower center", ncols=_LEGEND_COLUMNS
    )
    crosses = "; x: out of memory" if any(row.out_of_memory for row in rows) else ""
    figure.suptitle(title + crosses)
    save_figure(figure, path)


def _line_of(row: Row) -> str:
    """Return the name of the line that a row is a point of: a slice's chips differ along it."""
    each = f"batch {row.batch // row.ddp} per image group" if row.ddp > 1 else f"batch {row.batch}"
    return f"{row.place}, {row.shape}, {each}"


Value = Callable[[Row], float | None]


def _draw(axis: Axes, rows: Sequence[Row], value: Value, style: dict, label: str) -> None:
    points = [(row.domain, found) for row in rows if (found := value(row)) is not None]
    if points:
        axis.plot(*zip(*points, strict=True), **style, label=label or None)


def _value(name: str, what: str) -> Value:
    def of(row: Row) -> float | None:
        return getattr(row, name).get(what)

    return of


def _speed_up(rows: Sequence[Row], what: str) -> Value:
    """Return the speed-up of a row over the first that ran, which has as many devices as it has."""
    first = next((row for row in rows if what in row.seconds), None)

    def of(row: Row) -> float | None:
        if first is None or what not in row.seconds:
            return None
        return first.domain * first.seconds[what] / row.seconds[what]

    return of
