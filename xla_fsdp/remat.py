"""What a block saves for the backward pass, and what it rematerializes: ``--grad_ckpt``.

The backward loop records each block's forward pass again. Saved values replace computed ones, and
XLA eliminates the operations that are no longer needed.
"""

import copy
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.layers import RmsNorm
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from xla_fsdp.torch_xla_private import data_behind, recorded_number

Tensors = list[torch.Tensor]


class SaveInput:
    """Saves a block's input and rematerializes all else (``full``).

    ``on_host``: in the memory of the host that drives the device (``offload``). ``with_results``:
    results that cost much to compute are saved, too, known by their order (``selective``).
    """

    def __init__(self, *, on_host: bool = False, with_results: bool = False) -> None:
        self.on_host, self._with_results = on_host, with_results
        self._saving: Tensors | None = None
        self._saved: Tensors = []

    def adapt(self, block: nn.Module) -> None:
        """Change how a block computes, if what is saved needs it."""

    def result(self, function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        """Return the result of ``function``, which may be saved: its last argument, or None if
        it has to compute it."""
        y = function(*arguments, self._saved.pop(0) if self._saved else None)
        if self._saving is not None:
            self._saving.append(y)
        return y

    def follow(self, result: torch.Tensor, x: torch.Tensor) -> None:
        """Rematerialize ``result`` if ``x`` is: it costs next to nothing to compute from it."""

    @contextmanager
    def save(self, x: torch.Tensor) -> Iterator[Tensors]:
        """Let a block with the input ``x`` be computed; yields what is saved, the input first,
        complete at the end. All that needs a gradient, ``x`` among it, requires one."""
        saved = [x * 1]
        self._saving = saved if self._with_results else None
        try:
            with torch.no_grad():
                yield saved
        finally:
            self._saving = None

    @contextmanager
    def rematerialize(self, saved: Tensors) -> Iterator[None]:
        """Let the same block be computed again, with what was saved of it behind its input."""
        self._saved = list(saved)
        with torch.enable_grad():
            yield
        assert not self._saved, "more was saved than is computed"


class SaveAll(SaveInput):
    """Saves what autograd saves (``none``), but norms and activations, rematerialized from their
    inputs; weights are gathered again, and random masks are drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self._places: list[int | None] = []
        """Of each tensor that autograd saves, or that a result is rematerialized from, in order:
        its place in what is saved; None if it does not come from the block's input."""
        self._pack: Callable[[torch.Tensor], torch.Tensor] = _unchanged
        self._rematerialized: set[int] = set()
        """The numbers of results that are rematerialized."""

    def adapt(self, block: nn.Module) -> None:
        for part in list(block.modules()):
            act = getattr(part, "act", None)
            if isinstance(part, nn.LayerNorm | RmsNorm):
                part.forward = types.MethodType(self._from_input, part)  # type: ignore[method-assign]
            elif isinstance(act, nn.Module) and not [*act.parameters()]:
                act.forward = types.MethodType(self._from_input, act)

    @contextmanager
    def save(self, x: torch.Tensor) -> Iterator[Tensors]:
        (input_data,) = data_behind(x)
        saved_tensors = [x * 1]
        places: dict[int, int] = {}  # by the tensor's number: one that is saved twice has one place
        self._places, self._rematerialized = [], set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            place, number = None, recorded_number(tensor)
            if input_data in data_behind(tensor) and number not in self._rematerialized:
                place = places.setdefault(number, len(saved_tensors) - 1)
                if place == len(saved_tensors) - 1:
                    # As (images, tokens, ...): norms fold the two, and the partitioner could not
                    # shard the tokens alone.
                    shape, folded = tensor.shape, x.shape[:2].numel()
                    first = next((i for i, size in enumerate(shape) if size != 1), None)
                    if first is not None and shape[first] == folded:
                        shape = torch.Size((*x.shape[:2], *shape[first + 1 :]))
                    saved_tensors.append(tensor.detach().reshape(shape))
            self._places.append(place)
            return tensor.detach()  # an output saved with what computes it would never be freed

        with self._packed_by(pack):
            yield saved_tensors

    @contextmanager
    def rematerialize(self, saved: Tensors) -> Iterator[None]:
        places = iter(self._places)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            place = next(places)
            return tensor.detach() if place is None else saved[place].reshape(tensor.shape)

        with self._packed_by(pack):
            yield
        assert not [*places], "more was saved than is computed"

    def follow(self, result: torch.Tensor, x: torch.Tensor) -> None:
        if recorded_number(x) in self._rematerialized:
            self._rematerialized.add(recorded_number(result))

    @contextmanager
    def _packed_by(self, pack: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        self._pack = pack
        with torch.enable_grad(), saved_tensors_hooks(pack, _unchanged):
            yield
        self._pack = _unchanged

    def _from_input(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Compute a module so that it can be rematerialized from its input, which is saved."""
        y = _FromInput.apply(module, x, self._pack(x), *module.parameters())
        self._rematerialized.add(recorded_number(y))
        return y


class _FromInput(torch.autograd.Function):
    """A module's result; its gradient by ``saved`` alone, which was saved of its input ``x``."""

    @staticmethod
    def forward(ctx, module: nn.Module, x, saved, *parameters):
        ctx.save_for_backward(*parameters)
        ctx.module, ctx.saved = module, saved
        ctx.autocast = torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")
        return type(module).forward(module, saved)

    @staticmethod
    def backward(ctx, grad):
        x, *parameters = (
            tensor.detach().requires_grad_() for tensor in (ctx.saved, *ctx.saved_tensors)
        )
        enabled, dtype = ctx.autocast
        module = copy.copy(ctx.module)
        keys = [key for key, _ in module.named_parameters()]
        module._parameters = module._parameters | dict(zip(keys, parameters, strict=True))
        with torch.enable_grad(), torch.autocast("xla", dtype=dtype, enabled=enabled):
            y = type(module).forward(module, x)
        grad_x, *grads = torch.autograd.grad(y, [x, *parameters], grad)
        return None, grad_x, None, *grads


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


SAVED_BY: dict[str, Callable[[], SaveInput]] = {
    "full": SaveInput,
    "offload": functools.partial(SaveInput, on_host=True),
    "selective": functools.partial(SaveInput, with_results=True),
    "none": SaveAll,
}
"""The values of ``--grad_ckpt``."""
