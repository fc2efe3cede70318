"""Runs all transformer blocks as one loop inside the graph, over stacked parameters.

Graph size, compile time and tracing time do not grow with depth. The compiler cannot gather a
block's weights early or keep them afterwards, so memory is that of ZeRO-3 without barriers. The
backward loop recomputes each block from its input and the values that the forward loop saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch_xla.experimental.scan import dynamic_slice, dynamic_update_slice

from models.blocks import drop_path_rates
from models.initialize import fill_buffers
from xla_fsdp.layout import MeshLayout, mark_both
from xla_fsdp.remat import SaveInput
from xla_fsdp.torch_xla_private import (
    call_computation,
    lowering_context,
    moved_to,
    seed_parameter,
)

# ------------------------------------------------------------------------------------------------
# A loop over the first dimension of tensors that is one ``While`` of the XLA graph.
#
# torch_xla's own ``scan`` traces and lowers its function at every call. Here that is done once:
# a later call costs the host the same for any number of rounds and any size of function.


Tensors = list[torch.Tensor]
Body = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
"""A function (state, one slice of each input) -> (next state, one slice of each output)."""


class Scan:
    """The loop, traced for tensors of these shapes; ``reverse`` runs it from last to first.

    The body draws random numbers anew in each round, from the seeds given to the call: the same
    from the same seeds. A loop inside of another one's body must be ``inner``: then it draws none.
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
        placeholders = [
            xb.create_placeholder_tensor(x.shape, x.dtype)
            for x in (*state, *(stacked[0] for stacked in inputs))
        ]
        # Not the placeholders themselves: a sharding mark on one would replace it.
        arguments = [same(x) for x in placeholders]
        rng_state = xm.get_rng_state()
        if not inner:
            xm.set_rng_state(0)  # draws begin with seeds of the round's own, nothing before them
        next_state, outputs = body(arguments[: len(state)], arguments[len(state) :])
        self._outputs = [(tuple(x.shape), x.dtype) for x in outputs]

        # Lower it to a computation of its own.
        context = lowering_context("Body")
        context.set_name_string("body")
        context.build([*next_state, *outputs])
        self._computation = xb.computation_from_module_proto("body", context.hlo())

        # Find what each of its parameters is: state, slices of inputs, constants, seed.
        position = {context.tensor_parameter_id(x): i for i, x in enumerate(placeholders)}
        position.pop(-1, None)  # not used by the body
        data = context.device_parameter_id_tensor_mapping()
        seed = seed_parameter([*next_state, *outputs], context)
        self.draws = seed is not None
        """Whether the body draws random numbers, so that the call needs seeds."""
        constants = [id_ for id_ in data if id_ not in position and id_ != seed]
        self._constants: Tensors = [data[id_].to("xla") for id_ in constants]
        last = constants if seed is None else [*constants, seed]
        position |= {id_: len(placeholders) + i for i, id_ in enumerate(last)}
        self._order = [position[id_] for id_ in range(len(position))]
        if not inner:
            xm.set_rng_state(rng_state)

    def __call__(
        self,
        state: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        seeds: torch.Tensor | None = None,
    ) -> tuple[Tensors, Tensors]:
        """Return the last state and the stacked outputs; ``seeds``: int64 (rounds,), if it
        ``draws``."""
        device = torch_xla.device()
        # What XLA's loop carries.
        number = torch.zeros((), dtype=torch.int32, device=device)  # of the round, from 0
        outputs = [
            torch.zeros((self._rounds, *shape), dtype=dtype, device=device)
            for shape, dtype in self._outputs
        ]
        drawn_from = [seeds] if self.draws and seeds is not None else []
        carried = (number, list(state), list(inputs), outputs, self._constants, drawn_from)
        flat, structure = tree_flatten(carried)
        if self._loop is None:
            self._loop = self._build(flat, structure)
        results = call_computation("xla::scan", flat, self._loop)
        _, last_state, _, stacked, *_ = tree_unflatten(results, structure)
        return last_state, stacked

    def _build(self, carried: Tensors, structure: TreeSpec) -> object:
        """Build the loop that carries such tensors from round to round."""

        def integer(value: int, beside: xb.Op) -> xb.Op:
            return xb.Op.scalar(beside.builder(), value, dtype=xb.Type.S32)

        def one_round(*flat: xb.Op) -> tuple[xb.Op, ...]:
            number, state, inputs, outputs, constants, seeds = tree_unflatten(flat, structure)
            index = integer(self._rounds - 1, number) - number if self._reverse else number
            slices = [dynamic_slice(stacked, index) for stacked in (*inputs, *seeds)]
            seed = slices[len(inputs) :]
            arguments = [*state, *slices[: len(inputs)], *constants, *seed]
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
        ops = [xb.mkparam(builder, i, xb.tensor_shape(x)) for i, x in enumerate(carried)]
        return xb.Op.mkwhile(
            ops, lambda number, *_: number < integer(self._rounds, number), one_round
        ).build("scan")


