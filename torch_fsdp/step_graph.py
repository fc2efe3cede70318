"""A training step as one FX graph: traced once for each shape of its inputs, run by the device.

``make_fx`` runs the step on fake tensors and records every operation on the way, those of the
backward pass and of the optimizer too. A tensor that the step uses and was not given, such as a
parameter, a moment or a constant of the objective, becomes an input of the graph by its identity;
what the step writes into it in place is written by the graph.
"""

import contextlib
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from torch_fsdp.devices import Device
from training.optimizers import hashed, key_of, random_bits
from training.processes.stopping import all_reduce_max

_aten: Any = torch.ops.aten
_eager_semantics = getattr(torch.compiler, "_non_strict_tracing_context", contextlib.nullcontext)
"""From PyTorch 2.14 on, selective recomputation in a trace would leave the choice to AOTAutograd,
which is not used here."""


@dataclass
class StepGraph:
    run: Callable[..., Sequence[torch.Tensor]]
    """What the device made of the graph."""
    state: list[torch.Tensor]
    """Its inputs after those of the step."""
    results: TreeSpec
    traced: GraphModule


class StepGraphs:
    """The graphs of a training step, by the shapes of its inputs."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._graphs: dict[Hashable, StepGraph] = {}
        self._compiled: dict[Hashable, Callable[..., Sequence[torch.Tensor]]] = {}
        """By all that a graph consists of but its state."""

    def forget(self) -> None:
        """Trace anew what runs next; a graph that was compiled before is not compiled again."""
        self._graphs.clear()

    def run(self, step: Callable[[Any], Any], inputs: Any, key: Hashable = None) -> Any:
        """Return ``step(inputs)``, trees of tensors. ``key``: what else the graph depends on."""
        flat, spec = tree_flatten(inputs)
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        shapes = tuple((x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in flat)
        graph = self._graphs.get((key, shapes, str(spec)))
        if graph is None:
            graph = self._trace(step, flat, spec)
            self._graphs[key, shapes, str(spec)] = graph
        with torch.no_grad():
            found = graph.run(*tensors, *graph.state)
        return tree_unflatten(list(found), graph.results)

    def _trace(self, step: Callable[[Any], Any], flat: list[Any], spec: TreeSpec) -> StepGraph:
        results: list[TreeSpec] = []

        def record(*tensors: torch.Tensor) -> list[torch.Tensor]:
            given = iter(tensors)
            leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in flat]
            with StatelessRandom() as StatelessRandom.of_trace:
                found, result = tree_flatten(step(tree_unflatten(leaves, spec)))
            results.append(result)
            return [x.detach().clone() for x in found]  # of views, each use would be a program

        inputs = [x for x in flat if isinstance(x, torch.Tensor)]
        try:
            with _eager_semantics():
                traced = make_fx(record, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        finally:
            StatelessRandom.of_trace = None
        state = lift_state(traced, self._device.where.type)
        check_same(traced)
        given = [*inputs, *state]
        program = _content(traced, given)
        if program not in self._compiled:
            compiled = self._device.compile_graph(traced, given, written_inputs(traced))
            self._compiled[program] = compiled
        return StepGraph(self._compiled[program], state, results[0], traced)


def _content(traced: GraphModule, given: Sequence[torch.Tensor]) -> Hashable:
    """Return what tells one graph from others: what it computes, the tensors that it holds, and of
    those that it is ``given`` the shapes and dtypes."""
    graphs = [
        (name, part) for name, part in traced.named_modules() if isinstance(part, GraphModule)
    ]
    return (
        *((name, part.code) for name, part in graphs),
        *((name, str(held.tolist())) for name, held in traced.named_buffers()),
        *((x.shape, x.dtype, x.stride()) for x in given),
    )


def check_same(traced: GraphModule) -> None:
    """Raise RuntimeError in all processes unless all have traced the same graph. Collectives of
    different programs would wait for each other for ever. A collective call."""
    digest = zlib.crc32(code_of(traced).encode())
    largest, smallest = all_reduce_max(digest)(), -all_reduce_max(-digest)()
    if largest != smallest:
        raise RuntimeError("the processes have traced different steps")


def code_of(traced: GraphModule) -> str:
    """Return the code of a graph and of its loops. Groups of processes, of which each process has
    other ones along an axis, and so other names, are numbered in the order of their use."""
    numbers: dict[str, int] = {}

    def number(call: re.Match[str]) -> str:
        return f"{call[1]}{numbers.setdefault(call[2], len(numbers))})"

    graphs = [part for part in traced.modules() if isinstance(part, GraphModule)]
    code = "".join(graph.code for graph in graphs)
    return re.sub(r"(_c10d_functional\.\w+\.default\([^\n]*?)'([^',]*)'\)", number, code)


def lift_state(traced: GraphModule, device: str) -> list[torch.Tensor]:
    """Replace the tensors on ``device`` that the graph holds by inputs after its own; return them
    in this order."""
    graph = traced.graph
    last = graph.find_nodes(op="placeholder")[-1]
    inputs: dict[int, Node] = {}
    state: list[torch.Tensor] = []
    for node in graph.find_nodes(op="get_attr"):
        values = getattr(traced, node.target)
        if isinstance(values, GraphModule) or values.device.type != device:
            continue
        if id(values) not in inputs:
            with graph.inserting_after(last):
                last = inputs[id(values)] = graph.placeholder(f"state_{len(state)}")
            last.meta["val"] = node.meta.get("val")
            state.append(values)
        node.replace_all_uses_with(inputs[id(values)])
        graph.erase_node(node)
    for name in {*traced._parameters, *traced._buffers}:  # they would be held twice
        if not any(node.target == name for node in graph.find_nodes(op="get_attr")):
            delattr(traced, name)
    traced.recompile()
    return state


def written_inputs(traced: GraphModule) -> list[int]:
    """Return the indices of the inputs that the graph writes in place."""
    inputs = {node: i for i, node in enumerate(traced.graph.find_nodes(op="placeholder"))}
    written: set[int] = set()

    def base(node: Any) -> Any:
        """Return the node whose memory a view or the result of a write in place has."""
        while isinstance(node, Node) and node.op == "call_function":
            schema = getattr(node.target, "_schema", None)
            if schema is None or not schema.arguments or not schema.arguments[0].alias_info:
                return node
            node = node.args[0]
        return node

    for node in traced.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or not schema.is_mutable:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for each in value if isinstance(value, (list, tuple)) else [value]:
                if base(each) in inputs:
                    written.add(inputs[base(each)])
    return sorted(written)


# -- Random numbers --------------------------------------------------------------------------------


Place = tuple[int | torch.Tensor, int]
"""A unit's number, in a loop an int32 scalar, and which of its passes it is."""


