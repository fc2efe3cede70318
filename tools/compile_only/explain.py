"""The picture of ``--explain``: a step's time by module of the model, and by kind of work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt

from tools.compile_only.expected import Links, Part, walk
from tools.compile_only.hlo import (
    Computations,
    Instruction,
    called_by,
    flops_inside,
    instruction_bytes,
    operands_of,
    output_bytes,
    parse_module,
    product_flops,
)
from tools.compile_only.names import OPTIMIZER, Origin, origin_in
from tools.compile_only.report import Report
from training.logs.records import save_figure
from xla_fsdp.tpu import Chip

# ------------------------------------------------------------------------------------------------
# What a step's time is spent on: by instruction, by the model's modules, and by kind of work.


KINDS = (
    "product",
    "kernel",
    "softmax",
    "elementwise, norm",
    "layout copy",
    "optimizer",
    "collective waited for",
    "DMA waited for",
    "host's memory waited for",
    "other slices waited for",
)
UNKNOWN = Origin("unknown", "")
_WAITS = {
    "waiting_s": "collective waited for",
    "dma_s": "DMA waited for",
    "host_s": "host's memory waited for",
    "dcn_s": "other slices waited for",
}
_MOVING = {
    *("parameter", "constant", "copy", "transpose", "bitcast", "reshape", "tuple", "convert"),
    *("slice", "dynamic-slice", "get-tuple-element", "broadcast", "pad", "concatenate", "fusion"),
}
_SHOWN = 20
_NEARLY = 0.5
"""Of its time, what the products or the bytes of an instruction must need to be what bounds it."""


@dataclass(frozen=True)
class Cost:
    """What an instruction of the schedule costs in a step, or the wait that it ends with."""

    name: str
    origin: Origin
    kind: str
    bound: str
    """What it could not be faster than: "products", "HBM", "vector units", "layout", "waiting"."""
    runs: int
    seconds: float
    """Of all runs together."""
    ideal: float | None
    """Seconds of its products at the chip's peak, over its own; None without products."""


def explain(hlo: str, links: Links, times: int = 1) -> list[Cost]:
    """Return what each instruction costs of a scheduled module that a step runs ``times`` times."""
    computations, entry = parse_module(hlo)
    parts = walk(computations, entry, links)
    origins = _Origins(computations)
    shapes = {
        name: {each.name: each.shape for each in inside} for name, inside in computations.items()
    }
    costs: list[Cost] = []
    for part in parts:
        origin = origins.of(part.instruction, part.computation)
        runs = part.runs * times
        for field, kind in _WAITS.items():
            seconds = runs * getattr(part.each, field)
            if seconds:
                name = part.instruction.name
                costs.append(Cost(name, origin, kind, "waiting", runs, seconds, None))
        own = part.each.cycles_s + part.each.kernels_s
        if own:
            given = shapes[part.computation]
            costs.append(_cost(part, own, origin, runs, computations, given, links.topology.chip))
    return costs


def _cost(
    part: Part,
    own: float,
    origin: Origin,
    runs: int,
    computations: Computations,
    shapes: dict[str, str],
    chip: Chip,
) -> Cost:
    each = part.instruction
    flops = product_flops(each, shapes, chip.int8_pace)
    flops += sum(f for f, _ in flops_inside(each, computations, chip.int8_pace))
    kind = _kind(part, flops, origin, computations)
    of_products = flops / chip.peak_flops / own
    of_bytes = instruction_bytes(each, shapes) / chip.hbm_bandwidth / own
    if kind == "layout copy":
        bound = "layout"
    elif max(of_products, of_bytes) < _NEARLY:
        bound = "in the kernel" if part.each.kernels_s else "vector units"
    else:
        bound = "products" if of_products > of_bytes else "HBM"
    return Cost(each.name, origin, kind, bound, runs, runs * own, of_products if flops else None)


def _kind(part: Part, flops: float, origin: Origin, computations: Computations) -> str:
    each = part.instruction
    if part.each.kernels_s:
        return "kernel"
    if flops:
        return "product"
    if origin.module == OPTIMIZER:
        return "optimizer"
    inside = [inner for name in called_by(each) for inner in computations.get(name, [])]
    opcodes = {inner.opcode for inner in inside} if each.opcode == "fusion" else {each.opcode}
    if opcodes <= _MOVING and opcodes & {"copy", "transpose"}:
        return "layout copy"
    return "softmax" if origin.module.rpartition(".")[2] == "attn" else "elementwise, norm"


