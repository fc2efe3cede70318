"""All transformer blocks as one: parameters stacked, computed by a loop inside the graph.

Graph, compilation and the host's tracing no longer grow with the depth, and the compiler
cannot gather a block's weights before its turn or keep them after it: ZeRO-3's memory
without barriers. The backward loop recomputes each block from its input (gradient
checkpointing) and from what the forward loop has kept beside it, then lets go of its gathered
weights again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
from timm.layers import DropPath
from torch import nn

from models.initialize import fill_buffers
from xla_fsdp.remat import KeptInput
from xla_fsdp.sharding import Mark, MarkBoth
from xla_fsdp.torch_xla_private import (
    call_computation,
    dynamic_slice,
    dynamic_update_slice,
    lowering_context,
    seed_parameter,
)

# ------------------------------------------------------------------------------------------------
# A loop over the first dimension of tensors that is one ``While`` of the XLA graph.
#
# torch_xla's own ``scan`` traces and lowers its function anew at every call. Here that is done
# once: a later call costs the host the same for any number of rounds and any size of function.


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


# ------------------------------------------------------------------------------------------------


class _DropPath(nn.Module):
    """timm's DropPath, its probability a tensor: another one in each round of the loop."""

    keep: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        shape = (x.shape[0],) + (1,) * (x.dim() - 1)
        return x * (torch.bernoulli(self.keep.expand(shape)) / self.keep).to(x.dtype)


@dataclass(frozen=True)
class _Names:
    """Of the keyword arguments that each block is given."""

    shared: tuple[str, ...]
    stacked: tuple[str, ...]


