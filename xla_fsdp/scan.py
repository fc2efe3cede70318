"""A loop over the first dimension of tensors that is one ``While`` of the XLA graph.

torch_xla's own ``scan`` traces and lowers its function anew at every call. Here that is done
once: a later call costs the host the same for any number of rounds and any size of function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm

from xla_fsdp.torch_xla_private import (
    call_computation,
    dynamic_slice,
    dynamic_update_slice,
    lowering_context,
    seed_parameter,
)

Tensors = list[torch.Tensor]
Body = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
"""(state, one slice of each input) -> (next state, one slice of each output)."""


class Scan:
    """The loop, traced for tensors of these shapes; ``reverse`` runs it from last to first.

    Random numbers in the body are drawn anew in each round, from the seeds given to the call:
    two loops that draw in the same order draw the same from the same seeds.
    """

    def __init__(
        self, body: Body, state: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor],
        *, reverse: bool = False,
    ) -> None:  # fmt: skip
        self._rounds = len(inputs[0])
        self._reverse = reverse
        self._state_count, self._input_count = len(state), len(inputs)
        self._body, self._order, self._outputs, self._constants, self._seed = _lower(
            body, state, inputs
        )
        self._computation: object | None = None

    @property
    def draws(self) -> bool:
        """Whether the body draws random numbers, so that the call needs seeds."""
        return self._seed is not None

    def __call__(
        self, state: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor],
        seeds: torch.Tensor | None = None,
    ) -> tuple[Tensors, Tensors]:  # fmt: skip
        """The last state and the stacked outputs. ``seeds``: int64 (rounds,), if it ``draws``."""
        device = torch_xla.device()
        outputs = [
            torch.zeros((self._rounds, *shape), dtype=dtype, device=device)
            for shape, dtype in self._outputs
        ]
        parameters = [torch.zeros((), dtype=torch.int32, device=device), *state, *inputs, *outputs,
                      *self._constants]  # fmt: skip
        if seeds is not None and self.draws:
            parameters.append(seeds)
        if self._computation is None:
            self._computation = self._build(parameters)
        results = call_computation("xla::scan", parameters, self._computation)
        first = 1 + self._state_count + self._input_count
        return results[1 : 1 + self._state_count], results[first : first + len(outputs)]

    def _build(self, parameters: Tensors) -> object:
        builder = xb.create_builder("scan")
        ops = [xb.mkparam(builder, i, xb.tensor_shape(t)) for i, t in enumerate(parameters)]
        loop = xb.Op.mkwhile(ops, self._goes_on, self._round)
        return loop.build("scan")

    def _goes_on(self, number: xb.Op, *_: xb.Op) -> xb.Op:
        return number < xb.Op.scalar(number.builder(), self._rounds, dtype=xb.Type.S32)

    def _round(self, number: xb.Op, *rest: xb.Op) -> tuple[xb.Op, ...]:
        builder = number.builder()

        def integer(value: int) -> xb.Op:
            return xb.Op.scalar(builder, value, dtype=xb.Type.S32)

        index = integer(self._rounds - 1) - number if self._reverse else number
        states, inputs_end = self._state_count, self._state_count + self._input_count
        outputs_end = inputs_end + len(self._outputs)
        constants_end = outputs_end + len(self._constants)
        slices = [dynamic_slice(each, index) for each in rest[states:inputs_end]]
        seeds = [dynamic_slice(each, index) for each in rest[constants_end:]]
        given = [*rest[:states], *slices, *rest[outputs_end:constants_end], *seeds]
        result = xb.Op.call(self._body, [given[i] for i in self._order])
        state = [result.get_tuple_element(i) for i in range(states)]
        outputs = [
            dynamic_update_slice(stacked, result.get_tuple_element(states + i), index)
            for i, stacked in enumerate(rest[inputs_end:outputs_end])
        ]
        kept = (rest[states:inputs_end], rest[outputs_end:])
        return (number + integer(1), *state, *kept[0], *outputs, *kept[1])


def _lower(
    body: Body, state: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[object, list[int], list[tuple[tuple[int, ...], torch.dtype]], Tensors, int | None]:
    """The body as a computation of its own, and what it takes and gives.

    Returns the computation; for each of its parameters the index among (state, slices of the
    inputs, constants, seed); shapes and dtypes of the outputs; the tensors that it uses without
    being given them; and the index of the seed, None if it draws no random numbers.
    """

    def placeholder(like: torch.Tensor) -> torch.Tensor:
        return xb.create_placeholder_tensor(like.shape, like.dtype)

    given = [placeholder(each) for each in state] + [placeholder(each[0]) for each in inputs]
    # Not the placeholders themselves: a sharding mark on one would replace it.
    used = [each * 1 if each.is_floating_point() else each + 0 for each in given]
    rng_state = xm.get_rng_state()
    xm.set_rng_state(0)  # seeds that draws begin with are the round's own, nothing before them
    next_state, outputs = body(used[: len(state)], used[len(state) :])
    context = lowering_context("Body")
    context.set_name_string("body")
    context.build([*next_state, *outputs])
    computation = xb.computation_from_module_proto("body", context.hlo())

    parameter_of = {context.tensor_parameter_id(each): i for i, each in enumerate(given)}
    parameter_of.pop(-1, None)  # not used by the body
    others = context.device_parameter_id_tensor_mapping()
    others = {id_: tensor for id_, tensor in others.items() if id_ not in parameter_of}
    seed = seed_parameter([*next_state, *outputs], context)
    if seed is not None:
        del others[seed]
    constants: Tensors = []
    for id_, tensor in others.items():
        parameter_of[id_] = len(given) + len(constants)
        constants.append(tensor.to("xla"))
    if seed is not None:
        parameter_of[seed] = len(given) + len(constants)
    xm.set_rng_state(rng_state)
    order = [parameter_of[id_] for id_ in range(len(parameter_of))]
    shapes = [(tuple(each.shape), each.dtype) for each in outputs]
    return computation, order, shapes, constants, seed
