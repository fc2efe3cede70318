"""``--explain``: what a step's time is spent on, by instruction, module of the model, kind of work.

Names of modules are written into the graph while it is traced. Of the compiled module, the
costliest instructions are given as a table or JSON, and the time by module as a picture.
"""

import heapq
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from tools.compile_only.expected import Links, walk
from tools.compile_only.hlo import (
    Instruction,
    array_bytes,
    instruction_bytes,
    parse_module,
    products_of,
)
from tools.compile_only.report import Report
from training.logs.figures import pyplot, save_figure
from xla_fsdp import torch_xla_private as private

# -- names of modules, written into the graph of a step ------------------------------------------
#
# PyTorch/XLA records with each operation the scopes that are open in its thread. Hooks open one
# around each module's forward pass, and around each node of autograd that comes from it, and so
# also where blocks are traced apart, as the body of a loop. The compiler copies the names to what
# it makes of the operations (``metadata`` of the HLO).

_WRITTEN = re.compile(r"\[([\w.]+)_(forward|recompute|backward|update)\]")
"""XLA cuts a name at "@" and writes "_" for ":"."""
_KEY = "module of the model"
MODEL, LOSS, OPTIMIZER = "model", "loss", "optimizer"
"""What is in no smaller module, and what is around the model."""


@dataclass(frozen=True)
class Scope:
    """Where in the step an operation comes from."""

    module: str
    """Its plain name, "blocks.mlp.fc1" in whatever block; or "loss", or "optimizer"."""
    phase: str
    """One of "forward", "recompute", "backward" and "update"."""


UNKNOWN = Scope("unknown", "")


def scope_in(text: str) -> Scope | None:
    """Return the innermost scope that is written in an instruction's metadata."""
    found = _WRITTEN.findall(text)
    return Scope(*found[-1]) if found else None


class Names:
    """Names what is recorded, from the call of ``watch`` on."""

    def __init__(self) -> None:
        self._open = defaultdict[int, list[tuple[str, Any]]](list)
        """Phases and scopes that are open, by thread: autograd runs in one of its own."""
        private.keep_scopes()

    def watch(self, model: nn.Module) -> None:
        """Name all that ``model`` computes, forward and backward."""
        for path, module in model.named_modules():
            # Without numbers of blocks, and without FSDP's wrappers.
            parts = [p for p in private.without_wrappers(path).split(".") if not p.isdigit()]
            if parts[1:2] == ["block"]:
                del parts[1]
            self._watch(module, ".".join(parts) or MODEL)

    def _watch(self, module: nn.Module, name: str) -> None:
        given = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            given.append((args, kwargs))
            phases = [phase for phase, _ in self._open[threading.get_ident()]]
            self._push(name, "recompute" if "backward" in phases else "forward")

        def after(_: nn.Module, __: Any, result: Any) -> None:
            self._pop()
            self.name_backward(result, name, given.pop())

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def name_backward(self, results: Any, module: str, arguments: Any = ()) -> None:
        """Name the backward pass of what computed these from ``arguments``, where it has no name
        yet."""
        seen = {getattr(each, "grad_fn", None) for each in tree_leaves(arguments)} | {None}
        waiting: list[Any] = [getattr(each, "grad_fn", None) for each in tree_leaves(results)]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            if _KEY in node.metadata or not node.next_functions:  # the last: leaves a gradient
                continue
            node.metadata[_KEY] = module
            node.register_prehook(lambda _: self._push(module, "backward"))
            node.register_hook(lambda *_: self._pop())

    @contextmanager
    def inside(self, module: str, phase: str) -> Iterator[None]:
        """Name what is recorded inside and by no module."""
        self._push(module, phase)
        try:
            yield
        finally:
            self._pop()

    def _push(self, module: str, phase: str) -> None:
        scope = private.open_scope(f"[{module}_{phase}]")
        self._open[threading.get_ident()].append((phase, scope))

    def _pop(self) -> None:
        # Without a reference to it, torch_xla's scope closes.
        self._open[threading.get_ident()].pop()


# -- what each instruction costs -----------------------------------------------------------------

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
BY_KIND, BY_MODULE = "kind", "scope.module"
"""What costs are added up by, for ``shares``."""
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
"""Of the table."""
_SMALL = 0.005
"""Share of the step: modules with less are drawn together."""
_COLOURS = {kind: f"C{number}" for number, kind in enumerate(KINDS)}


