"""A loop over the first dimension of tensors, as one operation of a step's graph: its size, and
with it the time to trace and to compile it, does not grow with the number of rounds."""

from collections.abc import Callable, Sequence

import torch
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx

from torch_fsdp.devices import Device
from torch_fsdp.step_graph import lift_state

Tensors = list[torch.Tensor]
Body = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
"""A function (state, one slice of each input) -> (next state, one slice of each output)."""


class Scan:
    """The loop, in a step that is being traced, for tensors of these shapes; ``reverse`` runs it
    from last to first. Tensors that the body uses besides its arguments are the same in each
    round."""

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
        given = [x.contiguous() for x in state]
        found = self._device.scan(
            self._body, given, list(inputs), self._captured, reverse=self._reverse
        )
        return found[: self._states], found[self._states :]
