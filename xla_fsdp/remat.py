"""What the loop forward through the blocks keeps of each for the loop back: ``--grad_ckpt``.

The loop back computes each block's forward pass once more, to have it recorded for autograd. What
was kept then takes the place of what was computed, and XLA drops what only led there.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.layers import RmsNorm
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from xla_fsdp.torch_xla_private import data_behind, moved_to, recorded_number

Tensors = list[torch.Tensor]


class KeptInput:
    """Keeps a block's input, and nothing else: all is computed anew (``full``)."""

    def adapt(self, block: nn.Module) -> None:
        """Change how a block computes, if what is kept asks for it."""

    def result(self, function: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
        """Return the result of ``function``, whose last argument is what is known of it, if any."""
        return function(*given, None)

    def follow(self, result: torch.Tensor, x: torch.Tensor) -> None:
        """Take note that ``result`` costs next to nothing to compute from ``x``."""

    def sent(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input as it goes to the memory that keeps it."""
        return x

    def fetched(self, x: torch.Tensor) -> torch.Tensor:
        """Return it as it comes back."""
        return x

    @contextmanager
    def keep(self, x: torch.Tensor) -> Iterator[Tensors]:
        """Let a block with the input ``x`` be computed; yields what is kept, complete at the end.

        The first of it is the input. All that needs a gradient, ``x`` among it, asks for one.
        """
        with torch.no_grad():
            yield [x * 1]

    @contextmanager
    def know(self, kept: Tensors) -> Iterator[None]:
        """Let the same block be computed again, with what was kept of it behind its input."""
        assert not kept
        with torch.enable_grad():
            yield


class KeptOnHost(KeptInput):
    """Keeps a block's input in the memory of the host that drives the device (``offload``)."""

    def sent(self, x: torch.Tensor) -> torch.Tensor:
        return moved_to("pinned_host", x)

    def fetched(self, x: torch.Tensor) -> torch.Tensor:
        return moved_to("device", x)


class KeptResults(KeptInput):
    """Keeps results that cost most to compute, too (``selective``).

    They go by the order in which they are computed, which is the same in both loops.
    """

    def __init__(self) -> None:
        self._results: Tensors | None = None
        self._known: Tensors = []

    @contextmanager
    def keep(self, x: torch.Tensor) -> Iterator[Tensors]:
        self._results = [x * 1]
        try:
            with torch.no_grad():
                yield self._results
        finally:
            self._results = None

    @contextmanager
    def know(self, kept: Tensors) -> Iterator[None]:
        self._known = list(kept)
        with torch.enable_grad():
            yield
        assert not self._known, "more was kept than is computed"

    def result(self, function: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor:
        y = function(*given, self._known.pop(0) if self._known else None)
        if self._results is not None:
            self._results.append(y)
        return y


class KeptSaved(KeptInput):
    """Keeps what autograd saves, so that no product is computed again (``none``).

    Norms and activations are computed again, from their inputs; weights are gathered again, and
    random masks are drawn again: what does not come from the block's input is what both loops are
    given.
    """

    def __init__(self) -> None:
        self._places: list[int | None] = []
        """Of each tensor that autograd saves, or that a result is computed again from, in order,
        the place in what is kept; None if it is not."""
        self._pack: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
        self._again: set[int] = set()
        """The numbers of results that are computed again."""

    def adapt(self, block: nn.Module) -> None:
        for part in list(block.modules()):
            act = getattr(part, "act", None)
            if isinstance(part, _NORMS):
                part.forward = types.MethodType(self._from_input, part)  # type: ignore[method-assign]
            elif isinstance(act, nn.Module) and not [*act.parameters()]:
                act.forward = types.MethodType(self._from_input, act)

    @contextmanager
    def keep(self, x: torch.Tensor) -> Iterator[Tensors]:
        (of_input,) = data_behind(x)
        kept = [x * 1]
        numbers: dict[int, int] = {}
        self._places, self._again = [], set()

        def pack(saved: torch.Tensor) -> torch.Tensor:
            place, number = None, recorded_number(saved)
            if of_input in data_behind(saved) and number not in self._again:
                place = numbers.setdefault(number, len(kept) - 1)
                if place == len(kept) - 1:
                    kept.append(saved.detach().reshape(_unfolded(saved.shape, x.shape)))
            self._places.append(place)
            return saved.detach()  # an output saved with what computes it would never be let go of

        with torch.enable_grad(), self._saved_by(pack):
            yield kept

    @contextmanager
    def know(self, kept: Tensors) -> Iterator[None]:
        places = iter(self._places)

        def pack(saved: torch.Tensor) -> torch.Tensor:
            place = next(places)
            return saved.detach() if place is None else kept[place].reshape(saved.shape)

        with torch.enable_grad(), self._saved_by(pack):
            yield
        assert next(places, _NO_MORE) is _NO_MORE, "more was kept than is computed"

    def follow(self, result: torch.Tensor, x: torch.Tensor) -> None:
        if recorded_number(x) in self._again:
            self._again.add(recorded_number(result))

    @contextmanager
    def _saved_by(self, pack: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        self._pack = pack
        with saved_tensors_hooks(pack, _as_it_is):
            yield
        self._pack = _as_it_is

    def _from_input(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute a module so that it can be computed again from its input, which is kept."""
        y = _FromInput.apply(module, x, self._pack(x), *module.parameters())
        self._again.add(recorded_number(y))
        return y


_NORMS = (nn.LayerNorm, RmsNorm)


class _FromInput(torch.autograd.Function):
    """A module's result of what is known of its input, ``x``, and its gradient by that alone."""

    @staticmethod
    def forward(ctx, module: nn.Module, x, known, *parameters):
        ctx.save_for_backward(*parameters)
        ctx.module, ctx.known = module, known
        ctx.autocast = torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")
        return type(module).forward(module, known)

    @staticmethod
    def backward(ctx, grad):
        x, *parameters = (
            each.detach().requires_grad_() for each in (ctx.known, *ctx.saved_tensors)
        )
        enabled, dtype = ctx.autocast
        module = copy.copy(ctx.module)
        keys = [key for key, _ in module.named_parameters()]
        module._parameters = module._parameters | dict(zip(keys, parameters, strict=True))
        with torch.enable_grad(), torch.autocast("xla", dtype=dtype, enabled=enabled):
            y = type(module).forward(module, x)
        grad_x, *grads = torch.autograd.grad(y, [x, *parameters], grad)
        return None, grad_x, None, *grads


def kept_by(grad_ckpt: str) -> KeptInput:
    """Return what keeps of a block what this value of ``--grad_ckpt`` says."""
    forms = {"full": KeptInput, "offload": KeptOnHost, "selective": KeptResults, "none": KeptSaved}
    return forms[grad_ckpt]()


_NO_MORE = object()


def _unfolded(shape: torch.Size, of_input: torch.Size) -> torch.Size:
    """Return the shape as (images, tokens, ...) where both are folded into one dimension.

    Norms fold them. The partitioner could not shard the tokens of what is kept alone.
    """
    images_and_tokens = of_input[:2]
    first = next((i for i, size in enumerate(shape) if size != 1), None)
    if first is None or shape[first] != images_and_tokens.numel():
        return shape
    return torch.Size((*images_and_tokens, *shape[first + 1 :]))


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved
