"""All transformer blocks as one: parameters stacked, computed by a loop inside the graph.

Graph, compilation and the host's tracing no longer grow with the depth, and the compiler cannot
gather a block's weights before its turn or keep them after it: ZeRO-3's memory without barriers.
The backward loop recomputes each block from its input and what the forward loop has saved of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
import torch_xla
from timm.layers import DropPath
from torch import nn

from models.initialize import fill_buffers
from xla_fsdp.layout import MeshLayout, mark_both
from xla_fsdp.loop import Scan, same
from xla_fsdp.remat import SaveInput
from xla_fsdp.torch_xla_private import moved_to


class _DropPath(nn.Module):
    """timm's DropPath, its probability a tensor: another one in each round of the loop."""

    keep: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        shape = (x.shape[0],) + (1,) * (x.dim() - 1)
        return x * (torch.bernoulli(self.keep.expand(shape)) / self.keep).to(x.dtype)


_Names = tuple[list[str], list[str]]
"""Of the keyword arguments that each block is given: those shared by all, and its own ones."""


class ScannedBlocks(nn.Module):
    """All blocks in one module, called once for all (``ModelSpec.put_blocks``).

    ``block`` holds the parameters, (depth, *shape).

    ``adapt`` changes how a block computes; ``save`` says what is saved of it for the backward loop.
    ``layout`` places parameters and marks activations; ``gather(name, weight)`` marks where a
    weight is gathered, by its name in a block.
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
        self.block = copy.deepcopy(blocks[-1]).to("meta")
        adapt(self.block)
        fill_buffers(self.block, layout.constant)  # the same in every block
        save.adapt(self.block)
        self._depth, self._bf16 = len(blocks), bf16
        self._layout, self._save, self._gather = layout, save, gather
        self._scans: dict[tuple, Scan] = {}
        self._drop_paths: list[_DropPath] = []
        self._keep: list[torch.Tensor] = []
        for name, module in list(self.block.named_modules()):
            if isinstance(module, DropPath):
                rates = [getattr(block.get_submodule(name), "drop_prob", 0.0) for block in blocks]
                self._keep.append(layout.constant(1.0 - torch.tensor(rates)))
                self._drop_paths.append(_DropPath())
                self.block.set_submodule(name, self._drop_paths[-1])
        for name, parameter in list(self.block.named_parameters()):
            owner, _, key = name.rpartition(".")
            stacked = layout.stacked_zeros(name, parameter, self._depth)
            self.block.get_submodule(owner)._parameters[key] = stacked

    @torch.no_grad()
    def fill(self, index: int, block: nn.Module) -> None:
        """Put a block's values in its place. One graph for every index."""
        place = torch.tensor([index]).to(torch_xla.device())
        for name, stacked in self.block.named_parameters():
            given = block.get_parameter(name).detach()
            values = self._layout.send(given, self._layout.block_spec(name, given.shape))
            # In place: the other blocks' values are not copied.
            stacked.index_copy_(0, place, values.unsqueeze(0))

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
        names, values = ([*shared], [*stacked]), [*shared.values()]
        # What is another in each round: the parameters, and what is given beside them.
        of_each = [*stacked.values(), *self.block.parameters()]
        trains = any(each.requires_grad for each in (x, *of_each))
        if trains and torch.is_grad_enabled():
            return _ScanWithGrad.apply(self, names, x, *values, *of_each)
        return self._run_forward(names, x, values, of_each, save=False)[0]

    # -- the loop forward; backward is in ``_ScanWithGrad`` ---------------------------

    def _run_forward(self, names: _Names, x, shared, of_each, *, save: bool):
        count = len(of_each)

        def body(state, slices):
            x, *shared = state
            if not save:
                y = self._compute(names, x, shared, slices[:count], slices[count:])
                return [y, *shared], []
            x, *own = (each.detach().requires_grad_() for each in (x, *slices[:count]))
            with self._save.save(x) as saved:
                y = self._compute(names, x, shared, own, slices[count:])
            x, *results = saved
            x = moved_to("pinned_host", x) if self._save.on_host else x
            saved = [x, *(self._layout.mark_saved(same(each)) for each in results)]
            return [y, *shared], saved

        inputs, state = [*of_each, *self._keep], [x, *shared]
        scan = self._scan(f"forward {save}", body, state, inputs)
        seeds = None
        if scan.draws:
            seeds = torch.randint(0, 2**62, (self._depth,), dtype=torch.int64, device=x.device)
        (y, *_), saved = scan(state, inputs, seeds)
        return y, saved, seeds

    def _scan(self, key: str, body, state, inputs, *, reverse: bool = False) -> Scan:
        """Return the loop for this state, traced the first time that it is needed."""
        whole = (key, self.training, *((tuple(each.shape), each.dtype) for each in state))
        if whole not in self._scans:
            self._scans[whole] = Scan(body, state, inputs, rounds=self._depth, reverse=reverse)
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
        x = mark_both(x, self._layout.mark_tokens)
        of_all, own = names
        count = len(own)
        arguments = dict(zip(of_all, shared, strict=True))
        arguments |= dict(zip(own, of_each[:count], strict=True))
        for module, probability in zip(self._drop_paths, keep, strict=True):
            module.keep = probability
        keys = [key for key, _ in self.block.named_parameters()]
        gathered = [self._gather(*each) for each in zip(keys, of_each[count:], strict=True)]
        values = dict(zip(keys, gathered, strict=True))
        with torch.autocast("xla", dtype=torch.bfloat16, enabled=self._bf16):
            y = torch.func.functional_call(self.block, values, (x,), arguments)
        for module in self._drop_paths:  # left alive, they would be computed with the step
            del module.keep
        return mark_both(y.to(x.dtype), self._layout.mark_tokens)


class _ScanWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scanned: ScannedBlocks, names: _Names, x, *given):
        count = len(names[0])
        shared, of_each = list(given[:count]), list(given[count:])
        y, saved, seeds = scanned._run_forward(names, x, shared, of_each, save=True)
        ctx.scanned, ctx.names, ctx.seeds, ctx.saved = scanned, names, seeds, len(saved)
        ctx.save_for_backward(*saved, *given)
        return y

    @staticmethod
    def backward(ctx, grad):
        saved, given = ctx.saved_tensors[: ctx.saved], ctx.saved_tensors[ctx.saved :]
        scanned, names, number = ctx.scanned, ctx.names, ctx.saved
        shared, of_each = given[: len(names[0])], given[len(names[0]) :]
        count = len(of_each)

        def body(state, slices):
            grad, *shared = state
            (x, *results), rest = slices[:number], slices[number:]
            x = moved_to("device", x) if scanned._save.on_host else x
            results = [scanned._layout.mark_saved(same(each)) for each in results]
            x, *own = (each.detach().requires_grad_() for each in (x, *rest[:count]))
            with scanned._save.rematerialize(results):
                y = scanned._compute(names, x, shared, own, rest[count:])
            grad_x, *grads = torch.autograd.grad(y, [x, *own], grad)
            return [grad_x, *shared], grads

        inputs, state = [*saved, *of_each, *scanned._keep], [grad, *shared]
        scan = scanned._scan("backward", body, state, inputs, reverse=True)
        (grad_x, *_), grads = scan(state, inputs, ctx.seeds)
        return None, None, grad_x, *[None] * len(shared), *grads