@dataclass(frozen=True)
class Cost:
    """What an instruction of the schedule costs in a step, or the wait that it ends with."""

    name: str
    scope: Scope
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
    chip = links.topology.chip
    costs: list[Cost] = []
    for part in walk(computations[entry], links):
        each, runs = part.instruction, part.runs * times
        # Without a scope of its own: that of an operand, or of what uses the result.
        scopes = map(_own_scope, (each, *each.operands, *each.users))
        scope = next(filter(None, scopes), UNKNOWN)
        for field, kind in _WAITS.items():
            seconds = runs * getattr(part.each, field)
            if seconds:
                costs.append(Cost(each.name, scope, kind, "waiting", runs, seconds, None))
        own = part.each.cycles_s + part.each.kernels_s
        if not own:
            continue
        flops = sum(flops for flops, _ in products_of(each, chip.int8_speedup))
        of_products = flops / chip.peak_flops / own
        of_bytes = instruction_bytes(each) / chip.hbm_bandwidth / own
        opcodes = {inner.opcode for inner in each.inside or [each]}
        if part.each.kernels_s:
            kind = "kernel"
        elif flops:
            kind = "product"
        elif scope.module == OPTIMIZER:
            kind = "optimizer"
        elif opcodes <= _MOVING and opcodes & {"copy", "transpose"}:
            kind = "layout copy"
        else:
            is_attention = scope.module.rpartition(".")[2] == "attn"
            kind = "softmax" if is_attention else "elementwise, norm"
        if kind == "layout copy":
            bound = "layout"
        elif max(of_products, of_bytes) < _NEARLY:
            bound = "in the kernel" if kind == "kernel" else "vector units"
        else:
            bound = "products" if of_products > of_bytes else "HBM"
        ideal = of_products if flops else None
        costs.append(Cost(each.name, scope, kind, bound, runs, runs * own, ideal))
    return costs


def _own_scope(each: Instruction) -> Scope | None:
    """Return the scope of its costliest product, or else of most of what it computes."""
    if each.opcode != "fusion":
        return scope_in(each.text)
    for _, product in sorted(products_of(each), key=lambda pair: -pair[0]):
        if found := scope_in(product.text):
            return found
    sizes = defaultdict[Scope, float](float)
    for inner in each.inside:
        found = scope_in(inner.text)
        if found and inner.opcode not in ("parameter", "constant", "broadcast"):
            sizes[found] += array_bytes(inner.shape)
    # A module that another one is inside of is less exact than that one.
    innermost = {
        scope: size
        for scope, size in sizes.items()
        if not any(other.module.startswith(scope.module + ".") for other in sizes)
    }
    return max(innermost, key=innermost.__getitem__) if innermost else scope_in(each.text)


def shares(costs: Iterable[Cost], by: str) -> dict[str, float]:
    """Return the seconds of each group of costs, the longest first."""
    found = defaultdict[str, float](float)
    for cost in costs:
        found[attrgetter(by)(cost)] += cost.seconds
    return dict(sorted(found.items(), key=lambda each: -each[1]))


# -- table, JSON, picture ------------------------------------------------------------------------


def _costliest(costs: list[Cost]) -> list[Cost]:
    return heapq.nlargest(_ROWS, costs, key=attrgetter("seconds"))


def explained_json(costs: list[Cost]) -> dict[str, Any]:
    """Return the part of ``--json``: the costliest instructions, seconds by module and kind."""
    return {
        "costliest": [
            {
                "instruction": cost.name,
                "module": cost.scope.module,
                "phase": cost.scope.phase,
                "kind": cost.kind,
                "bound": cost.bound,
                "runs": cost.runs,
                "seconds": cost.seconds,
                "share_of_ideal": cost.ideal,
            }
            for cost in _costliest(costs)
        ],
        "seconds_by_module": shares(costs, BY_MODULE),
        "seconds_by_kind": shares(costs, BY_KIND),
    }


def explained_table(costs: list[Cost]) -> str:
    """Return the costliest instructions as a table, then the shares by kind and by module."""
    total = sum(cost.seconds for cost in costs)
    rows = [("ms", "share", "runs", "module", "", "kind", "of ideal", "bound by", "instruction")]
    for cost in _costliest(costs):
        ideal = "" if cost.ideal is None else f"{100 * cost.ideal:.0f} %"
        times = f"{cost.seconds * 1e3:.2f}", f"{100 * cost.seconds / total:.1f} %", str(cost.runs)
        where = cost.scope.module, cost.scope.phase
        rows.append((*times, *where, cost.kind, ideal, cost.bound, cost.name))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for row in rows:
        cells = (
            text.rjust(width) if text[:1].isdigit() else text.ljust(width)
            for text, width in zip(row, widths, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    for by in (BY_KIND, BY_MODULE):
        parts = (f"{name} {100 * s / total:.1f} %" for name, s in shares(costs, by).items())
        lines += ["", ", ".join(parts)]
    return "\n".join(lines)


def draw(costs: list[Cost], report: Report, path: Path) -> None:
    """Draw a bar for each module, the costliest first, its parts coloured by kind."""
    total = sum(cost.seconds for cost in costs)
    of_module = shares(costs, BY_MODULE)
    shown = [name for name, seconds in of_module.items() if seconds >= _SMALL * total]
    groups = {name: [cost for cost in costs if cost.scope.module == name] for name in shown}
    rest = [cost for cost in costs if cost.scope.module not in groups]
    if rest:
        groups[f"{len(of_module) - len(shown)} others"] = rest
    figure, axis = pyplot().subplots(figsize=(9, 0.34 * len(groups) + 1.9), layout="constrained")
    drawn = set()
    for row, group in enumerate(groups.values()):
        left = 0.0
        of_kind = shares(group, BY_KIND)
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
        f"{report['parameters']:,} parameters, batch {report['batch_size']}, {report['topology']}: "
        f"{total * 1e3:.4g} ms a step"
    )
    axis.legend(loc="lower right", fontsize=8)
    save_figure(figure, path)