class _Origins:
    """Finds the origin of an instruction: its own, or that of what it is given or is given to."""

    def __init__(self, computations: Computations) -> None:
        self._computations = computations
        self._named = {
            name: {each.name: each for each in inside} for name, inside in computations.items()
        }

    def of(self, each: Instruction, computation: str) -> Origin:
        found = self._own(each)
        if found:
            return found
        named = self._named[computation]
        near = [named[name] for name in operands_of(each) if name in named]
        near += [user for user in named.values() if each.name in operands_of(user)]
        return next((origin for origin in map(self._own, near) if origin), UNKNOWN)

    def _own(self, each: Instruction) -> Origin | None:
        """Return the origin of its costliest product, or else of most of what it computes."""
        if each.opcode == "fusion":
            products = flops_inside(each, self._computations)
            for _, inner in sorted(products, key=lambda pair: -pair[0]):
                found = origin_in(inner.text)
                if found:
                    return found
            sizes = defaultdict[Origin, float](float)
            for name in called_by(each):
                for inner in self._computations.get(name, []):
                    found = origin_in(inner.text)
                    if found and inner.opcode not in ("parameter", "constant", "broadcast"):
                        sizes[found] += output_bytes(inner)
            within = {o: size for o, size in sizes.items() if not _has_parts(o, sizes)}
            if within:
                return max(within, key=lambda origin: within[origin])
        return origin_in(each.text)


def _has_parts(origin: Origin, others: Iterable[Origin]) -> bool:
    """Tell whether one of the others is of a module within this one's, and so tells more."""
    return any(other.module.startswith(origin.module + ".") for other in others)


def shares(costs: Iterable[Cost], key: Callable[[Cost], str]) -> dict[str, float]:
    """Return the seconds of each group of costs, the longest first."""
    found = defaultdict[str, float](float)
    for cost in costs:
        found[key(cost)] += cost.seconds
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def module_of(cost: Cost) -> str:
    return cost.origin.module


def kind_of(cost: Cost) -> str:
    return cost.kind


def explained_json(costs: list[Cost]) -> dict[str, Any]:
    """Return what ``--json`` tells: the costliest instructions, and seconds by module and kind."""
    return {
        "costliest": [
            {
                "instruction": cost.name,
                "module": cost.origin.module,
                "phase": cost.origin.phase,
                "kind": cost.kind,
                "bound": cost.bound,
                "runs": cost.runs,
                "seconds": cost.seconds,
                "share_of_ideal": cost.ideal,
            }
            for cost in _costliest(costs)
        ],
        "seconds_by_module": shares(costs, module_of),
        "seconds_by_kind": shares(costs, kind_of),
    }


def explained_table(costs: list[Cost]) -> str:
    total = sum(cost.seconds for cost in costs)
    rows = [("ms", "share", "runs", "module", "", "kind", "of ideal", "bound by", "instruction")]
    for cost in _costliest(costs):
        ideal = "" if cost.ideal is None else f"{100 * cost.ideal:.0f} %"
        times = f"{cost.seconds * 1e3:.2f}", f"{100 * cost.seconds / total:.1f} %", str(cost.runs)
        where = cost.origin.module, cost.origin.phase
        rows.append((*times, *where, cost.kind, ideal, cost.bound, cost.name))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(_pad, row, widths)).rstrip() for row in rows]
    for key in (kind_of, module_of):
        told = (f"{name} {100 * s / total:.1f} %" for name, s in shares(costs, key).items())
        lines += ["", ", ".join(told)]
    return "\n".join(lines)


def _pad(text: str, width: int) -> str:
    return text.rjust(width) if text[:1].isdigit() else text.ljust(width)


def _costliest(costs: list[Cost]) -> list[Cost]:
    return sorted(costs, key=lambda cost: -cost.seconds)[:_SHOWN]


# ------------------------------------------------------------------------------------------------


matplotlib.use("Agg")


_LEAST = 0.005
"""Of the step: modules with less are drawn together."""
_COLOURS = dict(zip(KINDS, plt.get_cmap("tab10").colors, strict=False))  # type: ignore[attr-defined]


def draw(costs: list[Cost], report: Report, path: Path) -> None:
    """Draw a bar for each module, the costliest first, its parts coloured by kind."""
    total = sum(cost.seconds for cost in costs)
    of_module = shares(costs, module_of)
    shown = [name for name, seconds in of_module.items() if seconds >= _LEAST * total]
    groups = {name: [cost for cost in costs if cost.origin.module == name] for name in shown}
    rest = [cost for cost in costs if cost.origin.module not in groups]
    if rest:
        groups[f"{len(of_module) - len(shown)} others"] = rest
    figure, axis = plt.subplots(figsize=(9, 0.34 * len(groups) + 1.9), layout="constrained")
    drawn = set()
    for row, group in enumerate(groups.values()):
        left = 0.0
        of_kind = shares(group, kind_of)
        for kind in KINDS:
            if kind not in of_kind:
                continue
            label = None if kind in drawn else kind
            width = of_kind[kind] * 1e3
            axis.barh(row, width, left=left, color=_COLOURS[kind], label=label)
            drawn.add(kind)
            left += width
        axis.text(left, row, f" {left / total / 10:.1f} %", va="center", fontsize=8)
    axis.set_yticks(range(len(groups)), list(groups))
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_xlabel("ms a step on each device, by the compiler's cycles")
    axis.set_title(
        f"{report.parameters:,} parameters, batch {report.batch_size}, {report.topology}: "
        f"{total * 1e3:.4g} ms a step"
    )
    axis.legend(loc="lower right", fontsize=8)
    save_figure(figure, path)
