"""Names of modules, written into the graph of a step.

PyTorch/XLA records with each operation the scopes that are open in its thread. Hooks open one
around each module's forward pass, and around each node of autograd that comes from it, and so also
where blocks are traced apart, as the body of a loop. The compiler copies the names to what it makes
of the operations (``metadata`` of the HLO).
"""

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.utils._pytree import tree_leaves

from xla_fsdp import torch_xla_private as private

_WRITTEN = re.compile(r"\[([\w.]+)_(forward|recompute|backward|update)\]")
"""XLA cuts a name at "@" and writes "_" for ":"."""
_KEY = "module of the model"
STEP = "train"
"""The name of a step in a trace; XProf recognizes it by the numbers with it."""
MODEL, LOSS, OPTIMIZER = "model", "loss", "optimizer"
"""What is in no smaller module, and what is around the model."""


class Scope(NamedTuple):
    """Where in the step an operation comes from."""

    module: str
    """Its plain name, "blocks.mlp.fc1" in whatever block; or "loss", or "optimizer"."""
    phase: str
    """One of "forward", "recompute", "backward" and "update"."""


UNKNOWN = Scope("unknown", "")


def scope_in(text: str) -> Scope | None:
    """Return the innermost scope that is written in an instruction's metadata."""
    scopes = _WRITTEN.findall(text)
    return Scope(*scopes[-1]) if scopes else None


class Names:
    """Names what is recorded, from the call of ``watch`` on."""

    def __init__(self, open_scope: Callable[[str], Any] | None = None) -> None:
        """``open_scope``: takes a name; returns an object that keeps the scope open in this thread
        until it is freed. By default torch_xla's."""
        self._open = defaultdict[int, list[tuple[str, str, Any]]](list)
        """Modules, phases and scopes that are open, by thread: autograd runs in one of its own."""
        if open_scope is None:
            private.keep_scopes()
        self._open_scope = open_scope or private.open_scope

    def watch(self, model: nn.Module) -> None:
        """Name all that ``model`` computes, forward and backward."""
        for path, module in model.named_modules():
            # Without numbers of blocks, and without FSDP's wrappers.
            parts = [p for p in private.without_wrappers(path).split(".") if not p.isdigit()]
            if parts[1:2] == ["block"]:
                del parts[1]
            self._watch(module, ".".join(parts) or MODEL)

    def _watch(self, module: nn.Module, name: str) -> None:
        inputs = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            inputs.append((args, kwargs))
            phases = [phase for _, phase, _ in self._open[threading.get_ident()]]
            self._push(name, "recompute" if "backward" in phases else "forward")

        def after(_: nn.Module, __: Any, result: Any) -> None:
            self._pop()
            self.name_backward(result, name, inputs.pop())

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)  # a recomputation ends early

    def name_backward(self, results: Any, module: str, inputs: Any = ()) -> None:
        """Name the backward pass from ``results`` to ``inputs``, where it has no name yet."""
        seen = {getattr(tensor, "grad_fn", None) for tensor in tree_leaves(inputs)} | {None}
        waiting: list[Any] = [getattr(tensor, "grad_fn", None) for tensor in tree_leaves(results)]
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

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Close this thread's scopes inside: a graph cannot end within one."""
        open_here = self._open[threading.get_ident()]
        names = [(module, phase) for module, phase, _ in open_here]
        for _ in names:
            self._pop()
        yield
        for name in names:
            self._push(*name)

    def _push(self, module: str, phase: str) -> None:
        scope = self._open_scope(f"[{module}_{phase}]")
        self._open[threading.get_ident()].append((module, phase, scope))

    def _pop(self) -> None:
        # Without a reference to it, the scope closes.
        self._open[threading.get_ident()].pop()
