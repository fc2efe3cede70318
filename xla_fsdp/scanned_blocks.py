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
from dataclasses import dataclass

import torch
import torch_xla
from timm.layers import DropPath
from torch import nn

from models.meta import fill_buffers
from xla_fsdp.kept import KeptInput
from xla_fsdp.scan import Scan, same
from xla_fsdp.sharding.marks import Mark, MarkBoth


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