class StatelessRandom(TorchDispatchMode):
    """Replaces PyTorch's random operations inside by hashes of a seed, which is an input of the
    graph, of the place of the operation in the step, and of an entry's index.

    So the numbers differ from step to step, and are the same when a block is computed again.
    """

    supports_higher_order_operators = True
    of_trace: ClassVar["StatelessRandom | None"] = None
    """Those of the step that this process is tracing; None between traces."""

    def __init__(self) -> None:
        super().__init__()
        self._place: Place = (0, 0)
        self._draws: Counter[tuple[int, ...]] = Counter()
        """How many times it has drawn there, by shape."""
        self._passes: Counter[int] = Counter()

    def begin(self, seed: torch.Tensor) -> None:
        """Begin a micro-batch; ``seed``: an int32 scalar."""
        self._seed = seed
        self._place, self._draws, self._passes = (0, 0), Counter(), Counter()

    def next_pass(self, unit: int) -> tuple[int, int]:
        """Return the place of the next pass of a unit, for ``at``."""
        self._passes[unit] += 1
        return unit, self._passes[unit]

    @contextlib.contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Draw the numbers of a unit's pass inside: the same each time."""
        outside = self._place, self._draws
        self._place, self._draws = place, Counter()
        try:
            yield
        finally:
            self._place, self._draws = outside

    def uniform(self, size: Sequence[int]) -> torch.Tensor:
        """Return numbers in [0, 1), fp32. Draws of each shape are counted by themselves: dropout's
        are the same in a block without stochastic depth, as the first one is outside of a loop."""
        shape = tuple(size)
        self._draws[shape] += 1
        unit, pass_ = self._place
        key = hashed(hashed(self._seed + key_of(self._draws[shape], shape, pass_)) + unit)
        bits = random_bits(shape, key.device, key, key)
        return (bits & 0xFFFFFF).float() * 2.0**-24

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if draw := _DRAWS.get(func):
            return draw(self, *args, **(kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload):  # a loop, whose body was traced before
            return func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and _rate(func, args, kwargs or {}):
            raise NotImplementedError(
                f"a compiled step or evaluation cannot draw the random numbers of {func}: draw "
                "them by torch.rand, randn or randint, or train with --fsdp fsdp2"
            )
        return func(*args, **(kwargs or {}))


def _rate(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Return the dropout rate of a call; 1 if it has none."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return given.get("dropout_p", 0.0 if "dropout_p" in names else 1.0)


def _bernoulli_(
    random: StatelessRandom, x: torch.Tensor, p: float | torch.Tensor = 0.5, generator: None = None
) -> torch.Tensor:
    return x.copy_(random.uniform(x.shape) < p)


def _native_dropout(
    random: StatelessRandom, x: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = random.uniform(x.shape) < 1 - p
    return x * kept * (1 / (1 - p) if p < 1 else 0.0), kept


def _rand(random: StatelessRandom, size: Sequence[int], **how: Any) -> torch.Tensor:
    return random.uniform(size).to(how.get("dtype") or torch.get_default_dtype())


def _randn(random: StatelessRandom, size: Sequence[int], **how: Any) -> torch.Tensor:
    radius = (-2 * (1 - random.uniform(size)).log()).sqrt()  # Box and Muller's transform
    normal = radius * (2 * math.pi * random.uniform(size)).cos()
    return normal.to(how.get("dtype") or torch.get_default_dtype())


def _rand_like(random: StatelessRandom, x: torch.Tensor, **how: Any) -> torch.Tensor:
    return _rand(random, x.shape, dtype=how.get("dtype") or x.dtype)


def _randn_like(random: StatelessRandom, x: torch.Tensor, **how: Any) -> torch.Tensor:
    return _randn(random, x.shape, dtype=how.get("dtype") or x.dtype)


def _randint_low(
    random: StatelessRandom, low: int, high: int, size: Sequence[int], **how: Any
) -> torch.Tensor:
    drawn = (random.uniform(size) * (high - low)).long().clamp(max=high - low - 1) + low
    return drawn.to(how.get("dtype") or torch.int64)


def _randint(random: StatelessRandom, high: int, size: Sequence[int], **how: Any) -> torch.Tensor:
    return _randint_low(random, 0, high, size, **how)


_DRAWS: dict[Any, Callable[..., Any]] = {
    _aten.bernoulli_.float: _bernoulli_,
    _aten.bernoulli_.Tensor: _bernoulli_,
    _aten.native_dropout.default: _native_dropout,
    _aten.rand.default: _rand,
    _aten.rand_like.default: _rand_like,
    _aten.randn.default: _randn,
    _aten.randn_like.default: _randn_like,
    _aten.randint.default: _randint,
    _aten.randint.low: _randint_low,
}
