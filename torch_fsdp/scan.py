"""A loop over blocks as one operation of a step's graph: its size, and with it the time to trace
and to compile it, does not grow with their number."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from torch_fsdp.devices import Device
from torch_fsdp.step_graph import lift_state

Tensors = list[torch.Tensor]
Body = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
"""A function (state, one slice of each input) -> (next state, one slice of each output)."""


class Scan:
    """A loop over the first dimension of tensors, in a step that is being traced, for tensors of
    these shapes; ``reverse`` runs it from last to first. Tensors that the body uses besides its
    arguments are the same in each round."""

    def __init__(
        self,
        body: Body,
        state: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        device: Device,
        *,
        reverse: bool = False,
    ) -> None:
        self._device, self._reverse, self._states = device, reverse, len(state)

        def flat(*tensors: torch.Tensor) -> Tensors:
            following, outputs = body(list(tensors[: len(state)]), list(tensors[len(state) :]))
            return [x.clone(memory_format=torch.contiguous_format) for x in following + outputs]

        with disable_proxy_modes_tracing():
            arguments = [*state, *(stacked[0] for stacked in inputs)]
            like = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in arguments]
        self._body = make_fx(flat)(*like)
        self._captured = lift_state(self._body, device.where.type)

    def __call__(
        self, state: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> tuple[Tensors, Tensors]:
        """Return the last state and the stacked outputs."""
        found = self._device.scan(
            self._body,
            [x.contiguous() for x in state],
            list(inputs),
            [x.detach() for x in self._captured],  # PyTorch's scan takes only what a trace knows
            reverse=self._reverse,
        )
        return found[: self._states], found[self._states :]


class ScanWithRecomputation(torch.autograd.Function):
    """One function after the other of a tensor, by a loop forward and one backward, which computes
    each again from its input."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[[torch.Tensor, Tensors], torch.Tensor],
        dtypes: Sequence[torch.dtype],
        device: Device,
        offloads: bool,
        x: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Return x after ``function(x, row)`` for each row of ``tensors``, in which the rows follow
        each other. The loop holds a row's tensors in ``dtypes``; ``offloads``: and the functions'
        inputs in the host's memory."""
        rows = [tensors[i : i + len(dtypes)] for i in range(0, len(tensors), len(dtypes))]
        inputs = [
            torch.stack([values.detach().to(dtype) for values in column])  # as ``Gather`` does
            for column, dtype in zip(zip(*rows, strict=True), dtypes, strict=True)
        ]

        def row_of(slices: Tensors) -> Tensors:
            return [x.to(given.dtype) for x, given in zip(slices, rows[0], strict=True)]

        def forward_body(state: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
            (x,) = state
            saved = [device.moved_to("pinned_host", x) if offloads else x]
            return [function(x, row_of(slices))], saved if any(ctx.needs_input_grad) else []

        (y,), saved = Scan(forward_body, [x], inputs, device)([x], inputs)
        if not saved:
            return y

        def backward_body(state: Tensors, slices: Tensors) -> tuple[Tensors, Tensors]:
            (grad,), (x, *slices) = state, slices
            row = [
                values.detach().requires_grad_(given.requires_grad)
                for values, given in zip(row_of(slices), rows[0], strict=True)
            ]
            with torch.enable_grad():
                x = device.moved_to("device", x) if offloads else x
                x = x.detach().requires_grad_()
                y = function(x, row)
            trained = [i for i, values in enumerate(row) if values.requires_grad]
            wanted = [x, *(row[i] for i in trained)]
            grad, *found = torch.autograd.grad(y, wanted, grad, allow_unused=True)
            ctx.used = [i for i, g in zip(trained, found, strict=True) if g is not None]
            return [grad], [g for g in found if g is not None]

        ctx.inputs, ctx.rows, ctx.columns = [*saved, *inputs], len(rows), len(dtypes)
        ctx.scan = Scan(backward_body, [y], ctx.inputs, device, reverse=True)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (grad,), found = ctx.scan([grad], ctx.inputs)
        columns: list[Sequence[Any]] = [[None] * ctx.rows] * ctx.columns
        for i, stacked in zip(ctx.used, found, strict=True):
            columns[i] = stacked.unbind()
        return None, None, None, None, grad, *itertools.chain(*zip(*columns, strict=True))