class ScannedBlocks(nn.Module):
    """All blocks in one module. ``block`` holds the parameters, (depth, *shape).

    A model that computes with it calls it once for all blocks (``ModelSpec.put_blocks``).

    ``adapt`` changes how a block computes, what it passes through ``kept`` is stored for the
    backward loop; ``stack(name, parameter, depth)`` makes zeros for one
    of its parameters, ``constant`` puts a small tensor on the devices; ``mark_tokens`` and
    ``gather(name, weight)`` tell the partitioner how activations lie and where a weight is
    gathered. Names are those in a block.
    """

    def __init__(
        self,
        blocks: nn.Sequential | nn.ModuleList,
        *,
        adapt: Callable[[nn.Module], None],
        stack: Callable[[str, torch.Tensor, int], nn.Parameter],
        constant: Callable[[torch.Tensor], torch.Tensor],
        mark_tokens: Mark,
        gather: Callable[[str, torch.Tensor], torch.Tensor],
        bf16: bool,
        kept: KeptInput | None = None,
        mark_kept: Mark = torch.Tensor.contiguous,
    ) -> None:
        super().__init__()
        self.block = copy.deepcopy(blocks[-1]).to("meta")
        adapt(self.block)
        fill_buffers(self.block, constant)  # the same in every block, as all that is not learned
        self._depth, self._bf16, self._kept = len(blocks), bf16, kept or KeptInput()
        self._kept.adapt(self.block)
        self._mark_tokens, self._mark_kept, self._gather = mark_tokens, mark_kept, gather
        self._scans: dict[tuple, Scan] = {}
        self._drop_paths: list[_DropPath] = []
        self._keep: list[torch.Tensor] = []
        for name, module in list(self.block.named_modules()):
            if isinstance(module, DropPath):
                rates = [getattr(block.get_submodule(name), "drop_prob", 0.0) for block in blocks]
                self._keep.append(constant(1.0 - torch.tensor(rates)))
                self._drop_paths.append(_DropPath())
                self.block.set_submodule(name, self._drop_paths[-1])
        for name, parameter in list(self.block.named_parameters()):
            owner, _, key = name.rpartition(".")
            stacked = stack(name, parameter, self._depth)
            self.block.get_submodule(owner)._parameters[key] = stacked

    @torch.no_grad()
    def fill(
        self, index: int, block: nn.Module, send: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> None:
        """Put a block's values in its place. One graph for every index, elementwise."""
        here = (torch.arange(self._depth) == index).to(torch_xla.device())
        for name, stacked in self.block.named_parameters():
            values = send(name, block.get_parameter(name).detach())
            chosen = here.view(-1, *(1,) * values.dim())
            stacked.copy_(torch.where(chosen, values, stacked))

    def forward(
        self,
        x: torch.Tensor,
        *,
        shared: Mapping[str, torch.Tensor] | None = None,
        stacked: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute what all blocks make of ``x``, (batch, tokens, width), one after the other.

        Keyword arguments of each block are ``shared``, the same for all and without a gradient,
        and the parts of ``stacked`` along dimension 0, one for each block.
        """
        shared, stacked = shared or {}, stacked or {}
        assert not any(each.requires_grad for each in shared.values())
        names, values = _Names(tuple(shared), tuple(stacked)), [*shared.values()]
        # What is another in each round: the parameters, and what is given beside them.
        of_each = [*stacked.values(), *self.block.parameters()]
        trains = any(each.requires_grad for each in (x, *of_each))
        if trains and torch.is_grad_enabled():
            return _ScanWithGrad.apply(self, names, x, *values, *of_each)
        return self._run_forward(names, x, values, of_each, keep=False)[0]

    # -- the two loops ----------------------------------------------------------------

    def _scan(self, key: str, body, state, inputs, *, reverse: bool = False) -> Scan:
        """Return the loop for this state, traced the first time that it is wanted."""
        whole = (key, self.training, *((tuple(each.shape), each.dtype) for each in state))
        if whole not in self._scans:
            self._scans[whole] = Scan(body, state, inputs, reverse=reverse)
        return self._scans[whole]

    def _compute(
        self,
        names: _Names,
        x: torch.Tensor,
        shared: Sequence[torch.Tensor],
        of_each: Sequence[torch.Tensor],
        keep: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Compute one block; of ``of_each`` and ``keep``, the parts given are its own."""
        x = MarkBoth.apply(x, self._mark_tokens)
        count = len(names.stacked)
        arguments = dict(zip(names.shared, shared, strict=True))
        arguments |= dict(zip(names.stacked, of_each[:count], strict=True))
        for module, probability in zip(self._drop_paths, keep, strict=True):
            module.keep = probability
        keys = [key for key, _ in self.block.named_parameters()]
        gathered = [self._gather(*each) for each in zip(keys, of_each[count:], strict=True)]
        values = dict(zip(keys, gathered, strict=True))
        with torch.autocast("xla", dtype=torch.bfloat16, enabled=self._bf16):
            y = torch.func.functional_call(self.block, values, (x,), arguments)
        for module in self._drop_paths:  # left alive, they would be computed with the step
            del module.keep
        return MarkBoth.apply(y.to(x.dtype), self._mark_tokens)

    def _run_forward(self, names: _Names, x, shared, of_each, *, keep: bool):
        count = len(of_each)

        def body(state, slices):
            x, *shared = state
            if not keep:
                y = self._compute(names, x, shared, slices[:count], slices[count:])
                return [y, *shared], []
            x, *own = (each.detach().requires_grad_() for each in (x, *slices[:count]))
            with self._kept.keep(x) as kept:
                y = self._compute(names, x, shared, own, slices[count:])
            x, *results = kept
            kept = [self._kept.sent(x), *(self._mark_kept(same(each)) for each in results)]
            return [y, *shared], kept

        inputs, state = [*of_each, *self._keep], [x, *shared]
        scan = self._scan(f"forward {keep}", body, state, inputs)
        seeds = None
        if scan.draws:
            seeds = torch.randint(0, 2**62, (self._depth,), dtype=torch.int64, device=x.device)
        (y, *_), kept = scan(state, inputs, seeds)
        return y, kept, seeds

    def _run_backward(self, names: _Names, grad, kept_of_each, shared, of_each, seeds):
        count, kept = len(of_each), len(kept_of_each)

        def body(state, slices):
            grad, *shared = state
            (x, *results), rest = slices[:kept], slices[kept:]
            x, results = self._kept.fetched(x), [self._mark_kept(same(each)) for each in results]
            x, *own = (each.detach().requires_grad_() for each in (x, *rest[:count]))
            with self._kept.know(results):
                y = self._compute(names, x, shared, own, rest[count:])
            grad_x, *grads = torch.autograd.grad(y, [x, *own], grad)
            return [grad_x, *shared], grads

        inputs, state = [*kept_of_each, *of_each, *self._keep], [grad, *shared]
        scan = self._scan("backward", body, state, inputs, reverse=True)
        (grad_x, *_), grads = scan(state, inputs, seeds)
        return grad_x, grads


class _ScanWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scanned: ScannedBlocks, names: _Names, x, *given):
        count = len(names.shared)
        shared, of_each = list(given[:count]), list(given[count:])
        y, kept, seeds = scanned._run_forward(names, x, shared, of_each, keep=True)
        ctx.scanned, ctx.names, ctx.seeds, ctx.kept = scanned, names, seeds, len(kept)
        ctx.save_for_backward(*kept, *given)
        return y

    @staticmethod
    def backward(ctx, grad):
        kept, given = ctx.saved_tensors[: ctx.kept], ctx.saved_tensors[ctx.kept :]
        count = len(ctx.names.shared)
        shared, of_each = given[:count], given[count:]
        grad_x, grads = ctx.scanned._run_backward(ctx.names, grad, kept, shared, of_each, ctx.seeds)
        return None, None, grad_x, *[None] * count, *grads
