"""``--explain``: where a step's time goes, by instruction, module of the model and kind of work.

Module names are written into the graph while it is traced (``xla_fsdp/scopes.py``): torch_xla
writes them into the names of operations, torch_tpu into those of source files. The most expensive
instructions of the compiled graph are shown as a table or JSON, and the time by module as a plot.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.compile_only.expected import KERNEL, Links, walk
from tools.compile_only.hlo import (
    Instruction,
    array_bytes,
    instruction_bytes,
    parse_module,
    products_of,
)
from training.logs.figures import pyplot, save_figure
from xla_fsdp.scopes import OPTIMIZER, UNKNOWN, Scope, scope_in

# -- what each instruction costs -----------------------------------------------------------------

_KINDS = (
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
"""The kinds of work, in the order in which they are drawn."""
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
"""Opcodes that compute nothing."""
_NEARLY = 0.5
"""Share of its time that the products or the bytes of an instruction must need to bound it."""
_ROWS = 20
_SMALL = 0.005
"""Share of the step: modules with less are drawn together."""


@dataclass(frozen=True)
class Cost:
    """What an instruction of the schedule costs in a step, or the wait that it ends with."""

    instruction: str
    module: str
    """Of the model: "blocks.mlp.fc1" in whatever block, "loss", "optimizer", or "unknown"."""
    phase: str
    kind: str
    bound: str
    """What it could not be faster than: "products", "HBM", "vector units", "layout", "waiting"."""
    runs: int
    seconds: float
    """Of all runs together."""
    share_of_ideal: float | None
    """Seconds of its products at the chip's peak, over its own; None without products."""


def explain(hlo: str, links: Links, times: int = 1) -> list[Cost]:
    """Return what each instruction costs of a scheduled module that a step runs ``times`` times."""
    computations, entry = parse_module(_with_files(hlo))
    chip = links.topology.chip
    costs: list[Cost] = []
    for timed in walk(computations[entry], links):
        instruction, runs = timed.instruction, timed.runs * times
        module, phase = scope_near(instruction)
        where = instruction.name, module, phase
        for field, kind in _WAITS.items():
            if seconds := runs * getattr(timed.each, field):
                costs.append(Cost(*where, kind, "waiting", runs, seconds, None))
        own_s = timed.each.cycles_s + timed.each.kernels_s
        if not own_s:
            continue
        flops = sum(flops for flops, _ in products_of(instruction, chip.int8_speedup))
        of_products = flops / chip.peak_flops / own_s
        of_bytes = instruction_bytes(instruction) / chip.hbm_bandwidth / own_s
        kind = kind_of_work(instruction, module)
        if kind == "layout copy":
            bound = "layout"
        elif max(of_products, of_bytes) < _NEARLY:
            bound = "in the kernel" if kind == "kernel" else "vector units"
        else:
            bound = "products" if of_products > of_bytes else "HBM"
        ideal = of_products if flops else None
        costs.append(Cost(*where, kind, bound, runs, runs * own_s, ideal))
    return costs


_FILE = re.compile(r'^(\d+) "(.*)"$', re.M)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) ", re.M)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}", re.M)


def _with_files(hlo: str) -> str:
    """Return a module with the name of a scope beside the number of each stack frame that is in a
    file of such a name, or was called from one."""
    tables = hlo.partition("\nFileNames")[2].partition("\n%")[0]
    files = dict(_FILE.findall(tables.partition("FunctionNames")[0]))
    locations = dict(_LOCATION.findall(tables))
    names: dict[str, str] = {}
    for frame, location, parent in _FRAME.findall(tables):
        name = files.get(locations.get(location, ""), "")
        # A parent's number is written one too high; the outermost frame is its own.
        names[frame] = name if scope_in(name) else names.get(str(int(parent) - 1), "")
    return re.sub(
        r"stack_frame_id=(\d+)", lambda found: f"{found[0]} {names.get(found[1], '')}", hlo
    )


def kind_of_work(instruction: Instruction, module: str) -> str:
    """Return the kind of what an instruction of a module computes."""
    opcodes = {inner.opcode for inner in instruction.inside or [instruction]}
    if KERNEL in instruction.text:
        return "kernel"
    if any(flops for flops, _ in products_of(instruction)):
        return "product"
    if module == OPTIMIZER:
        return "optimizer"
    if opcodes <= _MOVING and opcodes & {"copy", "transpose"}:
        return "layout copy"
    return "softmax" if module.rpartition(".")[2] == "attn" else "elementwise, norm"


