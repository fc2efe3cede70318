"""A loop over the first dimension of tensors that is one ``While`` of the XLA graph.

torch_xla's own ``scan`` traces and lowers its function at every call. Here that is done once:
a later call costs the host the same for any number of rounds and any size of function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch_xla.experimental.scan import dynamic_slice, dynamic_update_slice

from xla_fsdp.torch_xla_private import call_computation, lowering_context, seed_parameter

Tensors = list[torch.Tensor]
Body = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
"""A function (state, one slice of each input) -> (next state, one slice of each output)."""


class Scan:
    """The loop, traced for tensors of these shapes; ``reverse`` runs it from last to first.

    Random numbers in the body are drawn again in each round, from the seeds given to the call:
    two loops that draw in the same order draw the same from the same seeds. A loop inside of
    another one's body must be ``inner``: then it draws none, and leaves those of the body alone.
    """

    def __init__(
        self,
        body: Body,
        state: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        rounds: int,
        reverse: bool = False,
        inner: bool = False,
    ) -> None:
        self._rounds, self._reverse = rounds, reverse
        self._loop: object | None = None

        # Trace the body, with a seed of its own for what it draws at random.
        given = [
            xb.create_placeholder_tensor(each.shape, each.dtype)
            for each in (*state, *(stacked[0] for stacked in inputs))
        ]
        # Not the placeholders themselves: a sharding mark on one would replace it.
        used = [same(each) for each in given]
        rng_state = xm.get_rng_state()
        if not inner:
            xm.set_rng_state(0)  # draws begin with seeds of the round's own, nothing before them
        next_state, outputs = body(used[: len(state)], used[len(state) :])
        self._outputs = [(tuple(each.shape), each.dtype) for each in outputs]

        # Lower it to a computation of its own.
        context = lowering_context("Body")
        context.set_name_string("body")
        context.build([*next_state, *outputs])
        self._computation = xb.computation_from_module_proto("body", context.hlo())

        # Find what each of its parameters is: state, slices of inputs, constants, seed.
        parameter_of = {context.tensor_parameter_id(each): i for i, each in enumerate(given)}
        parameter_of.pop(-1, None)  # not used by the body
        others = context.device_parameter_id_tensor_mapping()
        others = {id_: tensor for id_, tensor in others.items() if id_ not in parameter_of}
        seed = seed_parameter([*next_state, *outputs], context)
        self.draws = seed is not None
        """Whether the body draws random numbers, so that the call needs seeds."""
        if seed is not None:
            del others[seed]
        self._constants: Tensors = []
        for id_, tensor in others.items():
            parameter_of[id_] = len(given) + len(self._constants)
            self._constants.append(tensor.to("xla"))
        if seed is not None:
            parameter_of[seed] = len(given) + len(self._constants)
        self._order = [parameter_of[id_] for id_ in range(len(parameter_of))]
        if not inner:
            xm.set_rng_state(rng_state)

    def __call__(
        self,
        state: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        seeds: torch.Tensor | None = None,
    ) -> tuple[Tensors, Tensors]:
        """Return the last state and the stacked outputs.

        ``seeds`` are int64 (rounds,), needed if it ``draws``.
        """
        device = torch_xla.device()
        # What XLA's loop carries.
        number = torch.zeros((), dtype=torch.int32, device=device)  # of the round, from 0
        outputs = [
            torch.zeros((self._rounds, *shape), dtype=dtype, device=device)
            for shape, dtype in self._outputs
        ]
        own_seeds = [seeds] if self.draws and seeds is not None else []
        given = (number, list(state), list(inputs), outputs, self._constants, own_seeds)
        flat, structure = tree_flatten(given)
        if self._loop is None:
            self._loop = self._build(flat, structure)
        results = call_computation("xla::scan", flat, self._loop)
        _, last_state, _, stacked, *_ = tree_unflatten(results, structure)
        return last_state, stacked

    def _build(self, given: Tensors, structure: TreeSpec) -> object:
        """Build the loop for what it is given first."""

        def integer(value: int, beside: xb.Op) -> xb.Op:
            return xb.Op.scalar(beside.builder(), value, dtype=xb.Type.S32)

        def one_round(*flat: xb.Op) -> tuple[xb.Op, ...]:
            number, state, inputs, outputs, constants, seeds = tree_unflatten(flat, structure)
            index = integer(self._rounds - 1, number) - number if self._reverse else number
            slices = [dynamic_slice(each, index) for each in (*inputs, *seeds)]
            own_seeds = slices[len(inputs) :]
            arguments = [*state, *slices[: len(inputs)], *constants, *own_seeds]
            result = xb.Op.call(self._computation, [arguments[i] for i in self._order])
            count = len(state)
            outputs = [
                dynamic_update_slice(stacked, result.get_tuple_element(count + i), index)
                for i, stacked in enumerate(outputs)
            ]
            following = number + integer(1, number)
            state = [result.get_tuple_element(i) for i in range(count)]
            after = (following, state, inputs, outputs, constants, seeds)
            return tuple(tree_flatten(after)[0])

        builder = xb.create_builder("scan")
        ops = [xb.mkparam(builder, i, xb.tensor_shape(each)) for i, each in enumerate(given)]
        return xb.Op.mkwhile(
            ops, lambda number, *_: number < integer(self._rounds, number), one_round
        ).build("scan")


def same(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own with the values of ``x``."""
    if x.dtype == torch.bool:
        return x.logical_and(x)
    return x * 1 if x.is_floating_point() else x + 0
