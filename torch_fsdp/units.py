"""What SimpleFSDP gathers and computes as one: a block, alone or in a loop over blocks that are
alike."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import DropPath
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from models.blocks import drop_path_rates
from torch_fsdp.devices import Device
from torch_fsdp.parallel_plan import selective_contexts
from torch_fsdp.products import ROUNDED
from torch_fsdp.scan import ScanWithRecomputation
from torch_fsdp.shards import Gather, Layout
from torch_fsdp.step_graph import StatelessRandom


@dataclass
class Unit:
    """A module whose parameters, except for those of units below it, are gathered together for its
    forward pass."""

    slots: list[tuple[nn.Module, str, Layout]]
    """The modules' entries that hold shards outside of a forward pass."""
    number: int
    forward: Callable[..., Any]
    """Of the plain module."""
    dtype: torch.dtype
    output_dtype: torch.dtype | None
    """What floating-point outputs are cast to."""
    barrier: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self._shards(), self._random(), args, kwargs)

    def _random(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Return what begins the random numbers of a pass that starts; None outside of a trace."""
        if (random := StatelessRandom.of_trace) is None:
            return None
        return functools.partial(random.at, random.next_pass(self.number))

    def compute(
        self,
        shards: Sequence[Any],
        random: Callable[[], AbstractContextManager[None]] | None,
        args: Any,
        kwargs: Any,
    ) -> Any:
        return self._compute_with(self._gathered(shards), random, args, kwargs)

    def _gathered(self, shards: Sequence[Any]) -> list[Any]:
        return [
            values
            for shard, (_, _, layout) in zip(shards, self.slots, strict=True)
            for values in Gather.apply(shard, layout)
        ]

    def _compute_with(
        self,
        whole: Sequence[Any],
        random: Callable[[], AbstractContextManager[None]] | None,
        args: Any,
        kwargs: Any,
    ) -> Any:
        args, kwargs = _cast((args, kwargs), self.dtype)
        with self._in_place(whole), random() if random else nullcontext():
            output = self.forward(*args, **kwargs)
        return output if self.output_dtype is None else _cast(output, self.output_dtype)

    def _shards(self) -> list[Any]:
        return [module._parameters[key] for module, key, _ in self.slots]

    @contextlib.contextmanager
    def _in_place(self, whole: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the modules compute inside with ``whole`` parameters, as ``Gather`` gives them."""
        entries: list[tuple[dict[str, Any], str]] = []
        for module, key, layout in self.slots:
            entries.append((module._parameters, key))
            entries += [(module._buffers, name) for name in ROUNDED if layout.multiplied]
        outside = [tensors[key] for tensors, key in entries]
        for (tensors, key), values in zip(entries, whole, strict=True):
            tensors[key] = values
        try:
            yield
        finally:
            for (tensors, key), values in zip(entries, outside, strict=True):
                tensors[key] = values

    def recompute(self, mode: str, *, keeps_gathered: bool) -> Callable[..., Any]:
        """Return a function that recomputes activations in the backward pass, and gathers
        parameters again there, unless it ``keeps_gathered`` ones. ``mode``: "full" or
        "selective"."""

        how: dict[str, Any] = {"context_fn": selective_contexts} if mode == "selective" else {}

        def forward(*args: Any, **kwargs: Any) -> Any:
            random = self._random()
            weights = self._shards()
            run: Callable[..., Any] = self.compute
            if keeps_gathered:
                weights, run = self._gathered(weights), self._compute_with
            hidden: list[torch.Tensor] = []
            """In a recomputation: the arguments that are tensors, then the weights."""

            def compute(*args: Any, **kwargs: Any) -> Any:
                if not hidden:
                    return run(weights, random, args, kwargs)
                given = iter(hidden)
                args = tuple(next(given) if isinstance(x, torch.Tensor) else x for x in args)
                return run(list(given), random, args, kwargs)

            output = checkpoint(
                compute,
                *args,
                use_reentrant=False,
                preserve_rng_state=random is None,
                **how,
                **kwargs,
            )
            if random and output.requires_grad:
                inputs = [x for x in args if isinstance(x, torch.Tensor)]
                output.register_hook(functools.partial(self._hide, inputs, weights, hidden))
            return output

        return forward

    def _hide(
        self,
        inputs: list[torch.Tensor],
        weights: list[torch.Tensor],
        hidden: list[torch.Tensor],
        grad: torch.Tensor,
    ) -> torch.Tensor:
        """Fill ``hidden`` when the backward pass reaches the block.

        XLA would find that a recomputation computes what the forward pass did, and keep that
        instead. It can gather the weights before ``grad`` is there, but not compute with them.
        """
        grad, *late = self.barrier([grad, *inputs])
        hidden += [
            values.detach().requires_grad_(given.requires_grad)
            for values, given in zip(
                [*late, *self.barrier(weights)], [*inputs, *weights], strict=True
            )
        ]
        return grad


class _DropPath(DropPath):
    """timm's, with a probability to keep that is a tensor, another one in each round of a loop."""

    keep: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.keep is None or not self.training:
            return super().forward(x)
        kept = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(self.keep)
        return x * (kept / self.keep).to(x.dtype)


class ScannedBlocks(nn.ModuleList):
    """Blocks that are alike, called once for all: in a traced step as one loop forward and one
    backward, which computes each block again from its input."""

    def __init__(
        self, blocks: Sequence[nn.Module], units: Sequence[Unit], device: Device, *, offloads: bool
    ) -> None:
        """``offloads``: keep the blocks' inputs in the host's memory."""
        super().__init__(blocks)
        self._units, self._device, self._offloads = units, device, offloads
        self._keep: list[torch.Tensor] = []
        self._drop_paths: list[_DropPath] = []
        """Those of the last block, as which all are computed."""
        for name, rates in drop_path_rates(blocks).items():
            module: Any = blocks[-1].get_submodule(name)
            self._keep.append((1 - torch.tensor(rates)).to(device.where))
            self._drop_paths.append(_DropPath(module.drop_prob, module.scale_by_keep))
            blocks[-1].set_submodule(name, self._drop_paths[-1])

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
        random = StatelessRandom.of_trace
        if random is None:
            for index, block in enumerate(self):
                own = {name: values[index] for name, values in stacked.items()}
                x = block(x, **shared, **own)
            return x
        first, last = self._units[0], self._units[-1]
        _, pass_ = random.next_pass(first.number)
        numbers = torch.arange(len(self), dtype=torch.int32, device=x.device) + first.number
        of_each: list[Any] = [numbers, *self._keep, *stacked.values()]
        layouts = [layout for *_, layout in last.slots]
        matrices: list[Sequence[Any]] = []
        vectors: list[torch.Tensor] = []
        for shards, layout in zip(
            zip(*(unit._shards() for unit in self._units), strict=True), layouts, strict=True
        ):
            if _is_gathered_once(layout):
                vectors += Gather.apply(torch.stack(shards), layout.of_several(len(shards)))
            else:
                # Whose gradients leave the loop in the dtype in which they are reduced.
                is_same = layout.held == layout.reduce_dtype
                matrices.append([x.to(layout.held) for x in shards] if is_same else shards)
        # One row for all of a block, of which a round of the loop takes one slice.
        joined = [torch.cat(vectors, dim=1).unbind()] if vectors else []
        sizes = [values.shape[1] for values in vectors]
        rows = [
            [values[index] for values in [*of_each, *joined, *matrices]]
            for index in range(len(self))
        ]
        # Shards in the dtype in which they are gathered, so that the rounds convert nothing.
        dtypes = [values.dtype for values in [*of_each, *vectors[:1]]]
        dtypes += [layout.held for layout in layouts if not _is_gathered_once(layout)]

        def compute(x: torch.Tensor, row: list[torch.Tensor]) -> torch.Tensor:
            given = iter(row)
            begin = functools.partial(random.at, (next(given), pass_))
            for module in self._drop_paths:
                module.keep = next(given)
            kwargs = {**shared, **{name: next(given) for name in stacked}}
            small = iter(next(given).split(sizes) if sizes else [])
            whole = [
                values
                for layout in layouts
                for values in (
                    [next(small)]
                    if _is_gathered_once(layout)
                    else Gather.apply(next(given), layout)
                )
            ]
            try:
                return last._compute_with(whole, begin, (x,), kwargs)
            finally:
                for module in self._drop_paths:
                    module.keep = None

        tensors = [x.to(first.dtype), *itertools.chain(*rows)]
        if not torch.is_grad_enabled():  # else the function would save what a backward pass needs
            tensors = [values.detach() for values in tensors]
        return ScanWithRecomputation.apply(compute, dtypes, self._device, self._offloads, *tensors)


def _is_gathered_once(layout: Layout) -> bool:
    """Return True for norms and biases, whose values of all blocks are small. In each round of a
    loop, their gradients would be all-reduces: a shard of them is no whole tile. These are not
    asynchronous, so they wait for all that the links still have to do."""
    return len(layout.shape) == 1


def _cast(tensors: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tensors
    )
