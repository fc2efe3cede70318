"""All transformer blocks as one: parameters stacked, computed by a loop inside the graph.

Graph, compilation and the host's tracing no longer grow with the depth, and the compiler
cannot gather a block's weights before its turn or keep them after it: ZeRO-3's memory
without barriers. The backward loop recomputes each block from its input (full gradient
checkpointing), then lets go of its gathered weights again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch_xla
from timm.layers import DropPath
from torch import nn

from xla_fsdp.scan import Scan
from xla_fsdp.sharding.marks import Mark, MarkBoth


class _DropPath(nn.Module):
    """timm's DropPath, its probability a tensor: another one in each round of the loop."""

    keep: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        shape = (x.shape[0],) + (1,) * (x.dim() - 1)
        return x * (torch.bernoulli(self.keep.expand(shape)) / self.keep).to(x.dtype)


class ScannedBlocks(nn.Module):
    """Takes the place of timm's ``blocks``. ``block`` holds the parameters, (depth, *shape).

    ``adapt`` changes how a block computes, ``stack(name, parameter, depth)`` makes zeros for one
    of its parameters, ``constant`` puts a small tensor on the devices; ``mark_tokens`` and
    ``gather(name, weight)`` tell the partitioner how activations lie and where a weight is
    gathered. Names are those in a block.
    """

    def __init__(
        self,
        blocks: nn.Sequential,
        *,
        adapt: Callable[[nn.Module], None],
        stack: Callable[[str, torch.Tensor, int], nn.Parameter],
        constant: Callable[[torch.Tensor], torch.Tensor],
        mark_tokens: Mark,
        gather: Callable[[str, torch.Tensor], torch.Tensor],
        bf16: bool,
    ) -> None:
        super().__init__()
        self.block = copy.deepcopy(blocks[-1]).to("meta")
        adapt(self.block)
        self._depth, self._bf16 = len(blocks), bf16
        self._mark_tokens, self._gather = mark_tokens, gather
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parameters = [*self.block.parameters()]
        if torch.is_grad_enabled():
            return _ScanWithGrad.apply(self, x, *parameters)
        return self._run_forward(x, parameters, keep_inputs=False)[0]

    # -- the two loops ----------------------------------------------------------------

    def _scan(self, key: str, body, state, inputs, *, reverse: bool = False) -> Scan:
        """The loop for this state, traced the first time that it is wanted."""
        whole = (key, self.training, *((tuple(each.shape), each.dtype) for each in state))
        if whole not in self._scans:
            self._scans[whole] = Scan(body, state, inputs, reverse=reverse)
        return self._scans[whole]

    def _compute(
        self, x: torch.Tensor, parameters: list[torch.Tensor], keep: list[torch.Tensor]
    ) -> torch.Tensor:
        x = MarkBoth.apply(x, self._mark_tokens)
        for module, probability in zip(self._drop_paths, keep, strict=True):
            module.keep = probability
        names = [name for name, _ in self.block.named_parameters()]
        gathered = [self._gather(*each) for each in zip(names, parameters, strict=True)]
        values = dict(zip(names, gathered, strict=True))
        with torch.autocast("xla", dtype=torch.bfloat16, enabled=self._bf16):
            y = torch.func.functional_call(self.block, values, (x,))
        for module in self._drop_paths:  # left alive, they would be computed with the step
            del module.keep
        return MarkBoth.apply(y.to(x.dtype), self._mark_tokens)

    def _run_forward(self, x, parameters, *, keep_inputs: bool):
        count = len(parameters)

        def body(state, slices):
            (x,) = state
            with torch.no_grad():
                y = self._compute(x, slices[:count], slices[count:])
            return [y], [x * 1] if keep_inputs else []

        inputs = [*parameters, *self._keep]
        scan = self._scan(f"forward {keep_inputs}", body, [x], inputs)
        seeds = None
        if scan.draws:
            seeds = torch.randint(0, 2**62, (self._depth,), dtype=torch.int64, device=x.device)
        (y,), kept = scan([x], inputs, seeds)
        return y, kept, seeds

    def _run_backward(self, grad, x_of_each, parameters, seeds):
        count = len(parameters)

        def body(state, slices):
            x, weights = slices[0].detach(), [w.detach() for w in slices[1 : 1 + count]]
            with torch.enable_grad():
                wanted = [each.requires_grad_() for each in (x, *weights)]
                y = self._compute(x, weights, slices[1 + count :])
                grad_x, *grads = torch.autograd.grad(y, wanted, state)
            return [grad_x], grads

        inputs = [x_of_each, *parameters, *self._keep]
        scan = self._scan("backward", body, [grad], inputs, reverse=True)
        (grad_x,), grads = scan([grad], inputs, seeds)
        return grad_x, grads


class _ScanWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scanned: ScannedBlocks, x, *parameters):
        y, (inputs,), seeds = scanned._run_forward(x, list(parameters), keep_inputs=True)
        ctx.scanned, ctx.seeds = scanned, seeds
        ctx.save_for_backward(inputs, *parameters)
        return y

    @staticmethod
    def backward(ctx, grad):
        inputs, *parameters = ctx.saved_tensors
        grad_x, grads = ctx.scanned._run_backward(grad, inputs, parameters, ctx.seeds)
        return None, grad_x, *grads