def scope_near(instruction: Instruction) -> Scope:
    """Return the scope of an instruction; without one of its own, that of an operand, or of what
    uses the result."""
    near = (instruction, *instruction.operands, *instruction.users)
    return next(filter(None, map(_scope_of, near)), UNKNOWN)


def _scope_of(instruction: Instruction) -> Scope | None:
    """Return the scope of its costliest product, or else of most of what it computes."""
    if instruction.opcode != "fusion":
        return scope_in(instruction.text)
    for _, product in sorted(products_of(instruction), key=lambda pair: -pair[0]):
        if scope := scope_in(product.text):
            return scope
    sizes = defaultdict[Scope, float](float)
    for inner in instruction.inside:
        scope = scope_in(inner.text)
        if scope and inner.opcode not in ("parameter", "constant", "broadcast"):
            sizes[scope] += array_bytes(inner.shape)
    # A module that another one is inside of is less exact than that one.
    innermost = {
        scope: size
        for scope, size in sizes.items()
        if not any(other.module.startswith(scope.module + ".") for other in sizes)
    }
    return max(innermost, key=innermost.__getitem__) if innermost else scope_in(instruction.text)


# -- JSON, table, picture ------------------------------------------------------------------------


def explained_json(costs: list[Cost]) -> dict[str, Any]:
    """Return the part of ``--json``: the costliest instructions, seconds by module and kind."""
    by_module, by_kind = defaultdict[str, float](float), defaultdict[str, float](float)
    for cost in costs:
        by_module[cost.module] += cost.seconds
        by_kind[cost.kind] += cost.seconds

    def longest_first(seconds: dict[str, float]) -> dict[str, float]:
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    costliest = sorted(costs, key=lambda cost: -cost.seconds)[:_ROWS]
    return {
        "costliest": [asdict(cost) for cost in costliest],
        "seconds_by_module": longest_first(by_module),
        "seconds_by_kind": longest_first(by_kind),
    }


def explained_table(explained: dict[str, Any]) -> str:
    """Return the costliest instructions as a table, then the shares by kind and by module."""
    total = sum(explained["seconds_by_kind"].values())
    rows = [("ms", "share", "runs", "module", "", "kind", "of ideal", "bound by", "instruction")]
    for cost in explained["costliest"]:
        seconds, ideal = cost["seconds"], cost["share_of_ideal"]
        times = f"{seconds * 1e3:.2f}", f"{100 * seconds / total:.1f} %", str(cost["runs"])
        where = cost["module"], cost["phase"], cost["kind"]
        share = "" if ideal is None else f"{100 * ideal:.0f} %"
        rows.append((*times, *where, share, cost["bound"], cost["instruction"]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = (
            text.rjust(width) if text[:1].isdigit() else text.ljust(width)
            for text, width in zip(row, widths, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    for by in ("seconds_by_kind", "seconds_by_module"):
        shares = (f"{name} {100 * s / total:.1f} %" for name, s in explained[by].items())
        lines += ["", ", ".join(shares)]
    return "\n".join(lines)


def draw(costs: list[Cost], report: Mapping[str, Any], path: Path) -> None:
    """Draw a bar for each module, the costliest first, its parts coloured by kind."""
    by_module = report["explained"]["seconds_by_module"]
    total = sum(by_module.values())
    small = {module for module, seconds in by_module.items() if seconds < _SMALL * total}
    rows = [module for module in by_module if module not in small]
    others = f"{len(small)} others"
    rows += [others] if small else []
    times = {kind: dict.fromkeys(rows, 0.0) for kind in _KINDS}  # ms by kind and row
    for cost in costs:
        times[cost.kind][others if cost.module in small else cost.module] += 1e3 * cost.seconds
    figure, axis = pyplot().subplots(figsize=(9, 0.34 * len(rows) + 1.9), layout="constrained")
    left = [0.0] * len(rows)
    for number, (kind, by_row) in enumerate(times.items()):
        if any(by_row.values()):
            axis.barh(rows, list(by_row.values()), left=left, color=f"C{number}", label=kind)
            left = [start + width for start, width in zip(left, by_row.values(), strict=True)]
    for row, end in enumerate(left):
        axis.text(end, row, f" {end / total / 10:.1f} %", va="center", fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.1 * max(left))
    axis.set_xlabel("ms per step on each device, from the compiler's cycle counts")
    axis.set_title(
        f"{report['parameters']:,} parameters, batch {report['batch_size']}, {report['topology']}: "
        f"{total * 1e3:.4g} ms per step"
    )
    axis.legend(loc="lower right", fontsize=8)
    save_figure(figure, path)