def same(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own with the values of ``x``."""
    if x.dtype == torch.bool:
        return x.logical_and(x)
    return x * 1 if x.is_floating_point() else x + 0


# ------------------------------------------------------------------------------------------------
# The blocks.


class _DropPath(nn.Module):
    """timm's DropPath, its probability a tensor: another one in each round of the loop."""

    keep: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        shape = (x.shape[0],) + (1,) * (x.dim() - 1)
        return x * (torch.bernoulli(self.keep.expand(shape)) / self.keep).to(x.dtype)


_Names = tuple[list[str], list[str]]
"""Of the blocks' keyword arguments: those that all share, and those with a part for each."""


class ScannedBlocks(nn.Module):
    """All blocks in one module, ``block``, with the parameters (depth, *shape), called once for
    all.

    ``adapt`` changes how a block computes; ``save`` says what is saved of it for the backward loop;
    ``gather(name, weight)`` marks where a weight is gathered, by its name in a block.
    """

    def __init__(
        self,
        blocks: nn.Sequential | nn.ModuleList,
        layout: MeshLayout,
        save: SaveInput,
        *,
        adapt: Callable[[nn.Module], None],
        gather: Callable[[str, torch.Tensor], torch.Tensor],
        bf16: bool,
    ) -> None:
        super().__init__()
        self.block = copy.deepcopy(blocks[-1]).to("meta")  # the template, which ``fill`` fills
        adapt(self.block)
        fill_buffers(self.block, layout.constant)  # the same in every block
        save.adapt(self.block)
        self._depth, self._bf16 = len(blocks), bf16
        self._layout, self._save, self._gather = layout, save, gather
        self._scans: dict[tuple, Scan] = {}
        self._drop_paths: list[_DropPath] = []
        self._keep: list[torch.Tensor] = []
        for name, rates in drop_path_rates([*blocks]).items():
            self._keep.append(layout.constant(1.0 - torch.tensor(rates)))
            self._drop_paths.append(_DropPath())
            self.block.set_submodule(name, self._drop_paths[-1])
        for name, parameter in list(self.block.named_parameters()):
            owner, _, key = name.rpartition(".")
            stacked = layout.stacked_zeros(name, parameter, self._depth)
            self.block.get_submodule(owner)._parameters[key] = stacked

    @torch.no_grad()
    def fill(self, index: int, block: nn.Module) -> None:
        """Put the values of a block, packed as the template is, in its place. One graph for every
        index."""
        place = torch.tensor([index]).to(torch_xla.device())
        for name, stacked in self.block.named_parameters():
            parameter = block.get_parameter(name).detach()
            values = self._layout.send(
                parameter, self._layout.parameter_spec(name, parameter.shape)
            )
            # In place: the other blocks' values are not copied.
            stacked.index_copy_(0, place, values.unsqueeze(0))

    def forward(
        self,
        x: torch.Tensor,
        *,
        shared: Mapping[str, torch.Tensor] | None = None,
        stacked: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute what all blocks make of ``x``, (batch, tokens, width). Keyword arguments of
        each block are ``shared``, without a gradient, and its part of ``stacked`` along
        dimension 0."""
        shared, stacked = shared or {}, stacked or {}
        assert not any(tensor.requires_grad for tensor in shared.values())
        names = list(shared), list(stacked)
        # What is another in each round: these arguments, and the parameters.
        sliced = [*stacked.values(), *self.block.parameters()]
        trains = any(tensor.requires_grad for tensor in (x, *sliced))
        if trains and torch.is_grad_enabled():
            return _ScanWithGrad.apply(self, names, x, *shared.values(), *sliced)
        return self._run_forward(names, x, list(shared.values()), sliced, save=False)[0]

    # -- the loop forward; backward is in ``_ScanWithGrad`` ---------------------------

    def _run_forward(self, names: _Names, x, shared, sliced, *, save: bool):
        count = len(sliced)

        def body(state, slices):
            x, *shared = state
            if not save:
                y = self._compute(names, x, shared, slices[:count], slices[count:])
                return [y, *shared], []
            x, *slice_ = (tensor.detach().requires_grad_() for tensor in (x, *slices[:count]))
            with self._save.save(x) as saved:
                y = self._compute(names, x, shared, slice_, slices[count:])
            x, *results = saved
            x = moved_to("pinned_host", x) if self._save.on_host else x
            saved = [x, *(self._layout.mark_saved(same(result)) for result in results)]
            return [y, *shared], saved

        inputs, state = [*sliced, *self._keep], [x, *shared]
        scan = self._scan(f"forward {save}", body, state, inputs)
        seeds = None
        if scan.draws:
            seeds = torch.randint(0, 2**62, (self._depth,), dtype=torch.int64, device=x.device)
        (y, *_), saved = scan(state, inputs, seeds)
        return y, saved, seeds

    def _scan(self, key: str, body, state, inputs, *, reverse: bool = False) -> Scan:
        """Return the loop for this state, traced the first time that it is needed."""
        whole_key = (key, self.training, *((tuple(x.shape), x.dtype) for x in state))
        if whole_key not in self._scans:
            self._scans[whole_key] = Scan(body, state, inputs, rounds=self._depth, reverse=reverse)
        return self._scans[whole_key]

    def _compute(
        self,
        names: _Names,
        x: torch.Tensor,
        shared: Sequence[torch.Tensor],
        slices: Sequence[torch.Tensor],
        keep: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Compute one block, from its ``slices`` of arguments and parameters, and its ``keep``."""
        x = mark_both(x, self._layout.mark_tokens)
        shared_names, stacked_names = names
        count = len(stacked_names)
        arguments = dict(zip(shared_names, shared, strict=True))
        arguments |= dict(zip(stacked_names, slices[:count], strict=True))
        for module, probability in zip(self._drop_paths, keep, strict=True):
            module.keep = probability
        keys = [key for key, _ in self.block.named_parameters()]
        weights = {
            key: self._gather(key, weight) for key, weight in zip(keys, slices[count:], strict=True)
        }
        with torch.autocast("xla", dtype=torch.bfloat16, enabled=self._bf16):
            y = torch.func.functional_call(self.block, weights, (x,), arguments)
        for module in self._drop_paths:  # left alive, they would be computed with the step
            del module.keep
        return mark_both(y.to(x.dtype), self._layout.mark_tokens)


class _ScanWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scanned: ScannedBlocks, names: _Names, x, *tensors):
        count = len(names[0])
        shared, sliced = list(tensors[:count]), list(tensors[count:])
        y, saved, seeds = scanned._run_forward(names, x, shared, sliced, save=True)
        ctx.scanned, ctx.names, ctx.seeds, ctx.saved = scanned, names, seeds, len(saved)
        ctx.save_for_backward(*saved, *tensors)
        return y

    @staticmethod
    def backward(ctx, grad):
        saved, tensors = ctx.saved_tensors[: ctx.saved], ctx.saved_tensors[ctx.saved :]
        scanned, names, saved_count = ctx.scanned, ctx.names, ctx.saved
        shared, sliced = tensors[: len(names[0])], tensors[len(names[0]) :]
        count = len(sliced)

        def body(state, slices):
            grad, *shared = state
            (x, *results), rest = slices[:saved_count], slices[saved_count:]
            x = moved_to("device", x) if scanned._save.on_host else x
            results = [scanned._layout.mark_saved(same(result)) for result in results]
            x, *slice_ = (tensor.detach().requires_grad_() for tensor in (x, *rest[:count]))
            with scanned._save.rematerialize(results):
                y = scanned._compute(names, x, shared, slice_, rest[count:])
            grad_x, *grads = torch.autograd.grad(y, [x, *slice_], grad)
            return [grad_x, *shared], grads

        inputs, state = [*saved, *sliced, *scanned._keep], [grad, *shared]
        scan = scanned._scan("backward", body, state, inputs, reverse=True)
        (grad_x, *_), grads = scan(state, inputs, ctx.seeds)
        return None, None, grad_x, *[None] * len(shared), *grads
