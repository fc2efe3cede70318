"""Names of the model's modules, written into a step's graph while it is traced.

PyTorch/XLA records with each operation the scopes that are open in its thread. Hooks open one
around each module's forward pass, and around each node of autograd that comes from it, and so also
where blocks are traced apart, as the body of a loop. The compiler copies the names to what it makes
of the operations (``metadata`` of the HLO).
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from xla_fsdp import torch_xla_private as private

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

    def __str__(self) -> str:
        return f"[{self.module}_{self.phase}]"


def scope_in(text: str) -> Scope | None:
    """Return the innermost scope that is written in an instruction's metadata."""
    found = _WRITTEN.findall(text)
    return Scope(*found[-1]) if found else None


class _Open(threading.local):
    """The open scopes of a thread: autograd runs in a thread of its own."""

    def __init__(self) -> None:
        self.stack: list[tuple[Scope, Any]] = []


class Names:
    """Names what is recorded, from the call of ``watch`` on."""

    def __init__(self) -> None:
        self._open = _Open()
        private.keep_scopes()

    def watch(self, model: nn.Module) -> None:
        """Name all that ``model`` computes, forward and backward."""
        for path, module in model.named_modules():
            # Without numbers of blocks, and without FSDP's wrappers.
            parts = [p for p in private.without_wrappers(path).split(".") if not p.isdigit()]
            if parts[1:2] == ["block"]:
                del parts[1]
            self._watch(module, ".".join(parts) or MODEL)

    @contextmanager
    def inside(self, module: str, phase: str) -> Iterator[None]:
        """Name what is recorded inside and by no module."""
        self._push(Scope(module, phase))
        try:
            yield
        finally:
            self._pop()

    def name_backward(self, result: torch.Tensor, module: str, arguments: Any = ()) -> None:
        """Name the backward pass of what computed ``result`` from ``arguments``, where it has no
        name yet."""
        seen: set[Any] = {each.grad_fn for each in _tensors(arguments)} | {None}
        waiting: list[Any] = [result.grad_fn]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            if _KEY in node.metadata or not node.next_functions:  # the last: leaves a gradient
                continue
            node.metadata[_KEY] = module
            node.register_prehook(lambda _: self._push(Scope(module, "backward")))
            node.register_hook(lambda *_: self._pop())

    def _watch(self, module: nn.Module, name: str) -> None:
        given = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            given.append((args, kwargs))
            in_backward = any(scope.phase == "backward" for scope, _ in self._open.stack)
            self._push(Scope(name, "recompute" if in_backward else "forward"))

        def after(_: nn.Module, __: Any, result: Any) -> None:
            self._pop()
            arguments = given.pop()
            for each in _tensors(result):
                self.name_backward(each, name, arguments)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def _push(self, scope: Scope) -> None:
        self._open.stack.append((scope, private.open_scope(str(scope))))

    def _pop(self) -> None:
        self._open.stack.pop()  # without a reference to it, torch_xla's scope closes


def _tensors(nested: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(nested) if isinstance(each, torch.Tensor)]
