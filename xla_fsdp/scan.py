"""A loop over the first dimension of tensors that is one ``While`` of the XLA graph.

torch_xla's own ``scan`` traces and lowers its function anew at every call. Here that is done
once: a later call costs the host the same for any number of rounds and any size of function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

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
"""A function (state, one slice of each input) -> (next state, one slice of each output)."""


T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class _Carried(Generic[T]):
    """What goes round the loop: tensors before it is built, ops while it is built."""

    number: T
    """The number of the round, from 0: an int32 scalar."""
    state: list[T]
    inputs: list[T]
    """Stacked tensors: a round takes its slice of each. They stay as they are."""
    outputs: list[T]
    """Stacked tensors: a round writes its slice of each."""
    constants: list[T]
    """Tensors that the body uses without being given them."""
    seeds: list[T]
    """One tensor, int64 (rounds,), if the body draws random numbers, else none."""

    def flat(self) -> list[T]:
        """Return everything in the order of the fields, as XLA's loop carries it."""
        return [
            self.number,
            *self.state,
            *self.inputs,
            *self.outputs,
            *self.constants,
            *self.seeds,
        ]

    def like(self, flat: Sequence[U]) -> _Carried[U]:
        """Return what is in the places of another loop's ``flat``, by field."""
        number, *rest = flat
        parts = []
        for part in (self.state, self.inputs, self.outputs, self.constants, self.seeds):
            parts.append(rest[: len(part)])
            rest = rest[len(part) :]
        assert not rest
        return _Carried(number, *parts)


@dataclass(frozen=True)
class _Lowered:
    """The loop's body as a computation of its own."""

    computation: object
    order: list[int]
    """For each of its parameters the index among (state, slices of inputs, constants, seed)."""
    outputs: list[tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype of one slice of each output."""
    constants: Tensors
    """The tensors that it uses without being given them."""
    draws: bool
    """Whether it takes a seed, because it draws random numbers."""


class Scan:
    """The loop, traced for tensors of these shapes; ``reverse`` runs it from last to first.

    Random numbers in the body are drawn anew in each round, from the seeds given to the call:
    two loops that draw in the same order draw the same from the same seeds.
    """

    def __init__(
        self,
        body: Body,
        state: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        reverse: bool = False,
    ) -> None:
        self._rounds = len(inputs[0])
        self._reverse = reverse
        self._body = _lower(body, state, inputs)
        self._loop: object | None = None

    @property
    def draws(self) -> bool:
        """Whether the body draws random numbers, so that the call needs seeds."""
        return self._body.draws

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
        given = _Carried(
            number=torch.zeros((), dtype=torch.int32, device=device),
            state=list(state),
            inputs=list(inputs),
            outputs=[
                torch.zeros((self._rounds, *shape), dtype=dtype, device=device)
                for shape, dtype in self._body.outputs
            ],
            constants=self._body.constants,
            seeds=[seeds] if self.draws and seeds is not None else [],
        )
        if self._loop is None:
            self._loop = self._build(given)
        results = given.like(call_computation("xla::scan", given.flat(), self._loop))
        return results.state, results.outputs

    def _build(self, given: _Carried[torch.Tensor]) -> object:
        builder = xb.create_builder("scan")
        ops = [xb.mkparam(builder, i, xb.tensor_shape(t)) for i, t in enumerate(given.flat())]

        def next_round(*now: xb.Op) -> tuple[xb.Op, ...]:
            return tuple(self._round(given.like(now)).flat())

        loop = xb.Op.mkwhile(ops, self._goes_on, next_round)
        return loop.build("scan")

    def _goes_on(self, number: xb.Op, *_: xb.Op) -> xb.Op:
        return number < xb.Op.scalar(number.builder(), self._rounds, dtype=xb.Type.S32)

    def _round(self, now: _Carried[xb.Op]) -> _Carried[xb.Op]:
        builder = now.number.builder()

        def integer(value: int) -> xb.Op:
            return xb.Op.scalar(builder, value, dtype=xb.Type.S32)

        index = integer(self._rounds - 1) - now.number if self._reverse else now.number
        slices = [dynamic_slice(each, index) for each in now.inputs]
        seeds = [dynamic_slice(each, index) for each in now.seeds]
        given = [*now.state, *slices, *now.constants, *seeds]
        result = xb.Op.call(self._body.computation, [given[i] for i in self._body.order])
        count = len(now.state)
        outputs = [
            dynamic_update_slice(stacked, result.get_tuple_element(count + i), index)
            for i, stacked in enumerate(now.outputs)
        ]
        return replace(
            now,
            number=now.number + integer(1),
            state=[result.get_tuple_element(i) for i in range(count)],
            outputs=outputs,
        )


def same(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own with the values of ``x``."""
    if x.dtype == torch.bool:
        return x.logical_and(x)
    return x * 1 if x.is_floating_point() else x + 0


def _lower(body: Body, state: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> _Lowered:
    """Trace the body and lower it, with a seed of its own for what it draws at random."""

    def placeholder(like: torch.Tensor) -> torch.Tensor:
        return xb.create_placeholder_tensor(like.shape, like.dtype)

    given = [placeholder(each) for each in state] + [placeholder(each[0]) for each in inputs]
    # Not the placeholders themselves: a sharding mark on one would replace it.
    used = [same(each) for each in given]
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
    return _Lowered(
        computation=computation,
        order=[parameter_of[id_] for id_ in range(len(parameter_of))],
        outputs=[(tuple(each.shape), each.dtype) for each in outputs],
        constants=constants,
        draws=seed is not None,
    )
